"""Reads one chunk of a file: a range of its lines or rows, numbered as in the whole file."""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from chatmill.errors import ChatmillError, DataError
from chatmill.files.inputs import StoredInput
from chatmill.read.files import ROW_BATCH_BYTES, Raw, batch_records, decode_line, parquet_batches
from chatmill.read.lines import BOM


class ChunkKind(StrEnum):
    """What a chunk is a range of."""

    LINES = "lines"
    """Whole lines of JSONL; the range is in bytes."""
    ROWS = "rows"
    """Rows of Parquet, in rows counted from 0; in a spool an Arrow stream, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of an input file that one worker reads; small, picklable, and independent of the number of workers."""

    path: str
    """The input file as it was named; records say it as their place."""
    source: str
    """Names the records that do not name their own source."""
    shape: str
    """The name of the records' shape; empty where no record of the file can be decoded."""
    kind: ChunkKind
    data: str
    """The file that holds the bytes, as an absolute path: the input itself, or a file spooled from it.

    Empty for a file in a store.
    """
    start: int
    stop: int
    """The range in `data`, without its end, in the unit of `kind`."""
    first: int
    """The number of the first line or row in the input file, counted from 1."""
    count: int
    """How many lines (blank ones too) or rows."""
    bytes: int
    """Unpacked bytes of the chunk; an estimate for rows."""
    file_bytes: int
    """Of the whole file `data` when the chunk was cut; another size or time since then is an error."""
    file_mtime_ns: int
    far: StoredInput | None = None
    """The file that holds the bytes, where it is in a store."""
    digest: str = ""
    """Of its bytes, or of all bytes of the input where those of the chunk were not read by themselves."""
    is_list: bool = False
    """Its lines were the entries of a JSON list: places call them rows."""

    @property
    def before(self) -> str:
        """What the places of its records have before their numbers."""
        return f"{self.path}:{'row ' if self.is_list or self.kind is ChunkKind.ROWS else ''}"

    def describe(self) -> str:
        """Return the chunk in words that do not depend on where the build runs: `chats.jsonl from line 4201`."""
        return f"{self.path} from {'row' if self.before.endswith(' ') else 'line'} {self.first}"


def chunk_records(chunk: Chunk) -> Iterator[Raw]:
    """The records of a chunk: those that `read_records` gives for this part of the file, places and errors included."""
    if chunk.kind is ChunkKind.ROWS:
        return batch_records(chunk_rows(chunk), chunk.path, itertools.count(chunk.first))
    numbered = enumerate(chunk_bytes(chunk).split(b"\n"), chunk.first)
    return (decode_line(line, f"{chunk.before}{n}") for n, line in numbered if line and not line.isspace())


def chunk_bytes(chunk: Chunk) -> bytes:
    """Return the undecoded lines of a chunk, in one piece.

    Blank lines and line ends are among them; a byte order mark is taken off the first line of a file.
    """
    with _unchanged(chunk) as path, open(path, "rb") as file:
        file.seek(chunk.start)
        data = file.read(chunk.stop - chunk.start)
    return data.removeprefix(BOM) if chunk.first == 1 else data


def chunk_rows(chunk: Chunk, batch_bytes: int = ROW_BATCH_BYTES, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """Yield the rows of a chunk as Arrow batches of about `batch_bytes`; `columns`: only these are read."""
    with _unchanged(chunk) as path:
        if path.suffix == ".arrow":
            for batch in spooled_batches(path, chunk.start):
                yield batch if columns is None else batch.select(columns)
        else:
            yield from parquet_batches(path, chunk.start, chunk.stop, columns=columns, batch_bytes=batch_bytes)


def spooled_batches(path: Path, start: int) -> Iterator[Any]:
    """Batches of the Arrow stream that begins at a byte of a file."""
    import pyarrow
    import pyarrow.ipc

    try:
        with pyarrow.memory_map(str(path)) as file:
            file.seek(start)
            yield from pyarrow.ipc.open_stream(file)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is damaged: {error}") from None


@contextmanager
def _unchanged(chunk: Chunk) -> Iterator[Path]:
    """Give the file, and check before and after reading that it is still the one that the chunk was cut from."""
    path = Path(chunk.data) if chunk.far is None else chunk.far.copy()
    if chunk.far is None:
        check_unchanged(chunk.data, chunk.file_bytes, chunk.file_mtime_ns)
    try:
        yield path
    except OSError as error:
        if isinstance(error, ChatmillError):
            raise
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    if chunk.far is None:
        check_unchanged(chunk.data, chunk.file_bytes, chunk.file_mtime_ns)


def check_unchanged(path: str, size: int, mtime_ns: int) -> None:
    """Raise a `DataError` that says how, if a file no longer has this size and time of change."""
    try:
        now = os.stat(path)
    except OSError as error:
        raise DataError(
            f"{path} was there when the build began, and now, on {platform.node()}: {error.strerror or error}. Every "
            "machine that works on a build must see its inputs under the same path; a bucket has the same everywhere"
        ) from None
    if now.st_size != size:
        change = f"it had {size} bytes and now has {now.st_size}"
    elif now.st_mtime_ns != mtime_ns:
        change = f"it was written to ({(now.st_mtime_ns - mtime_ns) / 1e9:+.3f} s)"
    else:
        return
    raise DataError(f"{path} has changed since the build began: {change}. Leave the inputs alone, and build again")
