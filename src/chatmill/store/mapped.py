"""Files of equal records, mapped into memory: their size is checked when they are opened."""

from __future__ import annotations

import errno
import mmap
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from chatmill.core.checksums import RunningDigest
from chatmill.core.machine_limits import refuse_out_of_memory
from chatmill.errors import ChatmillError, FormatError
from chatmill.files import remote

FETCHES = 3
"""How often a file of the cache is fetched that is removed before it is open."""
SAMPLE = 4096
SAMPLES = 64
"""Samples of `SAMPLE` bytes per file in a fingerprint; with many shards each gets fewer, but always its two ends."""


def map_file(path: str | Path, dtype: DTypeLike, records: int | None = None) -> NDArray[Any]:
    """Return the records of a file, read-only, straight from the disk.

    `records`: how many there must be; without it the size must be a multiple of a record.
    """
    kind, size = np.dtype(dtype), file_size(path)
    count = whole_records(path, size, kind.itemsize) if records is None else records
    if count * kind.itemsize != size:
        raise FormatError(
            f"{path}: {size:,} bytes, but {count:,} records of {kind.itemsize} bytes are expected "
            f"({count * kind.itemsize:,} bytes): the file was cut or does not belong here"
        )
    if not size:
        return np.empty(0, dtype=kind)
    try:
        mapping = _mapping(path, size)
    except ChatmillError:
        raise
    except OSError as error:
        refuse_out_of_memory(error, f"{path} cannot be mapped")
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from error
    return np.frombuffer(mapping, dtype=kind)


def _mapping(path: str | Path, size: int) -> mmap.mmap:
    """Map a file; one of a remote dataset that is not in the cache now is fetched first."""
    for _ in range(FETCHES):
        if os.path.islink(path):
            remote.fill(path)
        try:
            with open(path, "rb") as file:
                return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        except FileNotFoundError:  # another process has just made room in the cache
            continue
    raise FileNotFoundError(errno.ENOENT, f"it was removed from the cache {FETCHES} times before it could be opened")


class StoredValues:
    """The values of a file of a remote dataset of which few are wanted: slices are asked of its store."""

    def __init__(self, path: Path, dtype: np.dtype[Any], size: int) -> None:
        self._path, self.dtype, self._size = path, dtype, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: slice) -> NDArray[Any]:
        """Return the values of a slice."""
        start, stop, _ = place.indices(self._size)
        width = self.dtype.itemsize
        return np.frombuffer(remote.read_part(self._path, start * width, max(start, stop) * width), dtype=self.dtype)


def stated_digest(path: Path) -> str:
    """Return the digest that the manifest has of a remote dataset's file; empty for other files."""
    record = remote.stored_record(path)
    return "" if record is None else record.digest


def fetch_file(path: Path) -> None:
    """Fetch a file of a remote dataset; nothing happens for other files."""
    remote.fill(path)


class MappedFiles:
    """The files of a dataset that are mapped now: each holds a descriptor, so those used longest ago are let go."""

    def __init__(self) -> None:
        self.get = lru_cache(maxsize=_most_files())(map_file)

    def release(self) -> None:
        """Unmap all of them as soon as no view is left; the next use maps them again."""
        self.get.cache_clear()

    def __reduce__(self) -> tuple[type[MappedFiles], tuple[()]]:
        return MappedFiles, ()


def _most_files() -> int:
    """Return how many files a dataset may map at once: descriptors are limited."""
    try:
        import resource
    except ImportError:  # no such limit to read on this platform
        return 256
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(16, (soft - 256) // 4) if soft != resource.RLIM_INFINITY else 1 << 16


def file_size(path: str | Path) -> int:
    """Bytes in a file; a missing or unreadable one is a `FormatError`."""
    try:
        return Path(path).stat().st_size
    except FileNotFoundError:
        if (size := remote.stored_size(path)) is not None:
            return size
        raise FormatError(f"{Path(path).parent}: {Path(path).name} is missing; the dataset is not complete") from None
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}; the dataset is not complete") from error


def whole_records(path: str | Path, size: int, record: int) -> int:
    """Return how many records of `record` bytes a file of `size` bytes holds; a rest is a `FormatError`."""
    count, rest = divmod(size, record)
    if rest:
        raise FormatError(
            f"{path}: {size:,} bytes is no multiple of its {record}-byte records ({count:,} records and {rest} bytes): "
            "the file was cut or is of another format"
        )
    return count


def probe(digest: RunningDigest, values: NDArray[Any], *, shards: int = 1) -> None:
    """Add the number of bytes and evenly spaced samples of them to `digest`; small arrays are added whole.

    This tells large files apart in milliseconds.
    """
    data = values.view(np.uint8) if values.dtype != np.uint8 else values
    digest.update(len(data).to_bytes(8, "little"))
    if len(data) <= SAMPLE * SAMPLES:
        digest.update(data)
        return
    count = max(2, SAMPLES // shards)
    for place in np.linspace(0, len(data) - SAMPLE, count).astype(np.int64).tolist():
        digest.update(data[place : place + SAMPLE])
