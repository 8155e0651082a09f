"""Packed rows: from one list of document starts to positions, segment ids, cu_seqlens and the document mask.

A row is a run of tokens in which several documents follow each other. `Boundaries` says where the
documents of B rows begin. `DocumentSegments` lays them into a grid of equally wide rows: the padding after the last
document of a row becomes a segment of its own. Everything an attention kernel reads is derived from there,
with numpy, and without a loop over documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of
from chatmill.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeGrid:
    """What the tokens of a grid see where segments are trees (`chatmill.core.trees`)."""

    position_ids: NDArray[np.int32]
    """(rows, width): the depth of each token in its tree."""
    ends: NDArray[np.int32]
    """(rows, width): where in its row the tokens end that may look at each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentSegments:
    """Segments that tile a grid of `rows` x `width` tokens, row by row; none crosses a row, none is empty."""

    starts: NDArray[np.int64]
    """Where each segment begins, counted over the whole grid: token `t` of row `r` is `r * width + t`."""
    rows: int
    width: int
    trees: TreeGrid | None = None
    """Where segments are trees; None: each is one text."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens per segment."""
        return np.diff(self.starts, append=self.rows * self.width)

    @property
    def position_ids(self) -> NDArray[np.int64]:
        """(rows, width): the place of each token in its segment, or its depth in its tree, from 0."""
        if self.trees is not None:
            return self.trees.position_ids.astype(np.int64)
        flat = np.arange(self.rows * self.width, dtype=np.int64)
        flat -= np.repeat(self.starts, self.lengths)
        return flat.reshape(self.rows, self.width)

    @property
    def ends(self) -> NDArray[np.int32]:
        """(rows, width): token q of a row sees token k when `k <= q < ends[k]`."""
        if self.trees is not None:
            return self.trees.ends
        ends = np.repeat(self.starts + self.lengths, self.lengths).reshape(self.rows, self.width)
        return (ends - np.arange(self.rows)[:, None] * self.width).astype(np.int32)

    @property
    def seq_idx(self) -> NDArray[np.int32]:
        """(rows, width): the number of each token's segment, counted from 0 in its row."""
        row = self.starts // max(self.width, 1)
        first_of_row = np.searchsorted(row, np.arange(self.rows))
        number = np.arange(len(self.starts)) - first_of_row[row]
        return np.repeat(number.astype(np.int32), self.lengths).reshape(self.rows, self.width)

    @property
    def max_seqlen(self) -> int:
        """Tokens in the longest segment; 0 for an empty grid."""
        return int(self.lengths.max(initial=0))

    def cu_seqlens(self, size: int | None = None) -> NDArray[np.int32]:
        """Cumulative lengths `[0, ..., rows * width]` over the grid laid out as one row.

        With `size` the array has exactly that many entries: the last value is repeated.
        """
        values = np.append(self.starts, self.rows * self.width).astype(np.int32)
        if size is None:
            return values
        if len(values) > size:
            raise DataError(
                f"this batch has {len(values) - 1} segments with the padding: {len(values)} cu_seqlens, but "
                f"cu_seqlens_size is {size}: raise it, or put fewer documents into a batch"
            )
        return np.pad(values, (0, size - len(values)), mode="edge")


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundaries:
    """Where the documents of B rows begin; checked when made by one of the functions below."""

    starts: NDArray[np.int64]
    """Document starts of all rows, one row after the other, counted in their row."""
    counts: NDArray[np.int64]
    """Documents per row, B values."""
    lengths: NDArray[np.int64]
    """Tokens per row, B values; padding is not among them."""

    @classmethod
    def of(cls, starts: Sequence[NDArray[np.int64]], lengths: NDArray[np.int64]) -> Boundaries:
        """Make them from the starts of each row."""
        counts = np.array([len(row) for row in starts], dtype=np.int64)
        return cls(starts=np.concatenate([np.empty(0, dtype=np.int64), *starts]), counts=counts, lengths=lengths)

    @property
    def rows(self) -> NDArray[np.int64]:
        """The row of each start."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def broken(self) -> list[tuple[NDArray[np.bool_], str]]:
        """Return the rules for starts: which of them break each, and the rule in words."""
        first = np.diff(self.rows, prepend=-1) > 0
        return [
            (first & (self.starts != 0), "the first entry must be 0"),
            (~first & (np.diff(self.starts, prepend=0) <= 0), "entries must increase"),
            (self.starts >= self.lengths[self.rows], "entries must lie inside the row"),
        ]

    @property
    def without_start(self) -> NDArray[np.bool_]:
        """Rows that have tokens and no document."""
        return np.asarray((self.counts == 0) & (self.lengths > 0))

    def cut(self, max_length: int) -> Boundaries:
        """Rows cut to `max_length` tokens; documents that begin beyond the cut are gone."""
        keep = self.starts < max_length
        return Boundaries(
            starts=self.starts[keep],
            counts=np.bincount(self.rows[keep], minlength=len(self.counts)),
            lengths=np.minimum(self.lengths, max_length),
        )

    def joined(self) -> Boundaries:
        """Return all rows as one: the form without padding. A row's first document becomes one among the others."""
        offsets = offsets_of(self.lengths)
        return Boundaries(
            starts=self.starts + offsets[:-1][self.rows],
            counts=np.array([len(self.starts)]),
            lengths=offsets[-1:],
        )

    def segments(self, width: int) -> DocumentSegments:
        """Lay the rows into a grid of `width` tokens each; what is left of a row is one more segment."""
        tails = np.flatnonzero(self.lengths < width)
        starts = np.concatenate([self.rows * width + self.starts, tails * width + self.lengths[tails]])
        starts.sort()
        return DocumentSegments(starts=starts, rows=len(self.lengths), width=width)

    def later_documents(self, width: int) -> NDArray[np.int64]:
        """Grid index of the first token of every document but the first of its row."""
        return (self.rows * width + self.starts)[self.starts > 0]


def boundaries_from_ends(ends: list[NDArray[np.int64]], positions: list[NDArray[np.int64]]) -> Boundaries:
    """Find where the trees of each row begin: at tokens that see no earlier token.

    Refuse positions that disagree with the ends: a token's position is the number of earlier tokens it sees.
    """
    starts = []
    for row, (row_ends, depth) in enumerate(zip(ends, positions, strict=True)):
        place = np.arange(len(row_ends))
        bad = np.flatnonzero((row_ends <= place) | (row_ends > len(row_ends)))
        if len(bad):
            raise DataError(
                f"ends of row {row}: entry {bad[0]} is {row_ends[bad[0]]}; a token sees itself, and none sees it after "
                f"the row of {len(row_ends)} tokens"
            )
        over = np.cumsum(np.bincount(row_ends, minlength=len(row_ends) + 1))[:-1] if len(row_ends) else place
        wrong = np.flatnonzero(place - over != depth)
        if len(wrong):
            at = int(wrong[0])
            raise DataError(
                f"position_ids of row {row}: token {at} has position {depth[at]}, and by the ends it sees "
                f"{at - over[at]} tokens before it: the two columns are not of the same rows"
            )
        starts.append(np.flatnonzero(depth == 0))
    return Boundaries.of(starts, np.array([len(values) for values in ends], dtype=np.int64))


def tree_grid(
    ends: list[NDArray[np.int64]], positions: list[NDArray[np.int64]], segments: DocumentSegments
) -> TreeGrid:
    """Copy positions and ends of rows into a grid; the padding of a row is a segment of its own."""
    plain = segments.ends
    grid = TreeGrid(position_ids=segments.position_ids.astype(np.int32), ends=plain)
    for row, (row_ends, depth) in enumerate(zip(ends, positions, strict=True)):
        grid.ends[row, : len(row_ends)] = row_ends
        grid.position_ids[row, : len(depth)] = depth
    return grid


def whole_rows(lengths: NDArray[np.int64]) -> Boundaries:
    """Make every row one document (an empty row none)."""
    counts = (lengths > 0).astype(np.int64)
    return Boundaries(starts=np.zeros(counts.sum(), dtype=np.int64), counts=counts, lengths=lengths)


def boundaries_from_starts(document_starts: Sequence[Any] | NDArray[Any], lengths: NDArray[np.int64]) -> Boundaries:
    """Check explicit starts, one list (or 1-D integer array) per row of `lengths` tokens.

    A 2-D integer array is padded with -1. Starts must increase, begin at 0 and lie inside the row.
    """
    if len(document_starts) != len(lengths):
        raise DataError(f"document_starts has {len(document_starts)} rows, but the batch has {len(lengths)}")
    rows = [_integers(values, row) for row, values in enumerate(document_starts)]
    if isinstance(document_starts, np.ndarray) and document_starts.ndim == 2:
        rows = [_without_padding(values) for values in rows]
    boundaries = Boundaries.of(rows, lengths)
    _check(boundaries)
    return boundaries


def starts_of_lengths(rows: list[NDArray[np.int64]], lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Where the documents of rows begin, from the length of each; lengths that do not fill the row are refused."""
    for number, (row, length) in enumerate(zip(rows, lengths.tolist(), strict=True)):
        if (row < 1).any() or row.sum() != length:
            raise DataError(
                f"seq_lengths of row {number} are {row.tolist()[:8]} and sum to {int(row.sum())}, but the row has "
                f"{length} tokens: they are the lengths of its documents, one after the other"
            )
    return [np.cumsum(row) - row for row in rows]


def boundaries_from_token(rows: Sequence[NDArray[Any]] | NDArray[Any], token_id: int, *, after: bool) -> Boundaries:
    """Documents that begin after `token_id` (an EOS), or at it (`after=False`, a BOS); each row begins one."""
    starts = []
    for ids in rows:
        begins = np.roll(ids == token_id, 1) if after else ids == token_id
        begins[:1] = True
        starts.append(np.flatnonzero(begins))
    return Boundaries.of(starts, np.array([len(ids) for ids in rows], dtype=np.int64))


def _integers(values: Any, row: int) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise DataError(f"document_starts of row {row} must be a flat list of integers, not {values!r}")
    return array.astype(np.int64)


def _without_padding(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Drop the -1 at the end; a -1 in between stays, and is refused later."""
    real = np.flatnonzero(values != -1)
    return values[: real[-1] + 1 if len(real) else 0]


def _check(boundaries: Boundaries) -> None:
    """Raise a `DataError` with row and value at the first start that cannot be right."""
    starts, counts, lengths, row = boundaries.starts, boundaries.counts, boundaries.lengths, boundaries.rows
    missing = np.flatnonzero(boundaries.without_start)
    if len(missing):
        raise DataError(
            f"document_starts of row {missing[0]} is empty, but the row has {lengths[missing[0]]} tokens: "
            "the first entry must be 0"
        )
    for broken, rule in boundaries.broken():
        if broken.any():
            at = int(np.flatnonzero(broken)[0])
            r = int(row[at])
            entry = at - int(offsets_of(counts)[r])
            raise DataError(
                f"document_starts of row {r}: entry {entry} is {starts[at]}; {rule} "
                f"(the row has {lengths[r]} tokens, starts {_short(starts[row == r])})"
            )


def _short(values: NDArray[np.int64]) -> str:
    shown = ", ".join(map(str, values[:12].tolist()))
    return f"[{shown}, ...]" if len(values) > 12 else f"[{shown}]"
