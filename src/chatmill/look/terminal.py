"""Writing to a terminal: the width to fit, whether Unicode can be shown, and a pager where the output is long."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import IO

from rich.console import RenderableType

from chatmill.console import plain_console

WIDEST = 120
PIPED = 80


class Screen:
    """Where lines go: through a pager into a terminal, or plainly into a pipe (80 columns, no colour)."""

    def __init__(self, *, paged: bool = False, file: IO[str] | None = None) -> None:
        """`paged`: use a pager ($PAGER, else less) where the output is a terminal."""
        out = file or sys.stdout
        self._paged = paged and out.isatty()
        self.width = width_of(out)
        self.ascii_only = not _shows(out, "\u2588\u258c\u00b7")
        if self.ascii_only:
            # texts of any language go through here: what the terminal cannot show is spelled out, never an error
            getattr(out, "reconfigure", lambda **_: None)(errors="backslashreplace")
        self.console = plain_console(file=out, width=self.width)

    def show(self, parts: Iterable[RenderableType]) -> None:
        """Print renderables as they come; in a pager only as far as it is read."""
        pager = _pager() if self._paged else None
        if pager is None:
            for part in parts:
                self._print(part)
            return
        # -F: what fits the screen is not paged; -R: colours; -X: it stays on the screen afterwards
        environment = {"LESS": "-FRX", **os.environ}
        with subprocess.Popen(pager, stdin=subprocess.PIPE, env=environment, text=True, encoding="utf-8") as process:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the reader may leave before the end
                for text in self._ansi(parts):
                    process.stdin.write(text)
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def _print(self, part: RenderableType) -> None:
        self.console.print(part, soft_wrap=False, overflow="fold")

    def _ansi(self, parts: Iterable[RenderableType]) -> Iterator[str]:
        for part in parts:
            with self.console.capture() as captured:
                self._print(part)
            yield captured.get()


def _pager() -> list[str] | None:
    """The command of the pager: $PAGER, else less; None where there is none."""
    command = shlex.split(os.environ.get("PAGER") or "less")
    return command if command and shutil.which(command[0]) else None


def width_of(out: IO[str]) -> int:
    """Columns of a terminal; for a pipe COLUMNS where it is set, else 80."""
    if out.isatty():
        return min(shutil.get_terminal_size().columns, WIDEST)
    asked = os.environ.get("COLUMNS", "")
    return min(int(asked), WIDEST) if asked.isdigit() and int(asked) > 20 else PIPED


def _shows(out: IO[str], text: str) -> bool:
    try:
        text.encode(getattr(out, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
