"""Reads one chunk of a file: a range of its lines, list entries or rows, numbered as in the whole file."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from chatmill.errors import DataError
from chatmill.read.files import (
    ROW_BATCH_BYTES,
    Raw,
    batch_records,
    decode_entries,
    decode_line,
    list_entries,
    parquet_batches,
)
from chatmill.read.sniff import BOM


class ChunkKind(StrEnum):
    """What a chunk is a range of."""

    LINES = "lines"
    """Whole lines of JSONL; the range is in bytes."""
    ENTRIES = "entries"
    """Entries of a JSON list with the commas between them; the range is in bytes."""
    ROWS = "rows"
    """Rows of Parquet (or, in a spool, of an Arrow stream); the range is in rows, counted from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of an input file that one worker reads; small, picklable, and independent of the number of workers."""

    ordinal: int
    """The place of the chunk among all chunks of a build, counted from 0."""
    path: str
    """The input file as it was named; records say it as their place."""
    source: str
    """Names the records that do not name their own source."""
    shape: str
    """The name of the records' shape; empty where no record of the file can be decoded."""
    kind: ChunkKind
    data: str
    """The file that holds the bytes, as an absolute path: the input itself, or a file spooled from it."""
    start: int
    stop: int
    """The range in `data`, without its end, in the unit of `kind`."""
    first: int
    """The number of the first line, entry or row in the input file, counted from 1."""
    count: int
    """How many lines (blank ones too), entries or rows."""
    bytes: int
    """Unpacked bytes of the chunk; an estimate for rows."""
    file_bytes: int
    """Of the whole file `data` when the chunk was cut; another size or time since then is an error."""
    file_mtime_ns: int
    digest: str = ""
    """Of its bytes, or of all bytes of the input where those of the chunk were not read by themselves."""

    def describe(self) -> str:
        """The chunk in words that do not depend on where the build runs: `chats.jsonl from line 4201`."""
        return f"{self.path} from {'line' if self.kind is ChunkKind.LINES else 'row'} {self.first}"


def chunk_records(chunk: Chunk) -> Iterator[Raw]:
    """The records of a chunk: those that `read_records` gives for this part of the file, places and errors included."""
    match chunk.kind:
        case ChunkKind.ROWS:
            return batch_records(chunk_rows(chunk), chunk.path, itertools.count(chunk.first))
        case ChunkKind.ENTRIES:
            return decode_entries(chunk_entries(chunk), chunk.path, chunk.first)
        case ChunkKind.LINES:
            numbered = enumerate(_lines(chunk), chunk.first)
            return (decode_line(line, f"{chunk.path}:{n}") for n, line in numbered if line and not line.isspace())


def chunk_bytes(chunk: Chunk) -> bytes:
    """The undecoded lines of a chunk, in one piece.

    Blank lines and line ends are among them; a byte order mark is taken off the first line of a file. Other kinds of
    chunks are not made of lines: `ValueError`.
    """
    if chunk.kind is not ChunkKind.LINES:
        raise ValueError(f"chunk {chunk.ordinal} holds {chunk.kind} of {chunk.path}, not lines: use chunk_records")
    data = _bytes(chunk)
    return data.removeprefix(BOM) if chunk.first == 1 else data


def _lines(chunk: Chunk) -> Iterator[bytes]:
    """The lines one by one: who wants to see the first few does not read them all."""
    with _unchanged(chunk), open(chunk.data, "rb") as file:
        file.seek(chunk.start)
        left, mark = chunk.stop - chunk.start, BOM if chunk.first == 1 else b""
        while left > 0 and (line := file.readline(left)):
            left -= len(line)
            yield line.removeprefix(mark)
            mark = b""


def _bytes(chunk: Chunk) -> bytes:
    with _unchanged(chunk), open(chunk.data, "rb") as file:
        file.seek(chunk.start)
        return file.read(chunk.stop - chunk.start)


def chunk_rows(chunk: Chunk, batch_bytes: int = ROW_BATCH_BYTES, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """The rows of a chunk as Arrow batches of about `batch_bytes`. Other kinds of chunks have none: `ValueError`.

    `columns`: only these are read.
    """
    if chunk.kind is not ChunkKind.ROWS:
        raise ValueError(f"chunk {chunk.ordinal} holds {chunk.kind} of {chunk.path}, not rows: use chunk_records")
    path = Path(chunk.data)
    with _unchanged(chunk):
        if path.suffix == ".arrow":
            for batch in _spooled_batches(path):
                yield batch if columns is None else batch.select(columns)
        else:
            yield from parquet_batches(path, chunk.start, chunk.stop, columns=columns, batch_bytes=batch_bytes)


def chunk_entries(chunk: Chunk) -> list[bytes]:
    """The undecoded entries of a chunk of a JSON list. Other kinds of chunks have none: `ValueError`."""
    if chunk.kind is not ChunkKind.ENTRIES:
        raise ValueError(f"chunk {chunk.ordinal} holds {chunk.kind} of {chunk.path}, not entries: use chunk_records")
    entries, _ = list_entries(b"[" + _bytes(chunk) + b"]", chunk.path)
    return entries


def _spooled_batches(path: Path) -> Iterator[Any]:
    """Batches of an Arrow stream, which holds the rows of one chunk and no others."""
    import pyarrow
    import pyarrow.ipc

    try:
        with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as batches:
            yield from batches
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is damaged: {error}") from None


@contextmanager
def _unchanged(chunk: Chunk) -> Iterator[None]:
    """Checks before and after reading that the file is still the one that the chunk was cut from."""
    check_unchanged(chunk.data, chunk.file_bytes, chunk.file_mtime_ns)
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {chunk.data}: {error.strerror or error}") from None
    check_unchanged(chunk.data, chunk.file_bytes, chunk.file_mtime_ns)


def check_unchanged(path: str, size: int, mtime_ns: int) -> None:
    """A `DataError` that says how, where a file has not this size and time of change any more."""
    try:
        now = os.stat(path)
    except OSError as error:
        raise DataError(f"{path} was there when the build began, and now: {error.strerror or error}") from None
    if now.st_size != size:
        change = f"it had {size} bytes and now has {now.st_size}"
    elif now.st_mtime_ns != mtime_ns:
        change = f"it was written to ({(now.st_mtime_ns - mtime_ns) / 1e9:+.3f} s)"
    else:
        return
    raise DataError(f"{path} has changed since the build began: {change}. Leave the inputs alone, and build again")
