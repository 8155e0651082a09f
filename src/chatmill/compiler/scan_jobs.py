"""Scan jobs: executors hash input files and cut them into chunks, part by part; no byte of them goes to the driver.

Where a chunk begins is known without reading, so the parts of one file are scanned independently of each other. What a
file is (lines or a list, the shape of its records) is found from its first bytes, by the job of its first part.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from chatmill.compiler.cuts import ChunkCut, LineCutter, row_cuts, skips_too_much
from chatmill.compiler.engines.jobs import Executor, results_of
from chatmill.compiler.inputs import (
    InputFile,
    InputScan,
    ScannedInput,
    called_as_named,
    reading,
    size_and_time,
)
from chatmill.compiler.spools import spooled_lines, spooled_rows
from chatmill.core import checksums
from chatmill.core.checksums import Hash, TreeDigest, tree_digest
from chatmill.files.builds import chunk_folder
from chatmill.files.inputs import StoredInput, fetch_inputs, share_input
from chatmill.read import lines
from chatmill.read.conversations import DETECT_RECORDS
from chatmill.read.file_format import FileFormat
from chatmill.read.files import Raw, batch_records, decode_line, parquet_batches, parquet_groups, read_format
from chatmill.read.lines import is_packed, line_too_long, numbered_lines
from chatmill.read.places import place
from chatmill.read.ranges import Chunk, ChunkKind, check_unchanged, spooled_batches
from chatmill.read.shapes import detect_shape, preferred

PART_BYTES = 64 << 20
"""Bytes of a part of a file, about; and what the parts of one job have together."""
FILE_COST = 256 << 10
"""Opening a file takes as long as scanning so many bytes."""
UNPACK_COST = 16
"""Unpacking a byte, or parsing one of a table, takes as long as scanning so many."""
BLOCK = 1 << 20
"""Bytes that are read at a time."""
FEW_BYTES = 1 << 16
"""Of the rows that are decoded to find the shape of a Parquet file."""
LINE_FORMS = (FileFormat.JSONL, FileFormat.JSON, FileFormat.AGENT)
"""Formats whose records are lines, of the file or of its spool."""
ANY_SHAPE = "openai"
"""The shape of a file whose records need none, since none can be decoded or they are no conversations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanPart:
    """A part of a file that one job scans: the blocks and the chunks that begin in a range of bytes."""

    scan: InputScan
    named: FileFormat
    """What the file should hold, by its name."""
    is_packed: bool
    """By its name."""
    start: int
    stop: int
    file_bytes: int
    """Of the whole file, when the driver looked; another size or time of change since then is an error."""
    file_mtime_ns: int

    @property
    def is_json(self) -> bool:
        """Whether the file should hold JSON that is not packed: lines, which are cut in place, or a list."""
        return self.named in (FileFormat.JSONL, FileFormat.JSON) and not self.is_packed

    @property
    def cost(self) -> int:
        """What the scan takes, in bytes that could be scanned in this time."""
        is_cut_in_place = self.is_json or self.named is FileFormat.PARQUET
        return FILE_COST + (self.stop - self.start) * (1 if is_cut_in_place else UNPACK_COST)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanJob:
    """The order to scan parts of files; small and picklable."""

    parts: tuple[ScanPart, ...]

    @property
    def label(self) -> str:
        """The job in words, for messages."""
        more = f" and {len(self.parts) - 1} more" if len(self.parts) > 1 else ""
        return f"the scan of {self.parts[0].scan.path}{more}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHead:
    """What a file is, by its first bytes."""

    form: FileFormat
    shape: str
    data: str
    """The file that holds the records, the input itself or its spool; empty where it is in a store."""
    far: StoredInput | None
    """The same in a store; None for a file that all workers see."""
    data_bytes: int
    data_mtime_ns: int
    cuts: tuple[ChunkCut, ...] | None
    """All chunks of the file; None where each part has its own."""
    row_bytes: float
    """Unpacked bytes of a row of Parquet, on average; 0 for the other formats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartScan:
    """What the scan of a part gives."""

    blocks: bytes
    """The digests of the blocks of the file that begin in the part."""
    cuts: tuple[ChunkCut, ...]
    """The chunks that begin in it; lines are counted from 1 at the first of them."""
    long_line: int | None
    """The number, counted likewise, of a line over the limit; the driver knows what it is in the file."""
    head: FileHead | None
    """Of the part with the first byte."""


def scan_input(scan: InputScan) -> ScannedInput:
    """Hash one file and cut it into chunks; the same bytes and sizes give the same chunks, always."""
    return scan_inputs([scan])[0]


def scan_inputs(scans: Sequence[InputScan], executor: Executor | None = None) -> list[ScannedInput]:
    """Scan files on an executor, or in this process; what is found does not depend on which, or on its workers."""
    parts = [_parts(scan) for scan in scans]
    jobs = _jobs(itertools.chain.from_iterable(parts))
    found = itertools.chain.from_iterable(results_of(executor, scan_parts, jobs))
    return [_joined(own, list(itertools.islice(found, len(own)))) for own in parts]


def _parts(scan: InputScan) -> list[ScanPart]:
    """Return the parts of a file: ranges of whole chunks of lines, or of bytes of Parquet; else one part."""
    path = place(scan.path)
    size, mtime_ns = size_and_time(scan)
    whole = ScanPart(
        scan=scan,
        named=FileFormat.of(path),
        is_packed=is_packed(path),
        start=0,
        stop=size,
        file_bytes=size,
        file_mtime_ns=mtime_ns,
    )
    step = max(size, 1)
    if whole.is_json and not (scan.known and scan.known.cuts):
        step = max(1, PART_BYTES // scan.chunk_bytes) * scan.chunk_bytes
    elif whole.named is FileFormat.PARQUET and scan.known is None:
        step = PART_BYTES
    if size <= step:
        return [whole]
    return [replace(whole, start=start, stop=min(start + step, size)) for start in range(0, size, step)]


def _jobs(parts: Iterable[ScanPart]) -> list[ScanJob]:
    """Put parts into jobs of about the same cost."""
    jobs: list[list[ScanPart]] = []
    room = 0
    for part in parts:
        cost = part.cost
        if cost > room:
            jobs.append([])
            room = PART_BYTES + FILE_COST
        jobs[-1].append(part)
        room -= cost
    return [ScanJob(parts=tuple(own)) for own in jobs]


def scan_parts(job: ScanJob) -> list[PartScan]:
    """Do a scan job; what it gives is as small as the number of chunks and of MiB."""
    fetch_inputs(part.scan.far for part in job.parts)
    return [_scanned(replace(part, scan=part.scan.here())) for part in job.parts]


def _scanned(part: ScanPart) -> PartScan:
    """Scan a part of a file that must be, and stay, the one that the driver has seen."""
    scan = part.scan
    cutter = None
    blocks = b""
    head = None
    with called_as_named(scan):
        form = read_format(Path(scan.data), scan.shape) if part.start == 0 else None
        if part.is_json and form not in (FileFormat.JSON, FileFormat.AGENT):
            cutter = LineCutter(scan.chunk_bytes, lines.LINE_LIMIT, part.start, part.stop)
        if scan.known is None or (cutter is not None and not scan.known.cuts):
            blocks = _read(part, cutter)
        if form is not None:
            with _spool_folder(part) as spooling:
                head = _head(spooling, form, blocks, is_cut_here=cutter is not None)
    if scan.far is None:
        check_unchanged(scan.data, part.file_bytes, part.file_mtime_ns)
    return PartScan(
        blocks=blocks,
        cuts=() if cutter is None else tuple(cutter.finish()),
        long_line=None if cutter is None else cutter.long_line,
        head=head,
    )


@contextlib.contextmanager
def _spool_folder(part: ScanPart) -> Iterator[ScanPart]:
    """Give the order with the folder for its spool: that of the build, or where no folder is shared one for now."""
    if not part.scan.share:
        yield part
        return
    with chunk_folder() as folder:
        yield replace(part, scan=replace(part.scan, spool=str(folder)))


def _read(part: ScanPart, cutter: LineCutter | None) -> bytes:
    """Read a part, and on to the end of its last line and block; return the digests of its blocks."""
    first = _next_block(part.start)
    last = _next_block(part.stop)
    digest = TreeDigest()
    step = min(BLOCK, lines.LINE_LIMIT)
    position = max(part.start - 1, 0)
    with reading(part.scan), open(part.scan.data, "rb", buffering=0) as file:
        file.seek(position)
        while position < last or (cutter is not None and not cutter.is_done):
            block = file.read(step)
            if not block:
                break
            if cutter is not None and not cutter.is_done:
                cutter.feed(block)
            begin = max(first - position, 0)
            end = max(last - position, 0)
            digest.update(memoryview(block)[begin:end])
            position += len(block)
    return digest.blocks


def _next_block(position: int) -> int:
    """Return where the first block of the file's hash begins that does not begin before a position."""
    return -(-position // checksums.TREE_BLOCK) * checksums.TREE_BLOCK


def _head(part: ScanPart, form: FileFormat, blocks: bytes, *, is_cut_here: bool) -> FileHead:
    """Find out what a file is; write its spool if it needs one."""
    scan = part.scan
    data = Path(scan.data)
    cuts: Sequence[ChunkCut] | None = None
    row_bytes = 0.0
    if is_cut_here:
        if scan.known is not None and scan.known.cuts:
            cuts = scan.known.cuts
    elif form in LINE_FORMS:
        data, cuts = spooled_lines(scan, form, _whole_digest(part, blocks))
    else:
        data, cuts = _cut_rows(part, form, blocks)
        if data.suffix == ".parquet":
            unpacked = sum(size for _, size in parquet_groups(data))
            row_bytes = unpacked / max(sum(cut.count for cut in cuts), 1)
    status = data.stat()
    is_spool = str(data) != scan.data
    far = None if is_spool else scan.far
    if is_spool and scan.share:
        far = share_input(data, f"{scan.share}/{data.name}", scan.access)
    return FileHead(
        form=form,
        shape=preferred(scan.shape or _shape_of(scan, form, data, cuts), scan.preferences),
        data=str(data) if far is None else "",
        far=far,
        data_bytes=status.st_size,
        data_mtime_ns=status.st_mtime_ns,
        cuts=None if cuts is None else tuple(cuts),
        row_bytes=row_bytes,
    )


def _whole_digest(part: ScanPart, blocks: bytes) -> str:
    """Return the digest of the whole file, of which this is the first part."""
    if part.scan.known is not None:
        return part.scan.known.digest
    if part.stop == part.file_bytes:
        return tree_digest(blocks)
    with reading(part.scan):
        return Hash.TREE_XXH128.of_file(Path(part.scan.data))


def _cut_rows(part: ScanPart, form: FileFormat, blocks: bytes) -> tuple[Path, Sequence[ChunkCut]]:
    """Return the file that has the rows (Parquet as it is, else a spool), and its chunks."""
    from chatmill.read.tables import table_batches  # pyarrow takes its time

    scan = part.scan
    path = Path(scan.data)
    if form is FileFormat.PARQUET:
        groups = parquet_groups(path)
        cuts = row_cuts(groups, scan.chunk_bytes)
        if not skips_too_much(groups, cuts):
            return path, cuts
        batches = parquet_batches(path)
    else:
        batches = table_batches(path)
    return spooled_rows(scan, batches, _whole_digest(part, blocks))


def _shape_of(scan: InputScan, form: FileFormat, data: Path, cuts: Sequence[ChunkCut] | None) -> str:
    """Return the shape that the first records that can be decoded have, as `ConversationFile` finds it."""
    records: Iterable[Raw]
    if form in LINE_FORMS:
        records = (decode_line(line, "") for _, line in numbered_lines(data))
    elif data.suffix == ".arrow" and cuts is not None:
        streams = (spooled_batches(data, cut.start) for cut in cuts)
        records = batch_records(itertools.chain.from_iterable(streams), data, itertools.count(1))
    else:
        records = batch_records(parquet_batches(data, batch_bytes=FEW_BYTES), data, itertools.count(1))
    readable = (raw.value for raw in records if raw.error is None)
    values = list(itertools.islice(readable, DETECT_RECORDS))
    return detect_shape(values, str(place(scan.path))).name if values else ANY_SHAPE


def _joined(parts: Sequence[ScanPart], found: Sequence[PartScan]) -> ScannedInput:
    """Put together what the parts of a file gave: its hash, and its chunks with their numbers in the file."""
    scan = parts[0].scan
    path = place(scan.path)
    head = found[0].head
    assert head is not None
    cuts = _numbered(scan, found) if head.cuts is None else list(head.cuts)
    digest = tree_digest(b"".join(one.blocks for one in found)) if scan.known is None else scan.known.digest
    kind = ChunkKind.LINES if head.form in LINE_FORMS else ChunkKind.ROWS
    total = sum(cut.count for cut in cuts)
    source = scan.source if scan.source is not None else path.name.split(".")[0]
    chunks = [
        Chunk(
            path=str(path),
            source=source,
            shape=head.shape,
            kind=kind,
            is_list=head.form in (FileFormat.JSON, FileFormat.AGENT),
            data=head.data,
            far=head.far,
            start=cut.start,
            stop=cut.stop,
            first=cut.first,
            count=cut.count,
            digest=cut.digest or digest,
            bytes=round(head.row_bytes * cut.count) if head.row_bytes else cut.stop - cut.start,
            file_bytes=head.data_bytes,
            file_mtime_ns=head.data_mtime_ns,
        )
        for cut in cuts
    ]
    file = InputFile(
        path=str(path),
        source=source,
        shape=head.shape,
        bytes=parts[0].file_bytes,
        digest=digest,
        lines=total if head.form is FileFormat.JSONL else None,
        records=None if head.form is FileFormat.JSONL else total,
        mtime_ns=parts[0].file_mtime_ns,
    )
    return ScannedInput(file=file, chunks=tuple(chunks))


def _numbered(scan: InputScan, found: Sequence[PartScan]) -> list[ChunkCut]:
    """Return the chunks of all parts, with the numbers that their lines have in the file."""
    cuts: list[ChunkCut] = []
    before = 0
    for one in found:
        if one.long_line is not None:
            raise line_too_long(scan.path, before + one.long_line)
        cuts += [replace(cut, first=before + cut.first) for cut in one.cuts]
        before += sum(cut.count for cut in one.cuts)
    return cuts
