"""Files that survive a crash: growing with a running hash, synced to disk, locked while they are written."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import ConfigError
from chatmill.store.episode_manifest import FileRecord

BUFFER = 1 << 20


class Durability(StrEnum):
    """What a crash of the machine may do to files that were published."""

    SYNCED = "synced"
    """Nothing: they are on disk before they get their name. Their hash is that of what was written."""
    SCRATCH = "scratch"
    """They may be damaged, so whoever uses them after a restart checks the hash; it is that of what was read back."""


class GrowingFile:
    """A file being written, with the hash of its bytes."""

    def __init__(self, path: Path, durability: Durability = Durability.SYNCED) -> None:
        self.path = path
        self._synced = durability is Durability.SYNCED
        self._file: IO[bytes] = path.open("wb", buffering=BUFFER)
        self._hash = hashlib.sha256()
        self._bytes = 0

    def write(self, values: NDArray[Any] | bytes) -> None:
        """Append the bytes of an array (or bytes)."""
        data = as_buffer(values) if isinstance(values, np.ndarray) else values
        self._file.write(data)
        if self._synced:
            self._hash.update(data)
        self._bytes += len(data)

    def finish(self) -> FileRecord:
        """Flush, sync to disk (or read it back) and close."""
        self._file.flush()
        if self._synced:
            os.fsync(self._file.fileno())
        self._file.close()
        if self._synced:
            return FileRecord(bytes=self._bytes, sha256=self._hash.hexdigest())
        with self.path.open("rb", buffering=0) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = os.fstat(file.fileno()).st_size
        if size != self._bytes:
            raise OSError(errno.EIO, f"{self._bytes} bytes were written, and {size} are there", str(self.path))
        return FileRecord(bytes=size, sha256=digest)

    def discard(self) -> None:
        """Close without a sync; a write error at this point changes nothing."""
        with contextlib.suppress(OSError):
            self._file.close()


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
    """Remove a file or a folder with all that is in it; nothing there is fine."""
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()


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
