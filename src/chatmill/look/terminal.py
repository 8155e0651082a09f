"""Where lines go: a terminal as wide as it is, or a pipe of 80 columns; what it cannot spell is escaped."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import IO

from rich.console import Console, RenderableType
from rich.text import Text

from chatmill.console import plain_console
from chatmill.look.safe_text import visible

WIDEST = 120
PIPED = 80
GUTTER = 12
"""Columns of the label."""


def screen(file: IO[str] | None = None) -> Console:
    """Make a console for standard output, or a file; what it cannot spell is escaped, never an error."""
    out = file or sys.stdout
    getattr(out, "reconfigure", lambda **_: None)(errors="backslashreplace")
    return plain_console(file=out, width=width_of(out))


def show(console: Console, parts: Iterable[RenderableType]) -> None:
    """Print renderables as they come."""
    for part in parts:
        console.print(part, soft_wrap=False, overflow="fold")


def width_of(out: IO[str]) -> int:
    """Find the columns of a terminal; for a pipe COLUMNS if it is set, else 80."""
    if out.isatty():
        return min(shutil.get_terminal_size().columns, WIDEST)
    columns = os.environ.get("COLUMNS", "")
    return min(int(columns), WIDEST) if columns.isdigit() and int(columns) > 20 else PIPED


def print_labelled(
    console: Console, label: str, text: str, *, style: str = "bold", indent: int = 0, gutter: int = GUTTER
) -> None:
    """Print a label and a text; long words are cut, nothing is wider than the console."""
    width = max(20, console.width - gutter - indent)
    shown = visible(text, mark_newlines=False)
    wrapped = textwrap.wrap(shown, width, break_on_hyphens=False, drop_whitespace=True) or [""]
    for number, part in enumerate(wrapped):
        line = Text(" " * indent)
        line.append(f"{'' if number else label:<{gutter}}", style=style)
        line.append(part)
        line.rstrip()
        console.print(line, soft_wrap=True)
