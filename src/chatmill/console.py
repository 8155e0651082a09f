"""The one way to rich: consoles and columns that print every string as it is.

Names, ids, paths and reasons come from data and arguments. Rich would read `[red]` in them as markup and `:smile:` as
an emoji: text vanishes, and `[/INST]` is an error. Everything that draws uses these functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TextColumn
    from rich.table import Table

REFRESHES = 4
"""Redraws of a bar per second: spinner and seconds move each time, also while nothing is finished."""


def plain_console(
    *,
    stderr: bool = False,
    soft_wrap: bool = False,
    file: IO[str] | None = None,
    width: int | None = None,
    colour: bool | None = None,
) -> Console:
    """Make a console that reads no string as markup or emoji and colours nothing by itself.

    `colour`: whether styles are written; default: only to a terminal.
    """
    from rich.console import Console

    return Console(
        stderr=stderr,
        soft_wrap=soft_wrap,
        file=file,
        width=width,
        force_terminal=colour,
        color_system="auto" if colour is None else "standard" if colour else None,
        highlight=False,
        markup=False,
        emoji=False,
    )


def plain_column(form: str) -> TextColumn:
    """Make a column of a progress bar; `form` as `TextColumn` takes it."""
    from rich.progress import TextColumn

    return TextColumn(form, markup=False)


@contextmanager
def shown_count(
    quiet: bool = False, *, first: str = "", unit: str = "", stays: bool = False
) -> Iterator[Callable[..., None] | None]:
    """Give a callback that draws a progress bar on standard error: `show(label, done, of, words)`.

    `of` is 0 if unknown. `first` is the label until the first call; with `stays` the bar remains at the end. None if
    `quiet`, or if standard error is not a terminal.
    """
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TimeRemainingColumn

    progress = Progress(
        SpinnerColumn(finished_text=""),  # a text would be markup
        plain_column("{task.description}"),
        BarColumn(),
        plain_column("{task.fields[count]}"),
        plain_column("{task.elapsed:.1f} s"),
        TimeRemainingColumn(),
        plain_column("{task.fields[words]}"),
        refresh_per_second=REFRESHES,
        console=plain_console(stderr=True),
        transient=not stays,
    )
    with progress:
        task = progress.add_task(first, total=None, count=f"0{unit}", words="")

        def show(label: str, done: int, of: int, words: str = "") -> None:
            count = f"{done:,}/{of:,}{unit}" if of else f"{done:,}{unit}"
            progress.update(task, description=label, completed=done, total=of or None, count=count, words=words)

        yield show


def plain_table(*names: str, right: Iterable[str] = ()) -> Table:
    """Make a table without lines; the columns `right` come last and hold numbers, which never wrap."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table
