"""Spools: inputs that cannot be read from the middle are written once as one file a chunk, with an index last."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from chatmill.compiler.cuts import ROW_LIMIT, ChunkCut, LineCutter
from chatmill.compiler.publish import AtomicFile, canonical_json, sha256_file, storing, write_atomic
from chatmill.errors import DataError
from chatmill.read.compressed import open_bytes
from chatmill.read.files import parquet_batches
from chatmill.read.lines import line_limit
from chatmill.store.parquet import ArrowSink

VERSION = 1
INDEX = "index.json"
BLOCK = 4 << 20
"""Bytes that are read at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolPart:
    """One file of a spool: the lines, entries or rows of one chunk, and no others."""

    name: str
    bytes: int
    sha256: str
    first: int
    """The number of the first line, entry or row in the input, counted from 1."""
    count: int
    """How many of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spool:
    """Where the spool of one input lies, and what it is a spool of."""

    folder: Path
    """Of all spools of a build."""
    sha256: str
    """Of the input file's bytes."""
    mtime_ns: int
    """Of the input file. The parts get it too: builders that write the same spool at once then write the same files."""
    cut: str
    """How the chunks were cut; another cut is another spool."""

    @property
    def home(self) -> Path:
        """The folder of this spool alone."""
        return self.folder / f"{self.sha256[:32]}-{self.cut}"

    def parts(self, suffix: str, write: Callable[[PartWriter], None]) -> list[SpoolPart]:
        """The parts of the spool: as they are where index and hashes say that all is whole, else written anew."""
        found = self._whole_parts()
        if found is not None:
            return found
        try:
            with storing(self.home, "create the folder"):
                self.home.mkdir(parents=True, exist_ok=True)
                (self.home / INDEX).unlink(missing_ok=True)
            with PartWriter(self.home, suffix, self.mtime_ns) as out:
                write(out)
            index = {**self._identity(), "parts": [asdict(part) for part in out.parts]}
            write_atomic(self.home / INDEX, canonical_json({**index, "sha256": _hash(index)}), step="spool_index")
        except BaseException:
            self._remove_unfinished()
            raise
        return out.parts

    def _whole_parts(self) -> list[SpoolPart] | None:
        """What the index says, where it and every part are as they were written; None where anything is not."""
        try:
            index = json.loads((self.home / INDEX).read_bytes())
            intact = index.pop("sha256") == _hash(index)
            parts = [SpoolPart(**part) for part in index.pop("parts")]
            intact = intact and index == self._identity() and all(self._is_whole(part) for part in parts)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return parts if intact else None

    def _is_whole(self, part: SpoolPart) -> bool:
        path = self.home / part.name
        return path.stat().st_size == part.bytes and sha256_file(path) == part.sha256

    def _identity(self) -> dict[str, Any]:
        return {"version": VERSION, "input_sha256": self.sha256, "cut": self.cut}

    def _remove_unfinished(self) -> None:
        if not (self.home / INDEX).exists():  # else another builder has finished the same spool meanwhile
            shutil.rmtree(self.home, ignore_errors=True)


def _hash(index: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(index)).hexdigest()


class PartWriter:
    """Writes the parts of a spool one after another; each appears when it is whole."""

    def __init__(self, home: Path, suffix: str, mtime_ns: int) -> None:
        self.parts: list[SpoolPart] = []
        """The finished parts."""
        self._home, self._suffix, self._mtime_ns = home, suffix, mtime_ns
        self._file: AtomicFile | None = None

    def write(self, data: bytes | memoryview) -> None:
        """Append to the current part; nothing makes no part."""
        if len(data):
            if self._file is None:
                self._file = AtomicFile(self._home / f"{len(self.parts):06d}{self._suffix}", step="spool")
            self._file.write(data)

    def end_part(self, count: int) -> None:
        """Publish the current part, which holds `count` lines, entries or rows."""
        file, self._file = self._file, None
        assert file is not None, "a part has bytes"
        with file, storing(file.path):
            file.flush()  # a write behind it would change the time again
            os.utime(file.temporary, ns=(self._mtime_ns, self._mtime_ns))
        first = self.parts[-1].first + self.parts[-1].count if self.parts else 1
        self.parts.append(SpoolPart(name=file.path.name, bytes=file.size, sha256=file.sha256, first=first, count=count))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.discard()


def spool_lines(path: Path, chunk_bytes: int, out: PartWriter, *, name: str | None = None) -> None:
    """Spool a packed JSONL file; the chunks are those of the unpacked file. Errors call it `name`."""
    cutter = LineCutter(chunk_bytes, name or str(path), line_limit())
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
    import pyarrow.ipc

    batches = parquet_batches(path)
    batch = next(batches, None)
    for cut in cuts:
        with contextlib.ExitStack() as stack:
            stream: Any = None
            missing = cut.count
            while missing:
                if batch is None:
                    raise DataError(f"{path} cannot be read as Parquet: the last {missing} rows or more are missing")
                stream = stream or stack.enter_context(pyarrow.ipc.new_stream(ArrowSink(out.write), batch.schema))
                part = batch.slice(0, missing)
                stream.write_batch(part)
                missing -= part.num_rows
                batch = batch.slice(part.num_rows) if part.num_rows < batch.num_rows else next(batches, None)
        out.end_part(cut.count)


def spool_table(path: Path, chunk_bytes: int, out: PartWriter) -> None:
    """Spool the rows of a CSV, TSV or Arrow file as Arrow streams of about `chunk_bytes`."""
    import pyarrow.ipc

    from chatmill.read.tables import table_batches

    stream: Any = None
    rows = size = 0
    for batch in table_batches(path):
        if stream is None:
            stream = pyarrow.ipc.new_stream(ArrowSink(out.write), batch.schema)
        stream.write_batch(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if size >= chunk_bytes or rows >= ROW_LIMIT:
            stream.close()
            out.end_part(rows)
            stream, rows, size = None, 0, 0
    if stream is not None:
        stream.close()
        out.end_part(rows)
