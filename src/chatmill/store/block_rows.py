"""Packed rows as the blocks store takes and gives them, and the rules that every row keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from chatmill.core.blocks import Boundaries
from chatmill.core.kinds import KINDS, PLAIN, RULE
from chatmill.errors import DataError
from chatmill.store.block_manifest import MAX_ID
from chatmill.store.episode_columns import as_bytes

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One packed row. The arrays are read-only views of the files; per-token ones have `capacity` values."""

    index: int
    ids: NDArray[np.uint32]
    """Token ids; behind the first `row_length` stands padding, whatever its id."""
    weights: NDArray[np.uint8] | NDArray[np.float32] | None
    """Token-aligned: how much each token counts as a target, 0 on padding; None when the split stores no weights."""
    kinds: NDArray[np.uint8] | None
    """What each token is (`chatmill.core.kinds`), 0 on padding; None when the split stores no kinds."""
    row_length: int
    """Tokens of the row's documents."""
    document_starts: NDArray[np.int32]
    """Where each document starts in the row; the first is 0."""
    documents: Ints
    """Number of each document in the order of the build's split, aligned with `document_starts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRows:
    """B packed rows of `capacity` tokens; the fields are those of `chatmill.pack.assemble.PackedRows`."""

    ids: NDArray[Any]
    """B x capacity token ids, padded on the right."""
    row_lengths: Ints
    """Tokens in each row; what stands behind them is padding, whatever its id."""
    start_values: Ints
    """Where each document starts in its row, all rows after one another; the first of a row is 0."""
    start_offsets: Ints
    """B + 1 offsets into `start_values`."""
    documents: Ints
    """Number of each document, aligned with `start_values`."""
    weights: NDArray[Any] | None = None
    """B x capacity, token-aligned: how much each token counts as a target; 0 on padding."""
    kinds: NDArray[np.uint8] | None = None
    """B x capacity kinds; 0 on padding."""

    def __len__(self) -> int:
        return len(self.row_lengths)

    @property
    def boundaries(self) -> Boundaries:
        """The documents as `chatmill.core.blocks` reads them: `.segments(capacity)` has positions and cu_seqlens."""
        return Boundaries(
            starts=self.start_values,
            counts=np.diff(self.start_offsets),
            lengths=self.row_lengths,
        )

    def part(self, first: int, last: int) -> BlockRows:
        """Rows `first` up to `last - 1` (views)."""
        begin, end = int(self.start_offsets[first]), int(self.start_offsets[last])
        return BlockRows(
            ids=self.ids[first:last],
            row_lengths=self.row_lengths[first:last],
            start_values=self.start_values[begin:end],
            start_offsets=self.start_offsets[first : last + 1] - begin,
            documents=self.documents[begin:end],
            weights=None if self.weights is None else self.weights[first:last],
            kinds=None if self.kinds is None else self.kinds[first:last],
        )


def offsets_problem(offsets: NDArray[Any], first: int) -> str:
    """What is wrong with the borders between rows `first`, `first + 1`, ... in words; empty when nothing is."""
    short = np.flatnonzero(offsets[1:] <= offsets[:-1])
    if not len(short):
        return ""
    row = int(short[0])
    return (
        f"row {first + row:,}: its document starts are {offsets[row]:,} up to {offsets[row + 1]:,}; "
        "a row has at least one document, and offsets increase"
    )


def layout_problem(rows: BlockRows, capacity: int, first: int) -> str:
    """The first length, start or document number that cannot be, in words; empty when there is none.

    `first` is the number of the first row. The offsets must have been checked.
    """
    lengths, starts, counts = rows.row_lengths, rows.start_values, np.diff(rows.start_offsets)
    outside = np.flatnonzero((lengths < 1) | (lengths > capacity))
    if len(outside):
        row = int(outside[0])
        return f"row {first + row:,}: row_lengths says {lengths[row]:,} tokens; a row has 1 to {capacity:,} (capacity)"
    opens = np.zeros(len(starts), dtype=np.bool_)
    opens[rows.start_offsets[:-1]] = True
    rules = (
        (opens & (starts != 0), "starts", starts, "the first document of a row starts at 0"),
        (~opens & (np.diff(starts, prepend=0) <= 0), "starts", starts, "starts increase within a row"),
        (starts >= np.repeat(lengths, counts), "starts", starts, "a document starts inside its row"),
        (rows.documents < 0, "documents", rows.documents, "documents are counted from 0"),
    )
    for broken, name, values, rule in rules:
        if broken.any():
            place = int(np.argmax(broken))
            row = int(np.searchsorted(rows.start_offsets, place, side="right")) - 1
            entry = place - int(rows.start_offsets[row])
            return (
                f"row {first + row:,}: {name} entry {entry} is {values[place]:,}; {rule} "
                f"(the row has {counts[row]:,} documents and {lengths[row]:,} tokens)"
            )
    return ""


def token_problem(rows: BlockRows, pad_id: int, first: int) -> str:
    """The first padding, kind or weight that cannot be, in words; empty when there is none."""
    padding = np.arange(rows.ids.shape[1]) >= rows.row_lengths[:, None]
    checks = [(padding & (rows.ids != pad_id), "ids", rows.ids, f"behind its tokens a row holds the pad id {pad_id}")]
    if rows.weights is not None:
        weights = rows.weights
        checks.append((padding & (weights != 0), "weights", weights, "padding has the weight 0"))
        if weights.dtype.kind == "f":
            wrong = ~(np.isfinite(weights) & (weights >= 0))
            checks.append((wrong, "weights", weights, "weights are finite and 0 or more"))
    if rows.kinds is not None:
        checks.append((padding & (rows.kinds != 0), "kinds", rows.kinds, "padding has the kind 0"))
        checks.append(((rows.kinds & PLAIN) >= KINDS, "kinds", rows.kinds, RULE))
    for broken, name, values, rule in checks:
        if broken.any():
            row, token = (int(i) for i in np.unravel_index(np.argmax(broken), broken.shape))
            return (
                f"row {first + row:,}: {name} at position {token:,} is {values[row, token]}; {rule} "
                f"(the row has {rows.row_lengths[row]:,} tokens)"
            )
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """What rows on their way to disk must fit."""

    capacity: int
    pad_id: int
    fractional: bool | None
    """False: weights must fit into uint8."""
    first: int
    """Number of the first row, for errors."""

    def refuse(self, problem: str) -> None:
        """Raise what `offsets_problem` and the others found."""
        if problem:
            raise DataError(problem)

    def refuse_where(self, wrong: NDArray[np.bool_], name: str, values: NDArray[Any], rule: str) -> None:
        """Raise with place and value of the first token that is `wrong`."""
        if wrong.any():
            row, token = (int(i) for i in np.unravel_index(np.argmax(wrong), wrong.shape))
            raise DataError(f"row {self.first + row:,}: {name} at position {token:,} is {values[row, token]}; {rule}")

    def per_token(self, given: ArrayLike, name: str, types: str, rows: int | None = None) -> NDArray[Any]:
        """B x capacity numbers of one of the numpy kinds in `types`."""
        values = np.asarray(given)
        right = values.ndim == 2 and values.shape[1] == self.capacity and rows in (None, len(values))
        if not right or values.dtype.kind not in types:
            raise DataError(
                f"row {self.first:,} and on: {name} are {values.dtype} of shape {values.shape}; numbers of shape "
                f"({'rows' if rows is None else rows}, {self.capacity}) are needed (capacity {self.capacity:,})"
            )
        return values

    def whole(self, given: ArrayLike, name: str, count: int) -> NDArray[np.int64]:
        """`count` whole numbers."""
        values = np.asarray(given)
        if values.shape != (count,) or (count and values.dtype.kind not in "iu"):
            raise DataError(
                f"row {self.first:,} and on: {name} are {values.dtype} of shape {values.shape}; "
                f"{count:,} whole numbers are needed"
            )
        return values.astype(np.int64, copy=False)


def checked_rows(
    ids: ArrayLike,
    row_lengths: ArrayLike,
    start_values: ArrayLike,
    start_offsets: ArrayLike,
    documents: ArrayLike,
    weights: ArrayLike | None,
    kinds: ArrayLike | None,
    *,
    shape: RowShape,
) -> BlockRows:
    """What a caller handed over, in the stored types; a `DataError` names the first row that breaks a rule."""
    tokens = shape.per_token(ids, "ids", "iu")
    shape.refuse_where((tokens < 0) | (tokens > MAX_ID), "ids", tokens, f"ids are stored as uint32, 0 to {MAX_ID}")
    offsets = shape.whole(start_offsets, "start_offsets", len(tokens) + 1)
    if offsets[0] != 0:
        raise DataError(f"row {shape.first:,} and on: start_offsets begin with {offsets[0]}; they begin with 0")
    shape.refuse(offsets_problem(offsets, shape.first))
    rows = BlockRows(
        ids=tokens.astype(np.uint32, copy=False),
        row_lengths=shape.whole(row_lengths, "row_lengths", len(tokens)),
        start_values=shape.whole(start_values, "start_values", int(offsets[-1])),
        start_offsets=offsets,
        documents=shape.whole(documents, "documents", int(offsets[-1])),
        weights=None if weights is None else _stored_weights(weights, len(tokens), shape),
        kinds=None if kinds is None else _stored_kinds(kinds, len(tokens), shape),
    )
    shape.refuse(layout_problem(rows, shape.capacity, shape.first))
    shape.refuse(token_problem(rows, shape.pad_id, shape.first))
    return rows


def _stored_weights(given: ArrayLike, rows: int, shape: RowShape) -> NDArray[Any]:
    """uint8 when that loses nothing, else float32."""
    values = shape.per_token(given, "weights", "biuf", rows)
    if values.dtype in (np.bool_, np.uint8):
        return as_bytes(values)
    with np.errstate(over="ignore", under="ignore"):
        stored = values.astype(np.float32)
    wrong = ~(np.isfinite(stored) & (stored >= 0)) | ((stored == 0) != (values == 0))
    shape.refuse_where(wrong, "weights", values, "weights are finite float32 numbers, 0 or more")
    if shape.fractional is False:
        needs = (stored != np.floor(stored)) | (stored > 255)
        rule = "that needs float32, and this writer was made with fractional=False: use None or True"
        shape.refuse_where(needs, "weights", values, rule)
    stored += 0.0  # turns -0.0 into 0.0: the bytes must not tell in which call a row came
    return as_bytes(stored)


def _stored_kinds(given: ArrayLike, rows: int, shape: RowShape) -> NDArray[np.uint8]:
    values = shape.per_token(given, "kinds", "iu", rows)
    wrong = (values < 0) | (values > 255) | ((values & PLAIN) >= KINDS)
    shape.refuse_where(wrong, "kinds", values, f"{RULE} (chatmill.core.kinds)")
    return values.astype(np.uint8, copy=False)
