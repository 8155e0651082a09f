"""Where records are read from: files on this machine, files in stores, which are copied first, and standard input."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit

from chatmill.core.publish import whole_file
from chatmill.core.scratch import Scratch
from chatmill.errors import DataError
from chatmill.files import stores
from chatmill.files.inputs import StoredInput, find_input, input_name
from chatmill.read.run_folders import RunFiles, run_files

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


class RunFolder(Elsewhere):
    """A folder with the files of one run of an agent, which are read as one file of lines."""

    __slots__ = ()

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The name of the folder, with the ending of what it is read as."""
        return f"{Path(self.url).absolute().name}.jsonl"

    @property
    def files(self) -> RunFiles:
        """The files of the run."""
        found = run_files(Path(self.url))
        if found is None:
            raise DataError(f"{self.url} holds no run of an agent any more")
        return found

    def copy(self) -> Path:
        """Return all files as one, which lives as long as this process."""
        return _joined_run(self.url, self.files.state) / self.name

    def copy_into(self, folder: Path) -> Path:
        """Write all files as one into a folder, if it is not there yet."""
        files = self.files
        target = folder / hashlib.blake2b(files.state.encode(), digest_size=16).hexdigest() / self.name
        if not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(target) as partial:
                with partial.open("wb") as out:
                    files.write(out)
                os.utime(partial, ns=(files.mtime_ns, files.mtime_ns))
        return target

    def is_file(self) -> bool:
        """Return whether the folder still holds a run."""
        return run_files(Path(self.url)) is not None

    @property
    def size(self) -> int:
        """In bytes."""
        return self.files.size


Place = Path | Elsewhere


def place(path: str | os.PathLike[str]) -> Place:
    """Return a path or URL as something that can be opened."""
    if isinstance(path, Elsewhere):
        return path
    text = os.fspath(path)
    if text.startswith("file://"):
        return Path(unquote(urlsplit(text).path))
    if is_elsewhere(text):
        return Elsewhere(text)
    return RunFolder(text) if is_run_folder(text) else Path(text)


def is_run_folder(path: str) -> bool:
    """Return whether a name is a folder with the files of one run of an agent."""
    return os.path.isdir(path) and run_files(Path(path)) is not None


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


@lru_cache(maxsize=256)
def _joined_run(folder: str, state: str) -> Path:
    """Write the files of a run as one into a folder of its own; `state` is that of the files."""
    scratch = Scratch()
    _SCRATCHES.append(scratch)
    copy = RunFolder(folder).copy_into(scratch.folder)
    return copy.parent


_SCRATCHES: list[Scratch] = []
"""Folders of copies, removed with the process."""


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
