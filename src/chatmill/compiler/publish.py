"""Files that are there whole or not at all: temporary name, sync, rename, sync of the folder.

A killed process leaves at most files and folders named `.tmp-<pid>-<random>`, which `sweep_orphans` removes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from chatmill.core.canonical import canonical_json as canonical_json  # used together with what is here
from chatmill.core.whole_file import sync_folder
from chatmill.errors import ChatmillError, ConfigError
from chatmill.store.checksums import FileRecord, Hash
from chatmill.store.durable import Durability, GrowingFile, remove_path, sync_tree

TEMPORARY = re.compile(r"\.tmp-\d+-[0-9a-f]{16}")
"""The names that nothing but this module gives."""

_FULL = "free some space there or choose a folder on another disk; a build can then be resumed"
_REFUSED = "choose a folder you may write to"
WAYS_OUT = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "the file system or a limit (ulimit -f) allows no file of this size; write smaller shards",
    errno.EACCES: _REFUSED,
    errno.EPERM: _REFUSED,
    errno.EROFS: _REFUSED,
    errno.ENAMETOOLONG: "choose a shorter path",
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
    """A new name in the folder of `path`, so that renaming it to `path` is one step; nothing is created."""
    return path.parent / f".tmp-{os.getpid()}-{secrets.token_hex(8)}"


class AtomicFile:
    """A file that appears under its name when the `with` block ends well, and never in part.

    `size` and `record` are those of the bytes written so far.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        durability: Durability = Durability.SYNCED,
        hash: Hash = Hash.XXH128,
    ) -> None:
        """Create the temporary file; something under the name that is no plain file is never replaced."""
        self.path = Path(path)
        self.temporary = temporary_beside(self.path)
        if self.path.exists() and not self.path.is_file():
            raise ConfigError(f"{self.path} is there and is no plain file; it is not replaced: choose another name")
        self._durability = durability
        with storing(self.path, "create the file"):
            self._file = GrowingFile(self.temporary, durability, hash)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._file.size

    @property
    def record(self) -> FileRecord:
        """Size and hash of the bytes written so far."""
        return self._file.record

    def write(self, data: Any) -> None:
        """Append bytes, an array, or anything else with a contiguous buffer."""
        with storing(self.path):
            self._file.write(data)

    def commit(self) -> None:
        """Sync, rename, sync the folder. An error before the rename discards the file."""
        try:
            with storing(self.path):
                self._file.finish()
                os.replace(self.temporary, self.path)
                if self._durability is Durability.SYNCED:
                    sync_folder(self.path.parent)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Close and remove the temporary file; does nothing after `commit`."""
        self._file.discard()
        with contextlib.suppress(OSError):
            os.unlink(self.temporary)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.discard()


def write_atomic(path: str | os.PathLike[str], data: bytes, *, durability: Durability = Durability.SYNCED) -> None:
    """Write a whole file in one step: readers see the old one or the new one."""
    with AtomicFile(path, durability=durability) as file:
        file.write(data)


def join_files(parts: Sequence[Path], target: Path, hash: Hash = Hash.XXH128) -> FileRecord | None:
    """Write files one after the other into one; None, and no file, where there are none."""
    if not parts:
        return None
    with AtomicFile(target, hash=hash) as file:
        for part in parts:
            file.write(part.read_bytes())
    return file.record


def temporary_folder(final: str | os.PathLike[str]) -> Path:
    """Create a folder beside `final` for `publish_folder`; its parents are created as well."""
    path = Path(final)
    with storing(path, "create the folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = temporary_beside(path)
        folder.mkdir()
    return folder


def publish_folder(
    temporary: str | os.PathLike[str],
    final: str | os.PathLike[str],
    *,
    replace: bool = False,
    durability: Durability = Durability.SYNCED,
) -> None:
    """Sync everything in a folder and rename it to `final`, on the same file system.

    A folder that is there already is refused. With `replace` it is moved to a temporary name first and removed last;
    a kill between the two renames leaves no `final`, but never a mixture.
    """
    source, target = Path(temporary), Path(final)
    old: Path | None = None
    with storing(target, "publish the folder"):
        if target.exists() and not replace:
            raise ConfigError(f"{target}: is there already; a published folder is not replaced: remove it first")
        if durability is Durability.SYNCED:
            sync_tree(source)
        if replace and target.exists():  # else another process has published it meanwhile, and the rename fails
            old = temporary_beside(target)
            os.rename(target, old)
        os.rename(source, target)
        if durability is Durability.SYNCED:
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
    """A digest of the bytes of a file, as hexadecimal digits."""
    with storing(path, "read"):
        return hash.of_file(Path(path))


def sha256_file(path: str | os.PathLike[str]) -> str:
    """The sha256 of the bytes of a file, as hexadecimal digits."""
    return file_digest(path, Hash.SHA256)
