"""Files mapped into memory, with the size they had when they were opened: a later change is an error, not a crash."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from chatmill.core.checksums import RunningDigest
from chatmill.core.machine_limits import refuse_out_of_memory
from chatmill.errors import FormatError

SAMPLE = 4096
SAMPLES = 64
"""Samples of `SAMPLE` bytes per file in a fingerprint; with many shards each gets fewer, but always its two ends."""


def open_file_limit(files_per_shard: int) -> int:
    """How many shards may be mapped at once: every mapping holds a file descriptor, and those are limited."""
    try:
        import resource
    except ImportError:  # no such limit to read on this platform
        return 64
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return 1 << 20
    return max(4, (soft - 256) // files_per_shard)


class MappedFile:
    """One file of equal records, mapped on first use; knows its size at opening and can tell when it changed.

    Reading a mapping beyond the end of a file that has shrunk kills the process, so readers call `check` first.
    Threads may share it: one that releases it takes nothing away from those that read.
    """

    __slots__ = ("_mapped", "dtype", "path", "records", "size")

    def __init__(self, path: Path, dtype: DTypeLike, records: int | None = None) -> None:
        """`records`: how many there must be; without it the size must be a multiple of a record."""
        self.path = path
        self.dtype = np.dtype(dtype)
        self.size = file_size(path)
        self.records = whole_records(path, self.size, self.dtype.itemsize) if records is None else records
        if self.records * self.dtype.itemsize != self.size:
            raise FormatError(
                f"{path}: {self.size:,} bytes, but {self.records:,} records of {self.dtype.itemsize} bytes "
                f"are expected ({self.records * self.dtype.itemsize:,} bytes): the file was cut or does not belong here"
            )
        self._mapped: tuple[mmap.mmap | None, NDArray[Any]] | None = None
        """The mapping and its records, in one value: another thread may release it at any moment."""

    @property
    def array(self) -> NDArray[Any]:
        """The records, read-only, straight from the file."""
        mapped = self._mapped
        if mapped is None:
            mapped = self._mapped = self._open()
        return mapped[1]

    def _open(self) -> tuple[mmap.mmap | None, NDArray[Any]]:
        if self.size == 0:
            return None, np.empty(0, dtype=self.dtype)
        try:
            with self.path.open("rb") as file:
                self._refuse_change(os.fstat(file.fileno()).st_size)
                mapping = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)
        except OSError as error:
            refuse_out_of_memory(error, f"{self.path} cannot be mapped")
            raise FormatError(f"{self.path}: cannot be read any more: {error.strerror or error}") from error
        return mapping, np.frombuffer(mapping, dtype=self.dtype)

    @property
    def is_mapped(self) -> bool:
        """Whether it holds a descriptor now."""
        mapped = self._mapped
        return mapped is not None and mapped[0] is not None

    def check(self) -> None:
        """Raise a `FormatError` when the file no longer has the size it had at opening."""
        mapped = self._mapped
        if mapped is not None and mapped[0] is not None:
            self._refuse_change(mapped[0].size())

    def _refuse_change(self, size: int) -> None:
        if size != self.size:
            raise FormatError(
                f"{self.path}: had {self.size:,} bytes when it was opened and has {size:,} now: something wrote to "
                "the dataset while it was being read; restore the file and open the dataset again"
            )

    def release(self) -> None:
        """Unmap as soon as no view is left; the next use maps the file again."""
        self._mapped = None

    def __getstate__(self) -> tuple[Path, np.dtype[Any], int, int]:
        return self.path, self.dtype, self.size, self.records

    def __setstate__(self, state: tuple[Path, np.dtype[Any], int, int]) -> None:
        self.path, self.dtype, self.size, self.records = state
        self._mapped = None


def file_size(path: Path) -> int:
    """Bytes in a file; a missing or unreadable one is a `FormatError`."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}; the dataset is not complete") from error


def whole_records(path: str | Path, size: int, record: int) -> int:
    """How many records of `record` bytes a file of `size` bytes holds; a rest is a `FormatError`."""
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
