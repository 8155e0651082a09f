"""Moves the borders of chunks so that records of one group, which share a tree or give one record, are in one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from chatmill.compiler.chunk_job import ChunkPiece
from chatmill.errors import DataError
from chatmill.read.groups import record_groups
from chatmill.read.ranges import ChunkKind

Chunks = tuple[tuple[ChunkPiece, ...], ...]


def whole_groups(chunks: Chunks, owners: Sequence[int], fields: Sequence[str | None]) -> Chunks:
    """Chunks that end where no group is cut in two: a chunk takes what the next ones begin with of its last group.

    `owners` has the source of the recipe that each chunk is of, `fields` the field of each source that says the group,
    if any does. A group in two places that are no neighbours, and not in one chunk, is a `DataError`.
    """
    made: list[list[ChunkPiece]] = []
    seen: dict[bytes, int] = {}
    last, last_owner = None, -1
    for pieces, owner in zip(chunks, owners, strict=True):
        own: list[ChunkPiece] = []
        field = fields[owner]
        if field is None:
            made.append(list(pieces))
            last, last_owner = None, owner
            continue
        for piece in pieces:
            groups = piece_groups(piece, field)
            is_open = last is not None and owner == last_owner and not own
            taken = _leading(groups, last) if is_open else 0
            if taken:
                made[-1].append(piece if taken == len(groups) else piece._replace(max_records=taken))
            if taken < len(groups):
                own.append(piece._replace(skip=taken))
                last = _entered(seen, groups, taken, piece, (owner, len(made), field)) or last
        if own:
            made.append(own)
        last_owner = owner
    return tuple(map(tuple, made))


def _leading(groups: list[str | None], last: str | None) -> int:
    """How many records at the beginning are of the group `last`, or of none."""
    return next((place for place, group in enumerate(groups) if group not in (None, last)), len(groups))


def piece_groups(piece: ChunkPiece, field: str) -> list[str | None]:
    """The group of every line or row of a piece."""
    return list(record_groups(piece.range, field))[: piece.max_records]


def _entered(
    seen: dict[bytes, int], groups: list[str | None], taken: int, piece: ChunkPiece, at: tuple[int, int, str]
) -> str | None:
    """Note the chunk of every group; the last group."""
    owner, number, field = at
    last = None
    for place, group in enumerate(groups[taken:], piece.range.first + taken):
        if group is not None and group != last:
            key = hashlib.blake2b(f"{owner} {group}".encode(), digest_size=16).digest()
            if seen.setdefault(key, number) != number:
                row = "" if piece.range.kind is ChunkKind.LINES else "row "
                value = group.partition("\0")[2].partition(" ")[2][:60]
                raise DataError(
                    f"{piece.range.path}:{row}{place}: an earlier record has the same {field}, {value!r}, and is too "
                    f"far away to be in one group with this one: sort the input by {field}, or build with a larger "
                    "shard_bytes, so that both are in one chunk"
                )
            last = group
    return last
