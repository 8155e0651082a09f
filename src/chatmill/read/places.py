"""Where records are read from: files on this machine, files in stores, which are copied first, and standard input."""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit

from chatmill.core.scratch import Scratch
from chatmill.errors import DataError
from chatmill.files import stores
from chatmill.files.inputs import StoredInput, find_input, input_name

STDIN = "-"
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
BLOCK = 4 << 20


@dataclass(slots=True)
class Elsewhere:
    """A file that is not on this machine's disk: behind a URL, or standard input."""

    url: str
    """As it was named; `-` for standard input."""
    _found: StoredInput | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        """Return its name as it may be printed."""
        return stores.hidden(self.url)

    def __fspath__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the name; its ending says what the file holds."""
        return stdin_copy().name if self.url == STDIN else input_name(self.url)

    @property
    def suffix(self) -> str:
        """The last ending of the name."""
        return Path(self.name).suffix

    def copy(self) -> Path:
        """Return the copy on this machine; that of a file in a store is in the cache, and fetched if need be."""
        return stdin_copy() if self.url == STDIN else self._look().copy()

    def _look(self) -> StoredInput:
        """Find the file in its store, once: all that is read of it is of one state."""
        self._found = self._found or find_input(self.url)
        return self._found

    def open(self, mode: str = "rb") -> IO[bytes]:
        """Open the copy."""
        return self.copy().open(mode)

    def is_file(self) -> bool:
        """Return whether it is there; an error where the store cannot be reached."""
        if self.url != STDIN:
            try:
                self._look()
            except DataError:
                return False
        return True

    @property
    def size(self) -> int:
        """In bytes."""
        return stdin_copy().stat().st_size if self.url == STDIN else self._look().bytes


Place = Path | Elsewhere


def place(path: str | os.PathLike[str]) -> Place:
    """Return a path or URL as something that can be opened."""
    if isinstance(path, Path | Elsewhere):
        return path
    text = os.fspath(path)
    if text.startswith("file://"):
        return Path(unquote(urlsplit(text).path))
    return Elsewhere(text) if is_elsewhere(text) else Path(text)


def is_elsewhere(path: str) -> bool:
    """Return whether a name is a URL or standard input."""
    return path == STDIN or (URL.match(path) is not None and not path.startswith("file://"))


def size_of(where: Place) -> int:
    """Bytes of a file."""
    return where.size if isinstance(where, Elsewhere) else where.stat().st_size


def matches(pattern: str) -> list[str]:
    """Return the URLs that match a URL with `*`, sorted; a URL without one gives itself."""
    if pattern == STDIN or not any(sign in pattern for sign in "*["):
        return [pattern]
    return stores.matching_urls(pattern)


def stdin_copy() -> Path:
    """All of standard input, JSON lines or a list, in a temporary file, since records are read more than once."""
    scratch, name = _copied_stdin()
    return scratch.folder / name


@cache
def _copied_stdin() -> tuple[Scratch, str]:
    scratch = Scratch()
    copy = scratch.folder / "stdin"
    with copy.open("wb") as out:
        shutil.copyfileobj(sys.stdin.buffer, out, BLOCK)
    with copy.open("rb") as file:
        first = file.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    return scratch, copy.rename(scratch.folder / ("stdin.json" if first == b"[" else "stdin.jsonl")).name
