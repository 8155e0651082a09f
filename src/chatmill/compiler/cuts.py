"""Where chunks begin and end: pure functions of an input's bytes and of the wanted size, never of the workers."""

from __future__ import annotations

import itertools
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chatmill.core.checksums import Hash
from chatmill.core.native.scan import count_lines

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


class LineCutter:
    """Cuts lines into chunks as their bytes come by, block after block, from the beginning of a file or from anywhere.

    Each line belongs to the chunk in which its first byte lies; chunk k begins at byte k * chunk_bytes. A line longer
    than a chunk leaves chunks without a line, which are skipped. Only a line feed ends a line.

    A cutter of the range from `start` to `stop` (both where a chunk begins) gives the chunks that begin in it, whatever
    the file holds elsewhere: it is fed from the byte before `start` on, so that a line feed there counts, until it
    `is_done`. Lines are numbered from 1, the first one of the range.
    """

    def __init__(self, chunk_bytes: int, limit: int, start: int = 0, stop: int = sys.maxsize) -> None:
        """A line may have `limit` bytes, and no block that the cutter is fed with more than that."""
        self.long_line: int | None = None
        """The number of a line that has more; nothing is cut from there on."""
        self.is_done = False
        """Whether the rest of the file makes no difference."""
        self._cuts: list[ChunkCut] = []
        self._chunk_bytes = chunk_bytes
        self._limit = limit
        self._stop = stop
        self._position = max(start - 1, 0)
        """Of the next byte that comes, in the file."""
        self._is_inside = start > 0
        """Whether this is still a line that began before the range."""
        self._first = 1
        self._begin(self._position)

    def _begin(self, start: int) -> None:
        """Begin a chunk."""
        self._start = start
        self._digest = Hash.XXH128.begin()
        self._border = (start // self._chunk_bytes + 1) * self._chunk_bytes - 1
        """The first line feed here or later ends the chunk."""
        self._lines = 0
        """Lines of the chunk that have ended."""
        self._open_bytes = 0
        """Bytes of the line that has not."""

    def feed(self, block: bytes) -> None:
        """Take the next bytes of the file."""
        base = self._position
        at = 0
        self._position += len(block)
        if self._is_inside:
            at = self._after_line_feed(block, 0)
            if base + (at or len(block)) >= self._stop:
                self.is_done = True
            if not at or self.is_done:
                return
            self._is_inside = False
            self._begin(base + at)
        while at < len(block) and not self.is_done:
            after = self._after_line_feed(block, max(at, self._border - base))
            self._take(block, at, after or len(block))
            if not after or self.long_line is not None:
                return
            self._end(base + after)
            self.is_done = base + after >= self._stop
            at = after

    @staticmethod
    def _after_line_feed(block: bytes, start: int) -> int:
        """Return where the line goes on after the first line feed from `start` on; 0 where there is none."""
        return block.find(b"\n", start) + 1

    def _take(self, block: bytes, start: int, stop: int) -> None:
        """Add bytes to the chunk that is open."""
        self._digest.update(memoryview(block)[start:stop])
        feed = block.find(b"\n", start, stop)
        self._open_bytes += (stop if feed < 0 else feed) - start
        if self._open_bytes > self._limit:  # a line within a block has no more bytes than that
            self.long_line = self._first + self._lines
            self.is_done = True
        elif feed >= 0:
            last = block.rfind(b"\n", start, stop) + 1
            self._lines += count_lines(block, start, last)
            self._open_bytes = stop - last

    def _end(self, stop: int) -> None:
        """End the chunk that is open, if it has a line, and begin the next."""
        if stop > self._start:
            count = self._lines + (self._open_bytes > 0)
            digest = self._digest.hexdigest()
            self._cuts.append(ChunkCut(start=self._start, stop=stop, first=self._first, count=count, digest=digest))
            self._first += count
        self._begin(stop)

    def finish(self) -> list[ChunkCut]:
        """Return all chunks, when the file has ended or the cutter is done."""
        if not self.is_done and not self._is_inside:
            self._end(self._position)
        self.is_done = True
        return self._cuts


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
