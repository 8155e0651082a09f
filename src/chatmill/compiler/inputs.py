"""Input files become fingerprints and tables of chunks: one pass over each file, in memory that does not grow.

A JSON list is the exception: it can only be taken apart as a whole.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from chatmill.compiler.cuts import ChunkCut, LineCutter, entry_cuts, row_cuts, skips_too_much
from chatmill.compiler.recipe import SHARD_BYTES
from chatmill.compiler.spools import (
    BLOCK,
    PartWriter,
    spool_entries,
    spool_lines,
    spool_rows,
    spool_table,
    spooled_parts,
)
from chatmill.core.checksums import Hash
from chatmill.core.publish import storing
from chatmill.errors import ConfigError, DataError, FormatError, RecordError
from chatmill.read.compressed import is_packed, open_bytes
from chatmill.read.conversations import DETECT_RECORDS
from chatmill.read.file_format import FileFormat, file_format
from chatmill.read.files import list_entries, parquet_groups
from chatmill.read.lines import line_limit
from chatmill.read.places import Elsewhere, Place, fetch, place
from chatmill.read.ranges import Chunk, ChunkKind, check_unchanged, chunk_records
from chatmill.read.shapes import detect_shape, find_shape

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
        """What a manifest says about the file; the time of its last change is no part of it."""
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
    """The order to scan one file; small and picklable, a job for any executor."""

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
    chunk_bytes: int = SHARD_BYTES
    """Wanted bytes of a chunk, unpacked."""
    copy: str = ""
    """The copy of a file that is not on this machine; see `fetched`."""
    known: KnownFile | None = None

    @property
    def data(self) -> str:
        """The file as an absolute path."""
        return os.path.join(self.base, self.copy or self.path)

    @property
    def label(self) -> str:
        """The job in words."""
        return f"reading {self.path}"


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
    FileFormat.of(where)
    with storing(scan.spool, "copy the input into"):
        return replace(scan, copy=str(fetch(where, Path(scan.base, scan.spool, "fetched")).absolute()))


def check_inputs(scans: Sequence[InputScan]) -> None:
    """Quick checks of all files: each is there, is a file, has a known ending, and its options make sense."""
    for scan in scans:
        _status(scan)
        FileFormat.of(place(scan.path))
        if scan.shape is not None:
            find_shape(scan.shape)
        if scan.chunk_bytes < 1:
            raise ConfigError(f"chunk_bytes must be at least 1, found {scan.chunk_bytes}")


def check_inputs_unchanged(files: Iterable[InputFile], base: Path | None = None) -> None:
    """A `DataError` for the first file that has another size or time of change than when it was scanned."""
    for file in files:
        check_unchanged(os.path.join(base or "", file.data or file.path), file.bytes, file.mtime_ns)


def scan_input(scan: InputScan) -> ScannedInput:
    """Hash one file and cut it into chunks; the same bytes and sizes give the same chunks, always."""
    check_inputs([scan])
    status, path = _status(scan), place(scan.path)
    source = scan.source if scan.source is not None else path.name.split(".")[0]
    with _called_as_named(scan):
        data = Path(scan.data)
        form = file_format(data)
        xxh128, chunks = _SCANNERS[form, is_packed(data)](_Cutting(scan, status, source))
    check_unchanged(scan.data, status.st_size, status.st_mtime_ns)
    shape = scan.shape or _shape_of(chunks, path)
    total = sum(chunk.count for chunk in chunks)
    is_lines = form is FileFormat.JSONL
    file = InputFile(
        path=str(path),
        source=source,
        shape=shape,
        bytes=status.st_size,
        xxh128=xxh128,
        lines=total if is_lines else None,
        records=None if is_lines else total,
        mtime_ns=status.st_mtime_ns,
        data=scan.copy,
    )
    numbered = (
        replace(chunk, ordinal=ordinal, shape=shape, digest=chunk.digest or xxh128)
        for ordinal, chunk in enumerate(chunks)
    )
    return ScannedInput(file=file, chunks=tuple(numbered))


@contextmanager
def _called_as_named(scan: InputScan) -> Iterator[None]:
    """Errors call the file by the name that it was given, not by its absolute path or that of a copy."""
    try:
        yield
    except (DataError, FormatError) as error:
        if isinstance(error, RecordError) or scan.data not in str(error):
            raise
        raise type(error)(str(error).replace(scan.data, scan.path)) from None


class _Cutting(NamedTuple):
    """A file that is being cut."""

    scan: InputScan
    status: os.stat_result
    source: str

    @property
    def data(self) -> Path:
        """The file that is read."""
        return Path(self.scan.data)

    def own_chunks(self, kind: ChunkKind, cuts: Iterable[ChunkCut]) -> list[Chunk]:
        """Chunks that are read from the file itself."""
        return [self._chunk(kind, self.scan.data, self.status, cut, cut.stop - cut.start) for cut in cuts]

    def spooled(
        self, kind: ChunkKind, xxh128: str, suffix: str, cut: str, write: Callable[[PartWriter], None]
    ) -> list[Chunk]:
        """Chunks that are read from a spool; its name says which bytes it holds, and `cut` how they were cut."""
        home = Path(self.scan.base, self.scan.spool, f"{xxh128[:32]}-{cut}")
        chunks, first = [], 1
        for path, count in spooled_parts(home, suffix, write):
            status = path.stat()
            stop = count if kind is ChunkKind.ROWS else status.st_size
            own = ChunkCut(start=0, stop=stop, first=first, count=count)
            chunks.append(self._chunk(kind, str(path), status, own, status.st_size))
            first += count
        return chunks

    def _chunk(self, kind: ChunkKind, data: str, status: os.stat_result, cut: ChunkCut, size: int) -> Chunk:
        return Chunk(
            ordinal=0,
            path=str(place(self.scan.path)),
            source=self.source,
            shape=self.scan.shape or ANY_SHAPE,
            kind=kind,
            data=data,
            bytes=size,
            file_bytes=status.st_size,
            file_mtime_ns=status.st_mtime_ns,
            **asdict(cut),
        )


def _scan_jsonl(file: _Cutting) -> tuple[str, list[Chunk]]:
    if file.scan.known is not None and file.scan.known.cuts:
        return file.scan.known.xxh128, file.own_chunks(ChunkKind.LINES, file.scan.known.cuts)
    digest, cutter = Hash.XXH128.begin(), LineCutter(file.scan.chunk_bytes, file.scan.path, line_limit())
    cuts: list[ChunkCut] = []
    seen = start = 0
    first, own = 1, Hash.XXH128.begin()
    for block in _hashed_blocks(file.scan, digest):
        view, done = memoryview(block), 0
        for end, count in cutter.feed(block):
            own.update(view[done:end])
            cuts.append(ChunkCut(start=start, stop=seen + end, first=first, count=count, digest=own.hexdigest()))
            start, first, done, own = seen + end, first + count, end, Hash.XXH128.begin()
        own.update(view[done:])
        seen += len(block)
    if cutter.last():
        cuts.append(ChunkCut(start=start, stop=seen, first=first, count=cutter.last(), digest=own.hexdigest()))
    return digest.hexdigest(), file.own_chunks(ChunkKind.LINES, cuts)


def _scan_packed(file: _Cutting) -> tuple[str, list[Chunk]]:
    xxh128, size = _xxh128(file.scan), file.scan.chunk_bytes
    write = partial(spool_lines, file.data, size, name=file.scan.path)
    return xxh128, file.spooled(ChunkKind.LINES, xxh128, ".jsonl", f"lines-{size}", write)


def _scan_json(file: _Cutting) -> tuple[str, list[Chunk]]:
    digest, size = Hash.XXH128.begin(), file.scan.chunk_bytes
    data = b"".join(_hashed_blocks(file.scan, digest))
    entries, verbatim = list_entries(data, place(file.scan.path))
    if verbatim:
        return digest.hexdigest(), file.own_chunks(ChunkKind.ENTRIES, entry_cuts(data, entries, size))
    return _spooled_entries(file, digest.hexdigest(), entries)


def _scan_packed_json(file: _Cutting) -> tuple[str, list[Chunk]]:
    xxh128 = _xxh128(file.scan)
    with open_bytes(file.data) as stream:
        entries, _ = list_entries(stream.read(), place(file.scan.path))
    return _spooled_entries(file, xxh128, entries)


def _spooled_entries(file: _Cutting, xxh128: str, entries: list[bytes]) -> tuple[str, list[Chunk]]:
    size = file.scan.chunk_bytes
    write = partial(spool_entries, entries, size)
    return xxh128, file.spooled(ChunkKind.ENTRIES, xxh128, ".part", f"entries-{size}", write)


def _scan_table(file: _Cutting) -> tuple[str, list[Chunk]]:
    xxh128, size = _xxh128(file.scan), file.scan.chunk_bytes
    write = partial(spool_table, file.data, size)
    return xxh128, file.spooled(ChunkKind.ROWS, xxh128, ".arrow", f"table-{size}", write)


def _scan_parquet(file: _Cutting) -> tuple[str, list[Chunk]]:
    xxh128, size = _xxh128(file.scan), file.scan.chunk_bytes
    groups = parquet_groups(file.data)
    cuts = row_cuts(groups, size)
    if skips_too_much(groups, cuts):
        write = partial(spool_rows, file.data, cuts)
        return xxh128, file.spooled(ChunkKind.ROWS, xxh128, ".arrow", f"rows-{size}", write)
    row_bytes = sum(size for _, size in groups) / max(sum(rows for rows, _ in groups), 1)
    chunks = file.own_chunks(ChunkKind.ROWS, cuts)
    return xxh128, [replace(chunk, bytes=round(row_bytes * chunk.count)) for chunk in chunks]


_SCANNERS = {
    (FileFormat.JSONL, False): _scan_jsonl,
    (FileFormat.JSONL, True): _scan_packed,
    (FileFormat.JSON, False): _scan_json,
    (FileFormat.JSON, True): _scan_packed_json,
    (FileFormat.PARQUET, False): _scan_parquet,
    (FileFormat.TABLE, False): _scan_table,
    (FileFormat.TABLE, True): _scan_table,
}


def _shape_of(chunks: Sequence[Chunk], path: Place) -> str:
    """The shape that the first records that can be decoded have, as `ConversationFile` finds it."""
    records = itertools.chain.from_iterable(map(chunk_records, chunks))
    values = [raw.value for raw in itertools.islice((raw for raw in records if raw.error is None), DETECT_RECORDS)]
    return detect_shape(values, str(path)).name if values else ANY_SHAPE


def _status(scan: InputScan) -> os.stat_result:
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


def _hashed_blocks(scan: InputScan, digest: Any) -> Iterator[bytes]:
    """The bytes of a file in blocks, which are hashed on the way."""
    try:
        with open(scan.data, "rb", buffering=0) as file:
            while block := file.read(BLOCK):
                digest.update(block)
                yield block
    except OSError as error:
        raise DataError(f"cannot read {scan.path}: {error.strerror or error}") from None


def _xxh128(scan: InputScan) -> str:
    if scan.known is not None:
        return scan.known.xxh128
    digest = Hash.XXH128.begin()
    for _ in _hashed_blocks(scan, digest):
        pass
    return digest.hexdigest()
