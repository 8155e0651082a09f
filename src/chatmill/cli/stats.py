"""Show what a dataset holds: lengths, what is trained by role, source and turn, fill, and the ledger.

DATASET is what chatmill inspect takes. Splits are read once, in memory that does not grow.

Example: chatmill stats data/built

Example: chatmill stats data/built --split train --json
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chatmill.cli import options

if TYPE_CHECKING:
    from chatmill.look.items import Progress


def command(
    dataset: Annotated[Path, typer.Argument(metavar="DATASET", help="Folder or file of the dataset.")],
    split: Annotated[str | None, options.SPLIT] = None,
    no_pager: Annotated[bool, typer.Option("--no-pager", help="Never page, even in a terminal.")] = False,
    quiet: Annotated[bool, options.QUIET] = False,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Print tables and plots about a dataset."""
    import json

    from chatmill.look.dataset import open_for_looking
    from chatmill.look.stats import dataset_stats
    from chatmill.look.stats_view import stats_parts
    from chatmill.look.terminal import Screen

    opened = open_for_looking(dataset)
    with shown_progress(quiet, "reading tokens") as progress:
        stats = dataset_stats(opened, [split] if split else None, progress)
    if as_json:
        typer.echo(json.dumps(stats.as_json(), ensure_ascii=False))
        return
    screen = Screen(paged=not no_pager)
    screen.show(stats_parts(stats, width=screen.width, ascii_only=screen.ascii_only))


@contextmanager
def shown_progress(quiet: bool, words: str) -> Iterator[Progress | None]:
    """A callback that draws a bar on standard error; None where that is no terminal."""
    import sys

    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, Progress, TimeRemainingColumn

    from chatmill.console import plain_column, plain_console

    console = plain_console(stderr=True)
    with Progress(
        plain_column("{task.description}"), BarColumn(), TimeRemainingColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task(words, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
