"""Files that are there whole or not at all: temporary name, sync, rename, sync of the folder.

A killed process leaves at most files and folders named `.tmp-<pid>-<random>`, which `sweep_orphans` removes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from chatmill.compiler.faults import fault_point
from chatmill.core.canonical import canonical_json as canonical_json  # used together with what is here
from chatmill.errors import ChatmillError, ConfigError, FormatError
from chatmill.store.durable import Digest, Durability, sync_folder

TEMPORARY = re.compile(r"\.tmp-\d+-[0-9a-f]{16}")
"""The names that nothing but this module gives."""
READ_SIZE = 1 << 22
REMOVERS = 8
"""Files that are removed at a time."""

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

    Write large pieces: they go to the system as they come. `size` and `sha256` speak of the bytes written so far.
    `step` names the fault points that tests use: `after_{step}_write`, `before_{step}_rename`, `after_{step}_rename`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        verify: bool = False,
        step: str = "file",
        durability: Durability = Durability.SYNCED,
    ) -> None:
        """`verify`: read the file back before it is renamed, and compare its hash with that of what was written."""
        self._durability = durability
        self.path = Path(path)
        self.temporary = temporary_beside(self.path)
        if self.path.exists() and not self.path.is_file():
            raise ConfigError(f"{self.path} is there and is no plain file; it is not replaced: choose another name")
        self.size = 0
        self._verify, self._step = verify, step
        self._hash = hashlib.sha256()
        with storing(self.path, "create the file"):
            self._descriptor: int | None = os.open(self.temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    @property
    def sha256(self) -> str:
        """Hex digest of the bytes written so far."""
        return self._hash.hexdigest()

    def write(self, data: Any) -> int:
        """Append bytes, or anything else with a contiguous buffer (a numpy array); returns the number of bytes."""
        assert self._descriptor is not None, "the file is closed"
        view = memoryview(data)
        if view.nbytes == 0:
            return 0
        view = view.cast("B")
        self._hash.update(view)
        done = 0
        with storing(self.path):
            while done < len(view):
                done += os.write(self._descriptor, view[done:])
        self.size += done
        return done

    def commit(self) -> None:
        """Sync, check when asked to, rename, sync the folder. An error before the rename discards the file."""
        assert self._descriptor is not None, "the file is closed"
        try:
            with storing(self.path):
                fault_point(f"after_{self._step}_write")
                if self._durability is Durability.SYNCED:
                    os.fsync(self._descriptor)
                descriptor, self._descriptor = self._descriptor, None
                os.close(descriptor)
                if self._verify and (found := verified_hash(self.temporary, self.size)) != self.sha256:
                    raise FormatError(
                        f"{self.path}: read back with sha256 {found}, but {self.sha256} was written "
                        f"({self.size} bytes); it was not published. The disk or the memory here is not reliable"
                    )
                fault_point(f"before_{self._step}_rename")
                os.replace(self.temporary, self.path)
                fault_point(f"after_{self._step}_rename")
                if self._durability is Durability.SYNCED:
                    sync_folder(self.path.parent)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Close and remove the temporary file; does nothing after `commit`."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None
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


def write_atomic(
    path: str | os.PathLike[str], data: bytes, *, step: str = "file", durability: Durability = Durability.SYNCED
) -> None:
    """Write a whole file in one step: readers see the old one or the new one."""
    with AtomicFile(path, step=step, durability=durability) as file:
        file.write(data)


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
    step: str = "folder",
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
            _sync_tree(source)
        fault_point(f"before_{step}_rename")
        if target.exists():
            old = temporary_beside(target)
            os.rename(target, old)
        os.rename(source, target)
        fault_point(f"after_{step}_rename")
        if durability is Durability.SYNCED:
            sync_folder(target.parent)
    if old is not None:
        with storing(old, "remove the replaced folder"):
            _remove(old)


def _sync_tree(root: Path) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            _sync_file(Path(folder, name))
        sync_folder(Path(folder))


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
                _remove(path)
                removed.append(path)
    return sorted(removed)


def remove_at_once(folder: Path) -> None:
    """Remove a folder so that, at any moment, it is there under its name whole or not at all."""
    with storing(folder, "remove"):
        doomed = temporary_beside(folder)
        os.rename(folder, doomed)
        _remove_folder(doomed, map)


def remove_tree(folder: Path) -> None:
    """Remove a folder with all that is in it, several files at a time: large ones may wait for the disk."""
    with ThreadPoolExecutor(REMOVERS) as threads:
        _remove_folder(folder, threads.map)


def _remove_folder(folder: Path, apply: Callable[[Callable[[str], None], list[str]], Iterable[None]]) -> None:
    """Remove a folder, its files by way of `apply`; links in it are removed and never followed.

    `shutil.rmtree` is not used: when Ctrl-C comes at a bad moment it closes a descriptor twice, and then tells of that.
    """
    if os.path.islink(folder):
        os.unlink(folder)
        return
    walked = list(os.walk(folder, topdown=False))
    files = [os.path.join(place, name) for place, _, names in walked for name in names]
    places = [os.path.join(place, name) for place, folders, _ in walked for name in folders]
    list(apply(os.unlink, [*files, *filter(os.path.islink, places)]))
    for place, _, _ in walked:
        os.rmdir(place)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Hex digest of the bytes of a file."""
    return file_digest(path, hashlib.sha256)


def file_digest(path: str | os.PathLike[str], digest: Callable[[], Digest]) -> str:
    """A digest of the bytes of a file, as text."""
    with storing(path, "read"), open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, digest).hexdigest()  # type: ignore[arg-type]


def verified_hash(path: str | os.PathLike[str], expected_size: int) -> str:
    """Read a file back from disk and hash it; raises `FormatError` when its size is not the one written.

    The system is asked to forget its cached copy first, so that the bytes come from the disk where that is possible:
    sync the file before.
    """
    digest, size = hashlib.sha256(), 0
    with storing(path, "read back"), open(path, "rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while piece := file.read(READ_SIZE):
            digest.update(piece)
            size += len(piece)
    if size != expected_size:
        raise FormatError(f"{os.fspath(path)}: has {size} bytes on disk, but {expected_size} were written")
    return digest.hexdigest()
