"""Where lines go: a terminal as wide as it is, or a pipe of 80 columns; what it cannot spell is escaped."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from typing import IO

from rich.console import RenderableType

from chatmill.console import plain_console

WIDEST = 120
PIPED = 80


class Screen:
    """Standard output, or a file, for renderables."""

    def __init__(self, file: IO[str] | None = None) -> None:
        out = file or sys.stdout
        # texts of any language go through here: what the terminal cannot show is spelled out, never an error
        getattr(out, "reconfigure", lambda **_: None)(errors="backslashreplace")
        self.width = width_of(out)
        self.console = plain_console(file=out, width=self.width)

    def show(self, parts: Iterable[RenderableType]) -> None:
        """Print renderables as they come."""
        for part in parts:
            self.console.print(part, soft_wrap=False, overflow="fold")


def width_of(out: IO[str]) -> int:
    """Columns of a terminal; for a pipe COLUMNS where it is set, else 80."""
    if out.isatty():
        return min(shutil.get_terminal_size().columns, WIDEST)
    asked = os.environ.get("COLUMNS", "")
    return min(int(asked), WIDEST) if asked.isdigit() and int(asked) > 20 else PIPED
