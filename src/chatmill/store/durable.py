"""Files that survive a crash: growing with a running hash, synced to disk, locked while they are written."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import ConfigError
from chatmill.store.episode_manifest import FileRecord

PIECE = 1 << 16
"""Bytes that are hashed and handed to the system at a time, while they lie in the processor's cache."""
BUFFER = PIECE // 2
"""Smaller writes are gathered up to this size; larger ones pass by."""
STRETCH = 1 << 26
"""Bytes of a file that are brought to the disk at a time while it grows."""


class Durability(StrEnum):
    """What a crash of the machine may do to files that were published."""

    SYNCED = "synced"
    """Nothing: they are on disk before they get their name."""
    SCRATCH = "scratch"
    """They may be damaged until somebody syncs them, so whoever uses them after a restart checks their hashes."""


class Digest(Protocol):
    """A running digest, as those of `hashlib`."""

    def update(self, data: Any, /) -> None:
        """Take in the next bytes."""

    def hexdigest(self) -> str:
        """Of all bytes so far, as text."""


class WordSum:
    """The sum of a file's 64-bit words: finds what a crash of the machine does to a file, and costs next to nothing.

    It is for scratch files, which only their own build reads. A dataset has sha256.
    """

    PREFIX = "words:"
    """With it begins the text of such a sum, where otherwise there is a sha256."""

    def __init__(self) -> None:
        self._sum = self._size = 0

    def update(self, data: Any, /) -> None:
        """Add bytes; how they are cut does not matter."""
        phase = self._size % 8
        head = (8 - phase) % 8
        tail = head + max(len(data) - head, 0) // 8 * 8
        self._sum += int.from_bytes(data[:head], "little") << 8 * phase
        self._sum += int(np.add.reduce(np.frombuffer(data[head:tail], dtype="<u8")))
        self._sum += int.from_bytes(data[tail:], "little")
        self._size += len(data)

    def hexdigest(self) -> str:
        """The sum as text."""
        return f"{self.PREFIX}{self._sum % 2**64:016x}"


class GrowingFile:
    """A file being written, with the hash of its bytes.

    A large one that is to be synced is brought to the disk while it grows, so that the sync at its end has little left
    to do, and what is on the disk and more than a stretch behind leaves the system's cache, so that a large dataset
    does not drive out of the memory of the machine what others have there.
    """

    def __init__(
        self,
        path: Path,
        durability: Durability = Durability.SYNCED,
        digest: Callable[[], Digest] = hashlib.sha256,
    ) -> None:
        """Create the file; one that is there is replaced."""
        self.path = path
        self._synced = durability is Durability.SYNCED
        self._hash = digest()
        self._bytes = 0
        self._pushed = 0
        self._pushing: Future[None] | None = None
        self._file: IO[bytes] = path.open("wb", buffering=BUFFER)

    def write(self, values: NDArray[Any] | bytes) -> None:
        """Append the bytes of an array (or bytes)."""
        data = as_buffer(values) if isinstance(values, np.ndarray) else values
        for first in range(0, len(data), PIECE):
            piece = data[first : first + PIECE]
            self._file.write(piece)
            self._hash.update(piece)
        self._bytes += len(data)
        if self._synced and self._bytes - self._pushed >= STRETCH:
            self._push()

    def _push(self) -> None:
        """Let another thread bring what is there to the disk; waits, where that has not yet happened to the last."""
        self._wait()
        self._file.flush()
        self._pushing = _pusher().submit(_bring_to_disk, self._file.fileno(), self._pushed)
        self._pushed = self._bytes

    def _wait(self) -> None:
        """Wait for the other thread; an error that it met is raised here; the system reports it only once."""
        if self._pushing is not None:
            wait([self._pushing])  # interrupted here, it is still there to be waited for
            pushing, self._pushing = self._pushing, None
            pushing.result()

    def flush(self) -> None:
        """Hand everything to the system."""
        self._file.flush()

    def finish(self) -> FileRecord:
        """Flush, sync to disk where that is asked for, and close; size and hash of what was written."""
        self._wait()
        self._file.flush()
        if self._synced:
            os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(bytes=self._bytes, sha256=self._hash.hexdigest())

    def discard(self) -> None:
        """Close without a sync; a write error at this point changes nothing."""
        with contextlib.suppress(OSError):
            self._wait()
        with contextlib.suppress(OSError):
            self._file.close()


@functools.cache
def _pusher() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="chatmill-to-disk")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pusher.cache_clear)  # the thread stays behind


def _bring_to_disk(descriptor: int, before: int) -> None:
    """Sync a file, and let the system forget its copy of the first `before` bytes."""
    os.fsync(descriptor)
    if before and hasattr(os, "posix_fadvise"):  # 0 would mean all of it
        with contextlib.suppress(OSError):  # a hint, which a file system need not know
            os.posix_fadvise(descriptor, 0, before, os.POSIX_FADV_DONTNEED)


def as_buffer(values: NDArray[Any]) -> memoryview:
    """The bytes of an array in C order, without a copy where it lies so."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the system can do that."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # folders cannot be opened on this platform
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync names by themselves
            raise
    finally:
        os.close(descriptor)


def lock_file(path: Path) -> IO[bytes]:
    """Open the mark and lock it; the system lets go of the lock when its process dies."""
    lock: IO[bytes] = path.open("ab")
    try:
        import fcntl
    except ImportError:  # no such locks on this platform
        return lock
    try:
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ConfigError(f"{path}: another process is writing this split now") from None
    except OSError:  # a file system without locks; two writers at once are then not noticed
        pass
    return lock


def remove_path(path: Path) -> None:
    """Remove a file, a link (never what it leads to) or a folder with all that is in it; nothing there is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_published(path: Path, data: bytes, durability: Durability) -> None:
    """Write a file, and wait until it is on disk where that is asked for."""
    if durability is Durability.SYNCED:
        write_synced(path, data)
    else:
        path.write_bytes(data)


def sync_files(folder: Path, names: Iterable[str]) -> None:
    """Wait until files of a folder, and their names in it, are on disk."""
    for name in names:
        descriptor = os.open(folder / name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    sync_folder(folder)
