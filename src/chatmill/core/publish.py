"""Files and folders that are there whole or not at all: temporary name, sync, rename, sync of the folder.

A killed process leaves at most files and folders named `.tmp-<pid>-<random>`, which `sweep_orphans` removes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.checksums import FileRecord, Hash
from chatmill.errors import ChatmillError, ConfigError

PIECE = 1 << 16
"""Bytes that are hashed and handed to the system at a time, while they lie in the processor's cache."""
BUFFER = PIECE // 2
"""Smaller writes are gathered up to this size; larger ones pass by."""
TEMPORARY = re.compile(r"\.tmp-\d+-[0-9a-f]{16}")
"""The names that nothing but this module gives."""

_FULL = "free some space there or choose a folder on another disk; a build can then be resumed"
_REFUSED = "look at its permissions (ls -l), or choose another place"
WAYS_OUT = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "the file system or a limit (ulimit -f) allows no file of this size; write smaller shards",
    errno.EACCES: _REFUSED,
    errno.EPERM: _REFUSED,
    errno.EROFS: _REFUSED,
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EEXIST: "something of this name is there and is no folder; choose another name",
    errno.ENOENT: "check that the path is right and that nothing else is deleting files there",
    errno.ENOTDIR: "a part of this path is a file; choose another folder",
    errno.EMFILE: "raise the limit on open files (ulimit -n) or use fewer workers",
    errno.EIO: "the disk reports an error; check it (dmesg), and build on another one",
}


class StorageError(ChatmillError, OSError):
    """The disk did not do what was asked: full, not writable, gone. An `OSError` with its `errno` and `filename`."""

    def __init__(self, path: str | os.PathLike[str], action: str, number: int | None, reason: str) -> None:
        """`action` is a verb for what was tried, e.g. "write"."""
        self.path, self.action = str(path), action
        OSError.__init__(self, number, reason, str(path))

    def __str__(self) -> str:
        number = self.errno or 0
        name = errno.errorcode.get(number, "no error number")
        way_out = WAYS_OUT.get(number, "check the disk and the folder")
        return f"{self.path}: cannot {self.action}: {self.strerror} ({name}); {way_out}"

    def __reduce__(self) -> tuple[object, ...]:
        return (StorageError, (self.path, self.action, self.errno, self.strerror))


@contextlib.contextmanager
def storing(path: str | os.PathLike[str], action: str = "write") -> Iterator[None]:
    """Turn any `OSError` of the block into one `StorageError` about `path`."""
    try:
        yield
    except ChatmillError:
        raise
    except OSError as error:
        raise StorageError(path, action, error.errno, error.strerror or str(error)) from error


def temporary_beside(path: Path) -> Path:
    """Return a new name in the folder of `path`, so that renaming it to `path` is one step; nothing is created."""
    return path.parent / f".tmp-{os.getpid()}-{secrets.token_hex(8)}"


class GrowingFile:
    """A file being written, with the size and the hash of its bytes; whoever gives it its name syncs it before."""

    def __init__(self, path: Path, hash: Hash = Hash.XXH128) -> None:
        """Create the file; an existing one is replaced."""
        self.path = path
        self.size = 0
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
        """Close it; size and hash of what was written."""
        self._file.close()
        return self.record

    def discard(self) -> None:
        """Close it; a write error at this point changes nothing."""
        with contextlib.suppress(OSError):
            self._file.close()


def as_buffer(values: NDArray[Any]) -> memoryview:
    """Return the bytes of an array in C order, without a copy where it lies so."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary name next to `path` for the block to write to; the file gets its own name when the block ends well.

    An existing file is replaced, something else under the name never. The bytes are on disk before the name is.
    Threads, and machines that share a folder, may write the same file at once: each has a temporary name of its own.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is there and is no plain file; it is not replaced: choose another name")
    temporary = temporary_beside(path)
    try:
        yield temporary
        sync_file(temporary)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a whole file in one step: readers see the old one or the new one."""
    with storing(path), whole_file(Path(path)) as temporary:
        temporary.write_bytes(data)


def join_files(parts: Sequence[Path], target: Path, hash: Hash = Hash.XXH128) -> FileRecord | None:
    """Write files one after the other into one; None, and no file, if there are none."""
    if not parts:
        return None
    with storing(target), whole_file(target) as temporary:
        file = GrowingFile(temporary, hash)
        try:
            for part in parts:
                file.write(part.read_bytes())
            return file.finish()
        finally:
            file.discard()


def temporary_folder(final: str | os.PathLike[str]) -> Path:
    """Create a folder next to `final` for `publish_folder`; its parents are created as well."""
    path = Path(final)
    with storing(path, "create the folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = temporary_beside(path)
        folder.mkdir()
    return folder


@contextlib.contextmanager
def whole_folder(final: str | os.PathLike[str], *, replace: bool = False) -> Iterator[Path]:
    """A temporary folder next to `final` for the block to fill; `publish_folder` then gives it its name."""
    temporary = temporary_folder(final)
    try:
        yield temporary
        publish_folder(temporary, final, replace=replace)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # on a full disk this may be what lets others finish


def publish_folder(
    temporary: str | os.PathLike[str],
    final: str | os.PathLike[str],
    *,
    replace: bool = False,
    synced: bool = True,
) -> None:
    """Sync everything in a folder and rename it to `final`, on the same file system.

    A folder that is there already is refused. With `replace` it is moved to a temporary name first and removed last;
    a kill between the two renames leaves no `final`, but never a mixture. Without `synced` a crash of the machine may
    damage it: for work whose hashes are compared before it is used again.
    """
    source, target = Path(temporary), Path(final)
    old: Path | None = None
    with storing(target, "publish the folder"):
        if target.exists() and not replace:
            raise ConfigError(f"{target}: is there already; a published folder is not replaced: remove it first")
        if synced:
            sync_tree(source)
        if replace and target.exists():  # else another process has published it meanwhile, and the rename fails
            old = temporary_beside(target)
            os.rename(target, old)
        os.rename(source, target)
        if synced:
            sync_folder(target.parent)
    if old is not None:
        with storing(old, "remove the replaced folder"):
            remove_path(old)


def sweep_orphans(folder: str | os.PathLike[str]) -> list[Path]:
    """Remove what killed processes left in a folder and below it; returns the paths removed.

    Only names that this module gives are touched, and links are not followed. The names of a process that is still
    writing look the same: call this only while nothing else writes there.
    """
    removed: list[Path] = []
    with storing(folder, "sweep temporary files"):
        for place, folders, names in os.walk(folder):
            ours = [name for name in (*folders, *names) if TEMPORARY.fullmatch(name)]
            folders[:] = [name for name in folders if not TEMPORARY.fullmatch(name)]
            for name in ours:
                path = Path(place, name)
                remove_path(path)
                removed.append(path)
    return sorted(removed)


def file_digest(path: str | os.PathLike[str], hash: Hash) -> str:
    """Hash the bytes of a file; hexadecimal digits."""
    with storing(path, "read"):
        return hash.of_file(Path(path))


def lock(descriptor: int, message: str, *, shared: bool = False) -> None:
    """Lock an open file or folder until it is closed or the process dies; `message` is the error if it is taken.

    Do nothing if the operating system or the file system has no such locks.
    """
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(message) from None
    except OSError:  # some network file systems
        pass


def remove_path(path: Path) -> None:
    """Remove a file, a link (never its target) or a whole folder; a missing path is fine.

    Not `shutil.rmtree`: interrupted at a bad moment, it closes a descriptor twice and reports that.
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


def sync_file(path: str | os.PathLike[str]) -> None:
    """Wait until a file is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def sync_files(folder: Path, names: Iterable[str]) -> None:
    """Wait until files of a folder, and their names in it, are on disk."""
    for name in names:
        sync_file(folder / name)
    sync_folder(folder)


def sync_tree(root: Path) -> None:
    """Wait until a folder with all that is in it is on disk."""
    for place, _, names in os.walk(root):
        sync_files(Path(place), names)
