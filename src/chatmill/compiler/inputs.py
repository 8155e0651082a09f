"""Input files become fingerprints and tables of chunks.

What cannot be cut in place is first written as one plain file, a spool: packed lines and JSON lists as lines, tables as
Arrow streams.
"""

from __future__ import annotations

import itertools
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from chatmill.compiler.cuts import ROW_LIMIT, ChunkCut, line_cuts, row_cuts, skips_too_much, stream_cuts
from chatmill.compiler.recipe import SHARD_BYTES
from chatmill.core.checksums import Hash
from chatmill.core.publish import storing, whole_file
from chatmill.errors import DataError, FormatError, RecordError
from chatmill.read import lines
from chatmill.read.conversations import DETECT_RECORDS
from chatmill.read.file_format import FileFormat, file_format
from chatmill.read.files import list_entries, parquet_batches, parquet_groups
from chatmill.read.lines import is_packed, open_bytes
from chatmill.read.places import Elsewhere, Place, fetch, place
from chatmill.read.ranges import Chunk, ChunkKind, check_unchanged, chunk_records
from chatmill.read.shapes import detect_shape, preferred

BLOCK = 4 << 20
"""Bytes that are read at a time."""
ANY_SHAPE = "openai"
"""The shape of a file whose records need none, since none can be decoded or they are no conversations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """What was read: enough to know later whether it is still the same."""

    path: str
    """As it was named."""
    source: str
    shape: str
    bytes: int
    xxh128: str
    """Of the file as it lies on disk; for a packed file, of the packed bytes."""
    lines: int | None
    """Of JSONL, blank ones and a last one without line end included; None for the other formats."""
    records: int | None
    """Rows of Parquet, entries of a JSON list; None for JSONL, whose blank lines are not records."""
    mtime_ns: int
    data: str = ""
    """The file that was read where this is another one: the copy of what a URL or standard input gave."""

    def as_json(self) -> dict[str, Any]:
        """Return what a manifest says about the file; the time of its last change is no part of it."""
        names = ("path", "source", "shape", "bytes", "xxh128", "lines", "records")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFile:
    """What an earlier build found out about a file that has not changed since."""

    xxh128: str
    cuts: tuple[ChunkCut, ...]
    """Of JSONL, if all of them are known and were cut for the same size; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputScan:
    """The order to scan one file."""

    path: str
    """As it was named; records and messages say it like this."""
    spool: str
    """Folder for files that cannot be read from the middle; made when it is needed."""
    base: str = field(default_factory=os.getcwd)
    """The folder that relative paths start from: the current one, for a worker that runs in another."""
    source: str | None = None
    """None: the file's name without its endings."""
    shape: str | None = None
    """None: found from the first records."""
    preferences: str | None = None
    """As in a recipe: which answers of pairs are read."""
    chunk_bytes: int = SHARD_BYTES
    """Wanted bytes of a chunk, unpacked."""
    copy: str = ""
    """The copy of a file that is not on this machine; see `fetched`."""
    known: KnownFile | None = None

    @property
    def data(self) -> str:
        """The file as an absolute path."""
        return os.path.join(self.base, self.copy or self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedInput:
    """A file and its chunks, which are numbered from 0 within the file."""

    file: InputFile
    chunks: tuple[Chunk, ...]


def fetched(scan: InputScan) -> InputScan:
    """The same order, with a copy in the folder of spools where the file is behind a URL or is standard input."""
    where = place(scan.path)
    if not isinstance(where, Elsewhere):
        return scan
    with storing(scan.spool, "copy the input into"):
        return replace(scan, copy=str(fetch(where, Path(scan.base, scan.spool, "fetched")).absolute()))


def scan_input(scan: InputScan) -> ScannedInput:
    """Hash one file and cut it into chunks; the same bytes and sizes give the same chunks, always."""
    status, path = file_status(scan), place(scan.path)
    with _called_as_named(scan):
        form = file_format(Path(scan.data))
        is_lines = form in (FileFormat.JSONL, FileFormat.JSON)
        xxh128, data, cuts = (_cut_lines if is_lines else _cut_rows)(scan, form)
    check_unchanged(scan.data, status.st_size, status.st_mtime_ns)
    whole, source = data.stat(), scan.source if scan.source is not None else path.name.split(".")[0]
    total = sum(cut.count for cut in cuts)
    row_bytes = sum(size for _, size in parquet_groups(data)) / max(total, 1) if data.suffix == ".parquet" else 0
    chunks = [
        Chunk(
            path=str(path),
            source=source,
            shape=scan.shape or ANY_SHAPE,
            kind=ChunkKind.LINES if is_lines else ChunkKind.ROWS,
            is_list=form is FileFormat.JSON,
            data=str(data),
            bytes=round(row_bytes * cut.count) if row_bytes else cut.stop - cut.start,
            file_bytes=whole.st_size,
            file_mtime_ns=whole.st_mtime_ns,
            **asdict(replace(cut, digest=cut.digest or xxh128)),
        )
        for cut in cuts
    ]
    shape = preferred(scan.shape or _shape_of(chunks, path), scan.preferences)
    file = InputFile(
        path=str(path),
        source=source,
        shape=shape,
        bytes=status.st_size,
        xxh128=xxh128,
        lines=total if form is FileFormat.JSONL else None,
        records=None if form is FileFormat.JSONL else total,
        mtime_ns=status.st_mtime_ns,
        data=scan.copy,
    )
    return ScannedInput(file=file, chunks=tuple(replace(chunk, shape=shape) for chunk in chunks))


@contextmanager
def _called_as_named(scan: InputScan) -> Iterator[None]:
    """Errors call the file by the name that it was given, not by its absolute path or that of a copy."""
    try:
        yield
    except (DataError, FormatError) as error:
        if isinstance(error, RecordError) or scan.data not in str(error):
            raise
        raise type(error)(str(error).replace(scan.data, scan.path)) from None


def _cut_lines(scan: InputScan, form: FileFormat) -> tuple[str, Path, Sequence[ChunkCut]]:
    """Return the hash of a file of lines or of a list, the file that has it as plain lines, and the chunks of that."""
    path, is_list = Path(scan.data), form is FileFormat.JSON
    if not is_list and not is_packed(path):
        if scan.known is not None and scan.known.cuts:
            return scan.known.xxh128, path, scan.known.cuts
        digest = Hash.XXH128.begin()
        cuts = _line_cuts(scan, path, digest)
        return digest.hexdigest(), path, cuts

    def write(spool: Path) -> None:
        with spool.open("wb") as out:
            for block in _listed(scan) if is_list else lines.blocks_of_lines(_unpacked(path), scan.path):
                out.write(block)

    xxh128 = _xxh128(scan)
    plain = _spooled(scan, f"{xxh128}-{form}.jsonl", write)
    try:
        return xxh128, plain, _line_cuts(scan, plain, Hash.XXH128.begin(), sys.maxsize if is_list else None)
    except FormatError:
        plain.unlink(missing_ok=True)  # a file that is refused is not kept unpacked
        raise


def _line_cuts(scan: InputScan, path: Path, digest: Any, limit: int | None = None) -> list[ChunkCut]:
    with _reading(scan), open(path, "rb") as file:
        return list(line_cuts(file, scan.chunk_bytes, limit or lines.LINE_LIMIT, scan.path, digest))


def _unpacked(path: Path) -> Iterator[bytes]:
    """The unpacked bytes of a file; a generator, so that an error in writing them does not pass for one in reading."""
    with open_bytes(path) as stream:
        while block := stream.read(BLOCK):
            yield block


def _listed(scan: InputScan) -> Iterator[bytes]:
    """The entries of a JSON list, each as a line: a line end between the parts of an entry is as good as a blank."""
    data = b"".join(_unpacked(Path(scan.data)))
    for entry in list_entries(data, place(scan.path)):
        yield entry.replace(b"\n", b" ") + b"\n"


def _cut_rows(scan: InputScan, form: FileFormat) -> tuple[str, Path, Sequence[ChunkCut]]:
    """Return the same for rows: of Parquet as it is, or of Arrow streams, one for each chunk."""
    from chatmill.read.tables import table_batches

    xxh128, path, size = _xxh128(scan), Path(scan.data), scan.chunk_bytes
    batches: Callable[[Path], Iterator[Any]] = table_batches
    if form is FileFormat.PARQUET:
        groups = parquet_groups(path)
        cuts = row_cuts(groups, size)
        if not skips_too_much(groups, cuts):
            return xxh128, path, cuts
        batches = parquet_batches
    name = f"{xxh128}-{size}{''.join(path.suffixes[-2:])}.arrow"  # how a table is read depends on its ending
    plain = _spooled(scan, name, lambda spool: _write_streams(batches(path), size, spool))
    return xxh128, plain, stream_cuts(plain)


def _write_streams(batches: Iterator[Any], chunk_bytes: int, spool: Path) -> None:
    """Write rows as Arrow streams of about `chunk_bytes`."""
    import pyarrow.ipc

    with spool.open("wb") as file:
        stream, rows, size = None, 0, 0
        for batch in batches:
            step = max(1, chunk_bytes * batch.num_rows // max(batch.nbytes, 1))
            for start in range(0, batch.num_rows, step):
                part = batch.slice(start, step)
                if stream is None:
                    stream = pyarrow.ipc.new_stream(file, part.schema)
                stream.write_batch(part)
                rows, size = rows + part.num_rows, size + part.nbytes
                if size >= chunk_bytes or rows >= ROW_LIMIT:
                    stream.close()
                    stream, rows, size = None, 0, 0
        if stream is not None:
            stream.close()


def _spooled(scan: InputScan, name: str, write: Callable[[Path], None]) -> Path:
    """Return the spool of this name, which says which bytes it holds; it is there whole or not at all.

    Several builds, or threads, may write the same one: all have the same bytes, and the same time of change.
    """
    spool = Path(scan.base, scan.spool, name)
    if not spool.exists():
        with storing(spool):
            spool.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(spool) as temporary:
                write(temporary)
                os.utime(temporary, ns=(0, 0))
    return spool


def _shape_of(chunks: Sequence[Chunk], path: Place) -> str:
    """Return the shape that the first records that can be decoded have, as `ConversationFile` finds it."""
    records = itertools.chain.from_iterable(map(chunk_records, chunks))
    values = [raw.value for raw in itertools.islice((raw for raw in records if raw.error is None), DETECT_RECORDS)]
    return detect_shape(values, str(path)).name if values else ANY_SHAPE


def file_status(scan: InputScan) -> os.stat_result:
    """Return what the system says of a file; one that is not there, or that cannot be read twice, is an error."""
    path = scan.path
    try:
        status = os.stat(scan.data)
    except FileNotFoundError:
        raise DataError(f"no such file: {path}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if stat.S_ISDIR(status.st_mode):
        raise DataError(f"{path} is a folder; name its files, such as {os.path.join(path, '*.jsonl')}")
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is no regular file and cannot be read twice; copy what it gives into one first")
    return status


@contextmanager
def _reading(scan: InputScan) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {scan.path}: {error.strerror or error}") from None


def _xxh128(scan: InputScan) -> str:
    if scan.known is not None:
        return scan.known.xxh128
    with _reading(scan):
        return Hash.XXH128.of_file(Path(scan.data))
