"""Files that survive a crash: growing with a running hash, synced to disk, locked while they are written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.whole_file import sync_file, sync_folder
from chatmill.errors import ConfigError
from chatmill.store.checksums import FileRecord, Hash

PIECE = 1 << 16
"""Bytes that are hashed and handed to the system at a time, while they lie in the processor's cache."""
BUFFER = PIECE // 2
"""Smaller writes are gathered up to this size; larger ones pass by."""


class Durability(StrEnum):
    """What a crash of the machine may do to files that were published."""

    SYNCED = "synced"
    """Nothing: they are on disk before they get their name."""
    SCRATCH = "scratch"
    """They may be damaged until they are synced, so their hashes are checked before they are used after a restart."""


class GrowingFile:
    """A file being written, with the size and the hash of its bytes."""

    def __init__(self, path: Path, durability: Durability = Durability.SYNCED, hash: Hash = Hash.XXH128) -> None:
        """Create the file; an existing one is replaced."""
        self.path = path
        self.size = 0
        self._durability = durability
        self._hash, self._digest = hash, hash.begin()
        self._file: IO[bytes] = path.open("wb", buffering=BUFFER)

    @property
    def record(self) -> FileRecord:
        """Size and hash of the bytes written so far."""
        return FileRecord(bytes=self.size, digest=self._digest.hexdigest(), hash=self._hash)

    def write(self, values: NDArray[Any] | bytes | memoryview) -> None:
        """Append the bytes of an array, or anything else with a contiguous buffer."""
        data = as_buffer(values) if isinstance(values, np.ndarray) else memoryview(values).cast("B")
        for first in range(0, len(data), PIECE):
            piece = data[first : first + PIECE]
            self._file.write(piece)
            self._digest.update(piece)
        self.size += len(data)

    def flush(self) -> None:
        """Hand everything to the system."""
        self._file.flush()

    def finish(self) -> FileRecord:
        """Flush, sync to disk unless it is scratch, and close; size and hash of what was written."""
        self._file.flush()
        if self._durability is Durability.SYNCED:
            os.fsync(self._file.fileno())
        self._file.close()
        return self.record

    def discard(self) -> None:
        """Close without a sync; a write error at this point changes nothing."""
        with contextlib.suppress(OSError):
            self._file.close()


def as_buffer(values: NDArray[Any]) -> memoryview:
    """The bytes of an array in C order, without a copy where it lies so."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def lock(descriptor: int, held: str, *, shared: bool = False) -> None:
    """Lock an open file or folder until it is closed or its process dies; `held` is the error where another has it.

    Where the system or the file system has no such locks, nothing is locked.
    """
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(held) from None
    except OSError:  # some network file systems
        pass


def remove_path(path: Path) -> None:
    """Remove a file, a link (never what it leads to) or a folder with all that is in it; nothing there is fine.

    `shutil.rmtree` is not used: interrupted at a bad moment, it closes a descriptor twice and reports that.
    """
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    for place, folders, names in os.walk(path, topdown=False):
        for name in names:
            os.unlink(os.path.join(place, name))
        for name in folders:
            below = os.path.join(place, name)
            os.unlink(below) if os.path.islink(below) else os.rmdir(below)
    os.rmdir(path)


def sync_files(folder: Path, names: Iterable[str]) -> None:
    """Wait until files of a folder, and their names in it, are on disk."""
    for name in names:
        sync_file(folder / name)
    sync_folder(folder)


def sync_tree(root: Path) -> None:
    """Wait until a folder with all that is in it is on disk."""
    for place, _, names in os.walk(root):
        sync_files(Path(place), names)
