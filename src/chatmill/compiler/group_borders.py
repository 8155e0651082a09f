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
    """Move the borders of chunks so that none cuts a group: a chunk takes the rest of its last group from the next.

    `field_of` gives the group field of a source, if it has one. A group whose records are neither neighbours nor in
    one chunk is a `DataError`.
    """
    result: list[list[ChunkPiece]] = []
    seen: dict[bytes, int] = {}
    last, last_source = None, None
    for pieces in chunks:
        current: list[ChunkPiece] = []
        source = pieces[0].rules
        field = field_of(source)
        if source is not last_source:
            last, last_source = None, source
        if field is None:
            result.append(list(pieces))
            continue
        for piece in pieces:
            groups = list(record_groups(piece.range, field))[: piece.max_records]
            leading = _leading(groups, last) if last is not None and not current else 0
            if leading:
                result[-1].append(piece if leading == len(groups) else piece._replace(max_records=leading))
            if leading < len(groups):
                current.append(piece._replace(skip=leading))
                last = _entered(seen, groups, leading, piece, len(result), field) or last
        if current:
            result.append(current)
    return tuple(map(tuple, result))


def _leading(groups: list[str | None], last: str | None) -> int:
    """How many records at the beginning are of the group `last`, or of none."""
    return next((place for place, group in enumerate(groups) if group not in (None, last)), len(groups))


def _entered(
    seen: dict[bytes, int], groups: list[str | None], leading: int, piece: ChunkPiece, number: int, field: str
) -> str | None:
    """Note the chunk of every group and return the last group."""
    last = None
    for place, group in enumerate(groups[leading:], piece.range.first + leading):
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
