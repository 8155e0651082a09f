"""Spools: inputs that cannot be read from the middle are written once, as a folder with one file for each chunk."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from chatmill.compiler.chunk_output import publish_with_receipt, whole_receipt
from chatmill.compiler.cuts import ROW_LIMIT, ChunkCut, LineCutter
from chatmill.core.publish import GrowingFile, StorageError
from chatmill.errors import ConfigError, DataError
from chatmill.read.compressed import open_bytes
from chatmill.read.files import parquet_batches
from chatmill.read.lines import line_limit

BLOCK = 4 << 20
"""Bytes that are read at a time."""


def spooled_parts(home: Path, suffix: str, write: Callable[[PartWriter], None]) -> list[tuple[Path, int]]:
    """The files of a spool in order, with the lines, entries or rows in each; written unless `home` has them whole.

    Builds that write the same spool at once do not disturb each other: the first one to finish gives it its name.
    """
    whole = whole_receipt(home) if home.exists() else None
    receipt = whole or _write_spool(home, suffix, write)
    return [(home / name, count) for name, count in sorted(receipt["counts"].items())]


def _write_spool(home: Path, suffix: str, write: Callable[[PartWriter], None]) -> dict[str, Any]:
    def write_parts(folder: Path) -> dict[str, Any]:
        with closing(PartWriter(folder, suffix)) as out:
            write(out)
            return {"splits": {}, "files": out.files, "counts": out.counts}

    try:
        return publish_with_receipt(home, write_parts, replace=False)
    except (ConfigError, StorageError):
        theirs = whole_receipt(home) if home.exists() else None  # another build may have been faster
        if theirs is None:
            raise
        return theirs


class PartWriter:
    """Writes the parts of a spool one after another."""

    def __init__(self, folder: Path, suffix: str) -> None:
        self.files: dict[str, dict[str, Any]] = {}
        """Size and hash of each finished part, as a receipt has them."""
        self.counts: dict[str, int] = {}
        """Lines, entries or rows of each."""
        self._folder, self._suffix = folder, suffix
        self._file: GrowingFile | None = None
        self._stream: Any = None

    def write(self, data: bytes | memoryview) -> None:
        """Append to the current part; nothing makes no part."""
        if len(data):
            if self._file is None:
                path = self._folder / f"{len(self.files):06d}{self._suffix}"
                self._file = GrowingFile(path)
            self._file.write(data)

    def write_rows(self, batch: Any) -> None:
        """Append an Arrow batch to the current part, which is an Arrow stream."""
        import pyarrow.ipc

        if self._stream is None:
            self._stream = pyarrow.ipc.new_stream(ArrowSink(self.write), batch.schema)
        self._stream.write_batch(batch)

    def end_part(self, count: int) -> None:
        """Finish the current part, which holds `count` lines, entries or rows."""
        if self._stream is not None:
            self._stream.close()
        file, self._file, self._stream = self._file, None, None
        assert file is not None, "a part has bytes"
        self.counts[file.path.name] = count
        self.files[file.path.name] = file.finish().to_json()

    def close(self) -> None:
        """Close a part that is not finished."""
        if self._file is not None:
            self._file.discard()


def spool_lines(path: Path, chunk_bytes: int, out: PartWriter, *, name: str) -> None:
    """Spool a packed JSONL file; the chunks are those of the unpacked file. Errors call it `name`."""
    cutter = LineCutter(chunk_bytes, name, line_limit())
    for block in _unpacked_blocks(path):
        view, done = memoryview(block), 0
        for end, count in cutter.feed(block):
            out.write(view[done:end])
            out.end_part(count)
            done = end
        out.write(view[done:])
    if cutter.last():
        out.end_part(cutter.last())


def _unpacked_blocks(path: Path) -> Iterator[bytes]:
    """The unpacked bytes of a file; a generator, so that an error in writing them does not pass for one in reading."""
    with open_bytes(path) as stream:
        while block := stream.read(BLOCK):
            yield block


def spool_entries(entries: Sequence[bytes], chunk_bytes: int, out: PartWriter) -> None:
    """Spool the entries of a JSON list that cannot be taken from its bytes as they are."""
    part: list[bytes] = []
    size = 0
    for entry in entries:
        if part and size + len(entry) > chunk_bytes:
            out.write(b",".join(part))
            out.end_part(len(part))
            part, size = [], 0
        part.append(entry)
        size += len(entry)
    if part:
        out.write(b",".join(part))
        out.end_part(len(part))


def spool_rows(path: Path, cuts: Sequence[ChunkCut], out: PartWriter) -> None:
    """Spool the rows of a Parquet file as Arrow streams, so that a chunk far inside of a row group is near."""
    batches = parquet_batches(path)
    batch = next(batches, None)
    for cut in cuts:
        missing = cut.count
        while missing:
            if batch is None:
                raise DataError(f"{path} cannot be read as Parquet: the last {missing} rows or more are missing")
            part = batch.slice(0, missing)
            out.write_rows(part)
            missing -= part.num_rows
            batch = batch.slice(part.num_rows) if part.num_rows < batch.num_rows else next(batches, None)
        out.end_part(cut.count)


def spool_table(path: Path, chunk_bytes: int, out: PartWriter) -> None:
    """Spool the rows of a CSV, TSV or Arrow file as Arrow streams of about `chunk_bytes`."""
    from chatmill.read.tables import table_batches

    rows = size = 0
    for batch in table_batches(path):
        out.write_rows(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if size >= chunk_bytes or rows >= ROW_LIMIT:
            out.end_part(rows)
            rows = size = 0
    if rows:
        out.end_part(rows)


class ArrowSink(io.RawIOBase):
    """A file for Arrow to write to that passes all bytes to a writer with a running hash."""

    def __init__(self, write: Callable[[Any], None]) -> None:
        """`write` takes the next bytes."""
        super().__init__()
        self._write = write

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, data: Any) -> int:
        """Pass bytes on."""
        self._write(memoryview(data))
        return len(data)
