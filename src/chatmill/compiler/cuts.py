"""Where chunks begin and end: pure functions of an input's bytes and of the wanted size, never of the workers."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from chatmill.core.native.scan import count_lines
from chatmill.read.lines import LINE_LIMIT, line_too_long

ROW_LIMIT = 65_536
"""Rows of a chunk at most, since repeated texts hardly count in the size that Parquet states."""
SKIP_LIMIT = 4
"""How often a Parquet file may be decoded just to get to the chunks inside of its row groups."""
_BETWEEN = re.compile(rb"[ \t\r\n,]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCut:
    """One chunk of a file; ranges are without their end."""

    start: int
    stop: int
    """In bytes, or in rows counted from 0."""
    first: int
    """The number of the first line, entry or row, counted from 1."""
    count: int
    """How many lines (blank ones too), entries or rows."""
    digest: str = ""
    """Of its bytes, where these were read by themselves."""


class LineCutter:
    """Cuts a stream of bytes at line ends; a line belongs to the chunk in which its first byte lies.

    Chunk k is the bytes from k * chunk_bytes on. A line that is longer than a chunk leaves chunks without a line;
    those are left out. Only a line feed ends a line. A line with more than `line_limit` bytes is a `FormatError` that
    names `path`.
    """

    def __init__(self, chunk_bytes: int, path: str = "", line_limit: int = LINE_LIMIT) -> None:
        self._chunk_bytes = chunk_bytes
        self._path, self._line_limit = path, line_limit
        self._ended_lines = self._open_bytes = 0
        self._seen = 0
        self._newline_from = chunk_bytes - 1
        """The chunk ends after the first line feed at or behind this place in the stream."""
        self._lines = 0
        self._open_line = False

    def feed(self, block: bytes) -> list[tuple[int, int]]:
        """The chunks that end in this block: the place in the block right behind each, and its number of lines.

        A chunk can end with the block; it then holds everything up to there, and the next one may stay empty.
        """
        ends: list[tuple[int, int]] = []
        done, before = 0, self._lines
        while (search := max(self._newline_from - self._seen, 0)) < len(block):
            found = block.find(b"\n", search)
            if found < 0:
                break
            ends.append((found + 1, self._lines + _newlines(block, done, found + 1)))
            self._lines, done = 0, found + 1
            self._newline_from = ((self._seen + done) // self._chunk_bytes + 1) * self._chunk_bytes - 1
        self._lines += _newlines(block, done, len(block))
        self._check_lines(block, sum(count for _, count in ends) + self._lines - before)
        self._seen += len(block)
        self._open_line = not block.endswith(b"\n")
        return ends

    def _check_lines(self, block: bytes, newlines: int) -> None:
        """Lines within a block are measured only where the limit is less than a block."""
        limit, first = self._line_limit, block.find(b"\n")
        if self._open_bytes + (first if first >= 0 else len(block)) > limit:
            raise line_too_long(self._path, self._ended_lines + 1, limit)
        if len(block) > limit:
            long = (number for number, line in enumerate(block.split(b"\n")) if number and len(line) > limit)
            for number in long:
                raise line_too_long(self._path, self._ended_lines + 1 + number, limit)
        self._ended_lines += newlines
        self._open_bytes = len(block) - block.rfind(b"\n") - 1 if first >= 0 else self._open_bytes + len(block)

    def last(self) -> int:
        """Lines behind the last end that `feed` gave, one without a line feed included; 0: no chunk is left."""
        return self._lines + self._open_line


def _newlines(block: bytes, start: int, stop: int) -> int:
    """Line feeds in a part of a block."""
    return count_lines(block, start, stop) - (stop > start and block[stop - 1] != ord("\n"))


def entry_cuts(data: bytes, entries: Sequence[bytes], chunk_bytes: int) -> list[ChunkCut]:
    """Byte ranges of a JSON list; an entry belongs to the chunk in which its first byte lies.

    `entries` are the bytes of all entries as they are in `data`; what is between two of them is a comma and blanks.
    """
    starts, stops = [], []
    at = data.index(b"[") + 1
    for entry in entries:
        between = _BETWEEN.match(data, at)
        at = between.end() if between else at
        starts.append(at)
        at += len(entry)
        stops.append(at)
    cuts = []
    for _, members in itertools.groupby(range(len(entries)), key=lambda i: starts[i] // chunk_bytes):
        first, *rest = members
        last = rest[-1] if rest else first
        cuts.append(ChunkCut(start=starts[first], stop=stops[last], first=first + 1, count=1 + len(rest)))
    return cuts


def row_cuts(groups: Sequence[tuple[int, int]], chunk_bytes: int) -> list[ChunkCut]:
    """Row ranges of a Parquet file from the (rows, unpacked bytes) of its row groups.

    Small row groups share a chunk, large ones are cut into even parts, so that a chunk has about `chunk_bytes`, and at
    most `ROW_LIMIT` rows.
    """
    starts = _even_starts([group for group in groups if group[0]], chunk_bytes)
    borders = itertools.pairwise([*starts, sum(rows for rows, _ in groups)])
    return [ChunkCut(start=start, stop=stop, first=start + 1, count=stop - start) for start, stop in borders]


def _even_starts(groups: Sequence[tuple[int, int]], chunk_bytes: int) -> list[int]:
    starts: list[int] = []
    at = held_rows = held_bytes = 0
    for rows, size in groups:
        parts = min(rows, max(-(-size // chunk_bytes), -(-rows // ROW_LIMIT), 1))
        fits = held_bytes + size <= chunk_bytes and held_rows + rows <= ROW_LIMIT
        if starts and parts == 1 and fits:
            held_rows, held_bytes = held_rows + rows, held_bytes + size
        else:
            starts += [at + part * rows // parts for part in range(parts)]
            held_rows, held_bytes = (rows, size) if parts == 1 else (ROW_LIMIT, chunk_bytes)
        at += rows
    return starts


def skips_too_much(groups: Sequence[tuple[int, int]], cuts: Sequence[ChunkCut]) -> bool:
    """Whether reaching the chunks inside of row groups would decode the file more than `SKIP_LIMIT` times over."""
    ends = list(itertools.accumulate((rows for rows, _ in groups), initial=0))
    skipped = sum(cut.start - ends[bisect_right(ends, cut.start) - 1] for cut in cuts)
    return skipped > SKIP_LIMIT * ends[-1]
