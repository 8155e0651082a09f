"""Megatron Core's indexed datasets, `PREFIX.bin` + `PREFIX.idx`: written and checked with NumPy alone.

The bytes are those of Megatron's own `IndexedDatasetBuilder` (tests compare them); what it leaves out is done here:
values and lengths are checked, files appear under their names when they are whole, and readers refuse what does not
fit. One sequence is one document. Memory grows by 4 bytes a document while writing.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from chatmill.core.checksums import FileRecord, Hash
from chatmill.core.publish import GrowingFile, whole_file
from chatmill.errors import ConfigError, DataError, FormatError
from chatmill.store.mapped import file_size, map_file

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, sequences, documents + 1: 34 bytes."""
DTYPE_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}
_DTYPES = {code: np.dtype(name) for name, code in DTYPE_CODES.items()}
SLICE = 1 << 20
"""Documents whose entries of an index are made or checked at a time."""


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the values of a dataset: `PREFIX.bin`."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the index of a dataset: `PREFIX.idx`."""
    return Path(f"{os.fspath(prefix)}.idx")


class MegatronWriter(ExitStack):
    """Writes one indexed dataset in a `with` block, after which its two files have their names, the index last.

    After an error there is nothing.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: DTypeLike) -> None:
        """Values are stored as `dtype`; an existing prefix is refused."""
        super().__init__()
        self.dtype = np.dtype(dtype)
        if self.dtype.name not in DTYPE_CODES:
            raise ConfigError(f"Megatron has no code for {self.dtype.name}; it stores {', '.join(DTYPE_CODES)}")
        self.paths = {"bin": bin_path(prefix), "idx": idx_path(prefix)}
        for path in self.paths.values():
            if path.exists():
                raise ConfigError(f"{path}: is there already; Megatron caches by path, so no prefix is overwritten")
        self.documents = 0
        self.values = 0
        self.records: dict[str, FileRecord] = {}
        """Bytes and sha256 of `bin` and `idx`, after the block."""
        self._lengths: list[NDArray[np.int32]] = []
        index = self.enter_context(whole_file(self.paths["idx"]))
        self._file = GrowingFile(self.enter_context(whole_file(self.paths["bin"])), hash=Hash.SHA256)
        self.callback(self._file.discard)
        self.push(lambda error, *_: self._finish(index) if error is None else None)

    def append(self, values: NDArray[Any], lengths: NDArray[np.integer]) -> None:
        """Append documents: flat values, and how many of them each document has."""
        sizes = np.asarray(lengths)
        total = int(sizes.sum(dtype=np.int64))
        if total != len(values):
            raise DataError(f"{self.paths['bin']}: {len(values):,} values, but the lengths add up to {total:,}")
        if len(sizes) and not (int(sizes.min()) >= 1 and int(sizes.max()) <= np.iinfo(np.int32).max):
            at = int(np.flatnonzero((sizes < 1) | (sizes > np.iinfo(np.int32).max))[0])
            raise DataError(f"{self.paths['bin']}: document {self.documents + at} has {int(sizes[at])} values")
        self._file.write(self._cast(values))
        self._lengths.append(sizes.astype(np.int32))
        self.documents += len(sizes)
        self.values += total

    def _finish(self, index: Path) -> None:
        """Write the index."""
        self.records = {"bin": self._file.finish()}
        file = GrowingFile(index, hash=Hash.SHA256)
        try:
            for piece in self._index():
                file.write(piece)
        finally:
            self.records["idx"] = file.finish()

    def _cast(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the values in the stored dtype; one that would not survive it is an error (the builder wraps it)."""
        if values.dtype == self.dtype:
            return values
        cast = values.astype(self.dtype)
        wrong = np.flatnonzero(cast != values)
        if len(wrong):
            at = int(wrong[0])
            raise DataError(
                f"{self.paths['bin']}: value {values[at]} (number {self.values + at}) does not fit into "
                f"{self.dtype.name}; choose a wider dtype"
            )
        return cast

    def _index(self) -> Iterator[NDArray[Any] | bytes]:
        """Yield the bytes of the index, in pieces."""
        yield HEADER.pack(MAGIC, VERSION, DTYPE_CODES[self.dtype.name], self.documents, self.documents + 1)
        lengths = np.concatenate(self._lengths) if self._lengths else np.empty(0, np.int32)
        yield lengths.astype("<i4", copy=False)
        at = 0
        for first in range(0, len(lengths), SLICE):
            sizes = lengths[first : first + SLICE].astype("<i8") * self.dtype.itemsize
            ends = at + np.cumsum(sizes)
            yield ends - sizes
            at = int(ends[-1])
        for first in range(0, self.documents + 1, SLICE):
            yield np.arange(first, min(first + SLICE, self.documents + 1), dtype="<i8")


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronIndex:
    """The index of a dataset, read and checked against its own sizes and those of the `.bin`."""

    bin: Path
    idx: Path
    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    """Values of each sequence; mapped from the file."""
    pointers: NDArray[np.int64]
    """The byte at which each sequence begins; mapped from the file."""
    document_indices: NDArray[np.int64]
    """0, then one past the last sequence of each document; mapped from the file."""
    values: int
    """All values together."""

    @classmethod
    def open(cls, prefix: str | os.PathLike[str], *, is_own: bool = False) -> MegatronIndex:
        """Open `PREFIX.bin` and `PREFIX.idx`; whatever does not fit is a `FormatError` with the numbers.

        `is_own`: this very run wrote the files, and only their sizes are looked at.
        """
        data, index = bin_path(prefix), idx_path(prefix)
        size = file_size(index)
        whole = map_file(index, np.uint8)
        dtype, sequences, documents = _header(index, whole)
        expected = HEADER.size + 12 * sequences + 8 * documents
        if size != expected:
            raise FormatError(
                f"{index}: {size:,} bytes, but {sequences:,} sequences and {documents - 1:,} documents need "
                f"{expected:,}: the file was cut or changed"
            )
        lengths = whole[HEADER.size :][: 4 * sequences].view("<i4")
        pointers = whole[HEADER.size + 4 * sequences :][: 8 * sequences].view("<i8")
        ends = whole[HEADER.size + 12 * sequences :].view("<i8")
        size_on_disk = file_size(data)
        if is_own:
            values = size_on_disk // dtype.itemsize
        else:
            values = _check_lengths(index, lengths, pointers, dtype.itemsize)
            _check_documents(index, ends, sequences)
        if size_on_disk != values * dtype.itemsize:
            raise FormatError(
                f"{data}: {size_on_disk:,} bytes, but its index has {values:,} {dtype.name} values "
                f"({values * dtype.itemsize:,} bytes): the file was cut or belongs to another index"
            )
        return cls(
            bin=data, idx=index, dtype=dtype, lengths=lengths, pointers=pointers, document_indices=ends, values=values
        )

    def starts(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where sequences begin in the flat values."""
        return self.pointers[sequences] // self.dtype.itemsize

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return len(self.document_indices) - 1

    def read(self) -> NDArray[Any]:
        """Return all values, flat, mapped from the `.bin`."""
        return map_file(self.bin, self.dtype, self.values)


def _header(index: Path, data: NDArray[np.uint8]) -> tuple[np.dtype[Any], int, int]:
    """Dtype, sequences, and documents + 1."""
    if len(data) < HEADER.size:
        raise FormatError(f"{index}: {len(data)} bytes; an index has at least {HEADER.size}")
    magic, version, code, sequences, documents = HEADER.unpack(data[: HEADER.size].tobytes())
    if (magic, version) != (MAGIC, VERSION) or code not in _DTYPES or documents < 1:
        raise FormatError(
            f"{index}: no index of Megatron Core with version {VERSION}: begins with {magic!r}, version {version}, "
            f"dtype code {code}, {documents} document indices"
        )
    return _DTYPES[code], sequences, documents


def _check_lengths(index: Path, lengths: NDArray[np.int32], pointers: NDArray[np.int64], itemsize: int) -> int:
    """Lengths are not negative and every pointer is the sum of the lengths before it; gives the sum of all lengths."""
    at = 0
    for first in range(0, len(lengths), SLICE):
        sizes = lengths[first : first + SLICE].astype(np.int64)
        if int(sizes.min()) < 0:
            wrong = first + int(np.flatnonzero(sizes < 0)[0])
            raise FormatError(f"{index}: sequence {wrong} has the length {int(lengths[wrong])}")
        ends = at + np.cumsum(sizes)
        different = np.flatnonzero(pointers[first : first + SLICE] != (ends - sizes) * itemsize)
        if len(different):
            wrong = int(different[0])
            raise FormatError(
                f"{index}: sequence {first + wrong} begins at byte {int(pointers[first + wrong]):,}, but the lengths "
                f"before it make {int((ends - sizes)[wrong]) * itemsize:,}"
            )
        at = int(ends[-1])
    return at


def _check_documents(index: Path, ends: NDArray[np.int64], sequences: int) -> None:
    if int(ends[0]) != 0 or int(ends[-1]) != sequences:
        raise FormatError(
            f"{index}: document indices run from {int(ends[0])} to {int(ends[-1])}, not from 0 to {sequences}"
        )
    if bool((ends[1:] < ends[:-1]).any()):
        wrong = int(np.flatnonzero(ends[1:] < ends[:-1])[0])
        raise FormatError(f"{index}: document {wrong} ends before it begins")
