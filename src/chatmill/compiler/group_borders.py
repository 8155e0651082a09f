"""Groups of records and the borders of chunks: no border cuts a group.

Executors read the records, and give a summary for each piece of a chunk: where its first group ends, and digests of all
its groups. From these the driver moves borders, and finds groups whose records are too far apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from chatmill.compiler.chunk_job import ChunkPiece
from chatmill.compiler.engines.jobs import Executor, results_of
from chatmill.compiler.recipe import Source
from chatmill.errors import DataError
from chatmill.read.groups import record_groups

Chunks = tuple[tuple[ChunkPiece, ...], ...]
DIGEST = 16
"""Bytes of the digest of a group: so many that no two groups have the same one."""
JOB_BYTES = 16 << 20
"""Bytes of the pieces of one job, about."""
PIECE_COST = 256 << 10
"""Opening a file takes as long as reading so many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsJob:
    """The order to summarize the groups of some pieces; small and picklable."""

    pieces: tuple[ChunkPiece, ...]
    field: str
    """The field that records of a group agree in."""

    @property
    def label(self) -> str:
        """The job in words, for messages."""
        return f"the groups of {self.pieces[0].range.describe()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceGroups:
    """The groups of the records of a piece, in short."""

    count: int
    """Records of the piece: lines (blank ones too) or rows."""
    ungrouped: int
    """How many of them, at its beginning, are in no group."""
    first_run: int
    """How many, at its beginning, are in no group or in the first one."""
    first: bytes | None
    """The digest of the first group; None: no record is in one."""
    last: bytes | None
    digests: bytes
    """Of all its groups, each once, one after the other."""
    digests_after: bytes
    """Of those that it has after the first run."""

    def leading(self, last: bytes | None) -> int:
        """Return how many records at the beginning belong to the chunk before, whose last group this is.

        Those of this group, and those of none.
        """
        if last is None:
            return 0
        if self.first is None:
            return self.count
        return self.first_run if self.first == last else self.ungrouped


def summarize_groups(job: GroupsJob) -> list[PieceGroups]:
    """Read the pieces of a job and summarize their groups."""
    return [_summary(piece, job.field) for piece in job.pieces]


def _summary(piece: ChunkPiece, field: str) -> PieceGroups:
    groups = list(record_groups(piece.range, field))[: piece.max_records]
    first = next((group for group in groups if group is not None), None)
    ungrouped = next((index for index, group in enumerate(groups) if group is not None), len(groups))
    first_run = next((index for index, group in enumerate(groups) if group not in (None, first)), len(groups))
    last = next((group for group in reversed(groups) if group is not None), None)
    return PieceGroups(
        count=len(groups),
        ungrouped=ungrouped,
        first_run=first_run,
        first=None if first is None else _digest(first),
        last=None if last is None else _digest(last),
        digests=_digests(groups),
        digests_after=_digests(groups[first_run:]),
    )


def _digests(groups: Iterable[str | None]) -> bytes:
    """Return the digests of groups, each once."""
    return b"".join(_digest(group) for group in dict.fromkeys(groups) if group is not None)


def _digest(group: str) -> bytes:
    return hashlib.blake2b(group.encode(), digest_size=DIGEST).digest()


def whole_groups(chunks: Chunks, field_of: Callable[[Source], str | None], executor: Executor | None = None) -> Chunks:
    """Move the borders of chunks so that none cuts a group: a chunk takes the rest of its last group from the next.

    `field_of` gives the group field of a source, if it has one. A group whose records are neither neighbours nor in
    one chunk is a `DataError`.
    """
    summaries = iter(_summaries(chunks, field_of, executor))
    result: list[list[ChunkPiece]] = []
    seen = _GroupsOfChunks()
    last: bytes | None = None
    last_source: Source | None = None
    for pieces in chunks:
        source = pieces[0].rules
        field = field_of(source)
        if source is not last_source:
            seen.check(result, executor)
            seen = _GroupsOfChunks(field or "")
            last = None
            last_source = source
        if field is None:
            result.append(list(pieces))
            continue
        current: list[ChunkPiece] = []
        for piece in pieces:
            summary = next(summaries)
            leading = 0 if current else summary.leading(last)
            if leading:
                result[-1].append(piece if leading == summary.count else piece._replace(max_records=leading))
            if leading < summary.count:
                current.append(piece._replace(skip=leading))
                has_left_first = leading > 0 and leading == summary.first_run
                seen.add(len(result), summary.digests_after if has_left_first else summary.digests)
                last = summary.last or last
        if current:
            result.append(current)
    seen.check(result, executor)
    return tuple(map(tuple, result))


def _summaries(
    chunks: Chunks, field_of: Callable[[Source], str | None], executor: Executor | None
) -> list[PieceGroups]:
    """Return the summaries of all pieces whose source has groups, in order."""
    jobs: list[GroupsJob] = []
    room = 0
    for piece in (piece for pieces in chunks for piece in pieces):
        field = field_of(piece.rules)
        if field is None:
            continue
        if not jobs or room <= 0 or jobs[-1].field != field:
            jobs.append(GroupsJob(pieces=(), field=field))
            room = JOB_BYTES
        jobs[-1] = GroupsJob(pieces=(*jobs[-1].pieces, piece), field=field)
        room -= piece.range.bytes + PIECE_COST
    return [summary for found in results_of(executor, summarize_groups, jobs) for summary in found]


class _GroupsOfChunks:
    """Digests of the groups of each chunk of one source, to find a group that is in two."""

    def __init__(self, field: str = "") -> None:
        self._field = field
        self._digests: list[bytes] = []
        self._chunks: list[int] = []
        """One for each of these."""

    def add(self, chunk: int, digests: bytes) -> None:
        """Note the groups of a piece of a chunk."""
        self._digests.append(digests)
        self._chunks.append(chunk)

    def check(self, chunks: Sequence[Sequence[ChunkPiece]], executor: Executor | None) -> None:
        """Raise a `DataError` about the first record whose group is in an earlier chunk."""
        keys = np.frombuffer(b"".join(self._digests), dtype=np.uint64).reshape(-1, DIGEST // 8)
        counts = [len(digests) // DIGEST for digests in self._digests]
        owners = np.repeat(np.array(self._chunks, dtype=np.int64), counts)
        order = np.lexsort((owners, *keys.T))
        keys = keys[order]
        owners = owners[order]
        is_again = (keys[1:] == keys[:-1]).all(axis=1) & (owners[1:] > owners[:-1])
        if not is_again.any():
            return
        chunk = int(owners[1:][is_again].min())
        repeated = {key.tobytes() for key in keys[1:][is_again & (owners[1:] == chunk)]}
        job = RepeatedGroupJob(pieces=tuple(chunks[chunk]), field=self._field, repeated=frozenset(repeated))
        ((where, value, own_source),) = results_of(executor, find_repeated, [job])
        of_source = f" of the source {own_source!r}" if own_source else ""
        fields = f"source and {self._field}" if own_source else self._field
        raise DataError(
            f"{where}: an earlier record{of_source} has the same {self._field}, {value!r}, and is too far away to be "
            f"in one group with this one: sort the input by {fields}, or build with a larger shard_bytes, so that both "
            "are in one chunk"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedGroupJob:
    """The order to find the first record of a chunk that is in one of some groups; small and picklable."""

    pieces: tuple[ChunkPiece, ...]
    field: str
    repeated: frozenset[bytes]
    """Digests of the groups."""

    @property
    def label(self) -> str:
        """The job in words, for messages."""
        return f"the groups of {self.pieces[0].range.describe()}"


def find_repeated(job: RepeatedGroupJob) -> tuple[str, str, str]:
    """Return the place of the record, its value in the field, and the source that it names itself."""
    for piece in job.pieces:
        groups = list(record_groups(piece.range, job.field))[: piece.max_records]
        for number, group in enumerate(groups[piece.skip :], piece.range.first + piece.skip):
            if group is not None and _digest(group) in job.repeated:
                source, _, value = group.partition("\0")
                own_source = "" if source == piece.range.source else source
                return f"{piece.range.before}{number}", value.partition(" ")[2][:60], own_source
    raise DataError(f"{job.label}: other groups than before. Leave the inputs alone, and build again")
