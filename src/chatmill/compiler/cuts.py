"""Where chunks begin and end: pure functions of an input's bytes and of the wanted size, never of the workers."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from chatmill.core.checksums import Hash
from chatmill.core.native.scan import count_lines
from chatmill.read.lines import line_too_long

BLOCK = 1 << 20
"""Bytes of lines that are read at a time."""
ROW_LIMIT = 65_536
"""Rows of a chunk at most, since repeated texts hardly count in the size that Parquet states."""
SKIP_LIMIT = 4
"""How often a Parquet file may be decoded just to get to the chunks inside of its row groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCut:
    """One chunk of a file; ranges are without their end."""

    start: int
    stop: int
    """In bytes, or in rows of Parquet counted from 0."""
    first: int
    """The number of the first line or row, counted from 1."""
    count: int
    """How many lines (blank ones too) or rows."""
    digest: str = ""
    """Of its bytes, if these were read by themselves."""


def line_cuts(file: IO[bytes], chunk_bytes: int, limit: int, name: str, whole: Any) -> Iterator[ChunkCut]:
    """Cut lines: each belongs to the chunk in which its first byte lies; chunk k begins at byte k * chunk_bytes.

    A line longer than a chunk leaves chunks without a line, which are skipped. Only a line feed ends a line.
    One with more than `limit` bytes is a `FormatError` that names `name`. The hash `whole` is updated with all bytes.
    """
    start, first, step = 0, 1, min(BLOCK, limit)
    while True:
        digest, stop, ended, open_bytes = Hash.XXH128.begin(), start, 0, 0
        for block in _to_border(file, chunk_bytes - start % chunk_bytes - 1, step):
            whole.update(block)
            digest.update(block)
            stop += len(block)
            newline = block.find(b"\n")
            open_bytes += newline if newline >= 0 else len(block)
            if open_bytes > limit:  # a line within a block has no more bytes than that
                raise line_too_long(name, first + ended)
            if newline >= 0:
                open_bytes = len(block) - block.rfind(b"\n") - 1
                ended += count_lines(block, 0, len(block) - open_bytes)
        if stop == start:
            return
        count = ended + (open_bytes > 0)
        yield ChunkCut(start=start, stop=stop, first=first, count=count, digest=digest.hexdigest())
        start, first = stop, first + count


def _to_border(file: IO[bytes], size: int, step: int) -> Iterator[bytes]:
    """Read so many bytes, and on to the end of the line; in blocks, which the allocator gives again and again."""
    while size > 0 and (block := file.read(min(step, size))):
        size -= len(block)
        yield block
    while block := file.readline(step):
        yield block
        if block.endswith(b"\n"):
            return


def row_cuts(groups: Sequence[tuple[int, int]], chunk_bytes: int) -> list[ChunkCut]:
    """Row ranges of a Parquet file from the (rows, unpacked bytes) of its row groups.

    Small row groups share a chunk, large ones are cut into even parts, so that a chunk has about `chunk_bytes`, and at
    most `ROW_LIMIT` rows.
    """
    starts: list[int] = []
    at = held_rows = held_bytes = 0
    for rows, size in groups:
        parts = min(rows, max(-(-size // chunk_bytes), -(-rows // ROW_LIMIT), 1))
        fits = held_bytes + size <= chunk_bytes and held_rows + rows <= ROW_LIMIT
        if starts and parts == 1 and fits:
            held_rows, held_bytes = held_rows + rows, held_bytes + size
        elif rows:
            starts += [at + part * rows // parts for part in range(parts)]
            held_rows, held_bytes = (rows, size) if parts == 1 else (ROW_LIMIT, chunk_bytes)
        at += rows
    borders = itertools.pairwise([*starts, at])
    return [ChunkCut(start=start, stop=stop, first=start + 1, count=stop - start) for start, stop in borders]


def skips_too_much(groups: Sequence[tuple[int, int]], cuts: Sequence[ChunkCut]) -> bool:
    """Whether reaching the chunks inside of row groups would decode the file more than `SKIP_LIMIT` times over."""
    ends = list(itertools.accumulate((rows for rows, _ in groups), initial=0))
    skipped = sum(cut.start - ends[bisect_right(ends, cut.start) - 1] for cut in cuts)
    return skipped > SKIP_LIMIT * ends[-1]


def stream_cuts(path: Path) -> list[ChunkCut]:
    """Cut a file of Arrow streams, each of which is a chunk."""
    import pyarrow
    import pyarrow.ipc

    cuts: list[ChunkCut] = []
    first = 1
    with pyarrow.memory_map(str(path)) as file:
        while (start := file.tell()) < file.size():
            count = sum(batch.num_rows for batch in pyarrow.ipc.open_stream(file))
            cuts.append(ChunkCut(start=start, stop=file.tell(), first=first, count=count))
            first += count
    return cuts
