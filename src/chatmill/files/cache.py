"""The cache of files from stores: named by their digests, whole or absent, up to a limit, for many processes.

What a name stands for never changes, so any process, dataset and version may share a file. Files used longest ago go
first. A file that somebody has mapped stays readable after it was removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from chatmill.core.cache_folders import CACHE_VARIABLE, chatmill_cache
from chatmill.core.checksums import FileRecord
from chatmill.core.publish import TEMPORARY, storing, temporary_beside
from chatmill.errors import ConfigError

LIMIT_VARIABLE = "CHATMILL_CACHE_LIMIT"
FILES = "files"
"""The folder of the cache that holds the files."""
OF_FREE = 0.8
"""The default limit, as a share of what is free on the disk or used by the cache already."""
OLD_SECONDS = 24 * 3600
"""After so long a temporary file is one that a killed process has left."""
_SIZE = re.compile(r"(?i)(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?")
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def name_of(record: FileRecord) -> str:
    """Return where the cache keeps the file with this size and digest, below its folder."""
    return f"{FILES}/{record.digest[:2]}/{record.digest}-{record.bytes}"


def file_of(record: FileRecord, root: Path | None = None) -> Path:
    """Return the path of the file with this size and digest."""
    return (root or chatmill_cache()) / name_of(record)


def byte_count(text: str, name: str) -> int:
    """Parse a size such as `200GB`, `1.5 TiB` or `4096`; `name` is where it was given."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{name} is {text!r}; it takes a number of bytes, such as 200GB or 64MiB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** _UNITS[match[2].lower()])


def cache_limit(root: Path | None = None) -> int:
    """Return how many bytes the cache may hold: `CHATMILL_CACHE_LIMIT`, else 80% of what it could have."""
    text = os.environ.get(LIMIT_VARIABLE)
    if text:
        return byte_count(text, LIMIT_VARIABLE)
    folder = root or chatmill_cache()
    folder.mkdir(parents=True, exist_ok=True)
    return int(OF_FREE * (shutil.disk_usage(folder).free + _read_usage(folder)))


def touch(path: str | os.PathLike[str]) -> bool:
    """Note that a file of the cache is used now; return whether it is there."""
    try:
        os.utime(path)
    except OSError:
        return os.path.exists(path)
    return True


def keep(target: Path, size: int, write: Callable[[Path], None]) -> None:
    """Put a file into the cache, unless it is there: `write` fills a temporary file, which then gets its name.

    One process, or thread, at a time writes a file; the others wait, and find it.
    """
    root = target.parent.parent.parent
    with storing(root, "keep a file of a store in the cache"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(root / "locks" / target.name[:3]):
            if target.exists():
                touch(target)
                return
            make_room(root, size)
            temporary = temporary_beside(target)
            try:
                _write_or_free(root, temporary, write)
                os.replace(temporary, target)
            finally:
                temporary.unlink(missing_ok=True)
            _add_usage(root, size)


def keep_small(root: Path, files: Mapping[str, bytes | memoryview]) -> None:
    """Put many small files into the cache at once; the names are those of `name_of`.

    Nobody waits for their locks: whoever writes one writes the same bytes.
    """
    if not files:
        return
    with storing(root, "keep files of a store in the cache"):
        size = sum(len(data) for data in files.values())
        make_room(root, size)
        for folder in dict.fromkeys(name.rpartition("/")[0] for name in files):
            os.makedirs(f"{root}/{folder}", exist_ok=True)
        # One temporary file has all of its names in turn, as making a path for each takes longer than writing it.
        temporary = temporary_beside(root / next(iter(files)))
        try:
            for name, data in files.items():
                _write_or_free(root, temporary, partial(_write_bytes, data))
                os.replace(temporary, f"{root}/{name}")
        finally:
            temporary.unlink(missing_ok=True)
        _add_usage(root, size)


def _write_bytes(data: bytes | memoryview, path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(data)


def _write_or_free(root: Path, temporary: Path, write: Callable[[Path], None]) -> None:
    """Write a file; on a full disk, free what is not needed now, and write it again."""
    try:
        write(temporary)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        temporary.unlink(missing_ok=True)
        with locked(root / "usage.lock"):
            _remove_oldest(root, _read_usage(root) // 2)
        write(temporary)


def make_room(root: Path, size: int) -> None:
    """Remove files that were used longest ago, until one of this size fits under the limit."""
    with locked(root / "usage.lock"):
        limit = cache_limit(root)
        if size > limit:
            raise ConfigError(
                f"the cache {root} may hold {limit:,} bytes, and one file needs {size:,}: raise {LIMIT_VARIABLE}, or "
                f"choose a larger disk ({CACHE_VARIABLE})"
            )
        if _read_usage(root) + size > limit:
            _remove_oldest(root, limit - size)


def _remove_oldest(root: Path, most: int) -> None:
    """Remove files until at most `most` bytes are left; the usage is counted anew."""
    files: list[tuple[int, int, str]] = []
    total = 0
    for entry in _entries(root):
        with contextlib.suppress(OSError):
            status = entry.stat()
            if TEMPORARY.fullmatch(entry.name):
                if time.time() - status.st_mtime > OLD_SECONDS:
                    os.unlink(entry.path)
                continue
            files.append((status.st_mtime_ns, status.st_size, entry.path))
            total += status.st_size
    for _, size, path in sorted(files):
        if total <= most:
            break
        with contextlib.suppress(OSError):
            os.unlink(path)
            total -= size
    _write_usage(root, total)


def _entries(root: Path) -> Iterator[os.DirEntry[str]]:
    """Yield what lies in the folders of the cache's files; any of it may be gone in the next moment."""
    with contextlib.suppress(OSError), os.scandir(root / FILES) as folders:
        for folder in list(folders):
            with contextlib.suppress(OSError), os.scandir(folder) as files:
                yield from list(files)


def _count_usage(root: Path) -> int:
    """Count the bytes of the files of the cache; those that are being written are not among them."""
    total = 0
    for entry in _entries(root):
        if TEMPORARY.fullmatch(entry.name):
            continue
        with contextlib.suppress(OSError):  # another process has removed it meanwhile
            total += entry.stat().st_size
    return total


def _noted_usage(root: Path) -> int | None:
    """Return how many bytes the cache holds, as processes have noted it; None where nobody has."""
    try:
        return int((root / "usage").read_text())
    except (OSError, ValueError):
        return None


def _read_usage(root: Path) -> int:
    """Return how many bytes the cache holds, noted or counted."""
    noted = _noted_usage(root)
    return _count_usage(root) if noted is None else noted


def _add_usage(root: Path, size: int) -> None:
    """Note that the cache holds files of so many bytes more, which have their names by now."""
    with locked(root / "usage.lock"):
        noted = _noted_usage(root)
        _write_usage(root, _count_usage(root) if noted is None else noted + size)


def _write_usage(root: Path, size: int) -> None:
    """Note how many bytes the cache holds, in one step: others read it without the lock."""
    temporary = temporary_beside(root / "usage")
    try:
        temporary.write_text(str(max(size, 0)))
        os.replace(temporary, root / "usage")
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock among the processes and threads that use the cache; without one where the system has none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
