"""Moves the borders of chunks so that records of one group, which share a tree or give one record, are in one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from chatmill.compiler.chunk_job import ChunkPiece
from chatmill.compiler.recipe import Source
from chatmill.errors import DataError
from chatmill.read.groups import record_groups

Chunks = tuple[tuple[ChunkPiece, ...], ...]


def whole_groups(chunks: Chunks, field_of: Callable[[Source], str | None]) -> Chunks:
    """Chunks that end where no group is cut in two: a chunk takes what the next ones begin with of its last group.

    `field_of` gives the field of a source that says the group, if any does. A group in two places that are no
    neighbours, and not in one chunk, is a `DataError`.
    """
    made: list[list[ChunkPiece]] = []
    seen: dict[bytes, int] = {}
    last, last_source = None, None
    for pieces in chunks:
        own: list[ChunkPiece] = []
        source = pieces[0].rules
        field = field_of(source)
        if source is not last_source:
            last, last_source = None, source
        if field is None:
            made.append(list(pieces))
            continue
        for piece in pieces:
            groups = list(record_groups(piece.range, field))[: piece.max_records]
            taken = _leading(groups, last) if last is not None and not own else 0
            if taken:
                made[-1].append(piece if taken == len(groups) else piece._replace(max_records=taken))
            if taken < len(groups):
                own.append(piece._replace(skip=taken))
                last = _entered(seen, groups, taken, piece, len(made), field) or last
        if own:
            made.append(own)
    return tuple(map(tuple, made))


def _leading(groups: list[str | None], last: str | None) -> int:
    """How many records at the beginning are of the group `last`, or of none."""
    return next((place for place, group in enumerate(groups) if group not in (None, last)), len(groups))


def _entered(
    seen: dict[bytes, int], groups: list[str | None], taken: int, piece: ChunkPiece, number: int, field: str
) -> str | None:
    """Note the chunk of every group; the last group."""
    last = None
    for place, group in enumerate(groups[taken:], piece.range.first + taken):
        if group is not None and group != last:
            key = hashlib.blake2b(f"{id(piece.rules)} {group}".encode(), digest_size=16).digest()
            if seen.setdefault(key, number) != number:
                value = group.partition("\0")[2].partition(" ")[2][:60]
                raise DataError(
                    f"{piece.range.before}{place}: an earlier record has the same {field}, {value!r}, and is too "
                    f"far away to be in one group with this one: sort the input by {field}, or build with a larger "
                    "shard_bytes, so that both are in one chunk"
                )
            last = group
    return last
