"""Documents laid out as rows for an export: one a row, by the plan of the split, or packed again by one global plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of
from chatmill.errors import DataError
from chatmill.pack.plan import Strategy, plan
from chatmill.store.split import Documents, Split

Ints = NDArray[np.int64]
ScalarT = TypeVar("ScalarT", bound=np.generic)

MAX_ID = 2**31 - 1
ALONE = "alone"
"""In place of a packing strategy: one document a row, in the order of the build."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """Which documents are in which row: row `r` holds `documents[row_offsets[r]:row_offsets[r + 1]]`."""

    documents: Ints
    """Numbers of documents, row after row."""
    lengths: Ints
    """Tokens that are taken of each of them (the first ones)."""
    row_offsets: Ints
    """One more than there are rows."""
    packed: bool
    """Whether rows may hold several documents."""
    capacity: int | None = None
    """Tokens of a row, padding included; None where rows have no fixed size."""

    def part(self, first: int, last: int) -> RowPlan:
        """Rows `first` up to `last - 1`."""
        begin, end = int(self.row_offsets[first]), int(self.row_offsets[last])
        return replace(
            self,
            documents=self.documents[begin:end],
            lengths=self.lengths[begin:end],
            row_offsets=self.row_offsets[first : last + 1] - begin,
        )

    @property
    def row_tokens(self) -> Ints:
        """Tokens of each row, without padding."""
        return np.diff(offsets_of(self.lengths)[self.row_offsets])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """Consecutive rows, without padding."""

    split: str
    documents: Documents
    """Their documents, one after another."""
    numbers: Ints
    """The number of each document."""
    row_offsets: Ints
    """One more than there are rows: which documents belong to each."""

    def __len__(self) -> int:
        return len(self.row_offsets) - 1

    @property
    def ids(self) -> NDArray[np.int32]:
        """The ids of all tokens; those that int32 does not hold are refused."""
        return as_int32(self.documents.ids, self.split)

    @property
    def token_offsets(self) -> Ints:
        """One more than there are rows: where the tokens of each begin."""
        return self.documents.offsets[self.row_offsets]

    @property
    def starts(self) -> Ints:
        """Where each document starts in its row."""
        counts = np.diff(self.row_offsets)
        return self.documents.offsets[:-1] - np.repeat(self.token_offsets[:-1], counts)

    @property
    def positions(self) -> NDArray[np.int32]:
        """The place of every token in its document."""
        offsets = self.documents.offsets
        return (np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))).astype(np.int32)

    @property
    def numbers_in_row(self) -> NDArray[np.int32]:
        """For every token the number of its document in the row, from 1."""
        documents = np.arange(len(self.numbers)) - np.repeat(self.row_offsets[:-1], np.diff(self.row_offsets)) + 1
        return np.repeat(documents, np.diff(self.documents.offsets)).astype(np.int32)

    def problem_with_ends(self, eos_id: int) -> str:
        """What is wrong where documents should have their one eos at the end; empty where nothing is."""
        is_eos, ends = self.documents.ids == eos_id, self.documents.offsets[1:] - 1
        inside = int(np.count_nonzero(is_eos)) - int(np.count_nonzero(is_eos[ends]))
        if inside:
            return f"{self.split}: the end token {eos_id} occurs {inside:,} times inside documents"
        if not is_eos[ends].all():
            without = int(np.count_nonzero(~is_eos[ends]))
            return f"{self.split}: {without:,} documents do not end in the end token {eos_id}"
        return ""


class PaddedRows:
    """Rows of a batch, padded at their ends to one width."""

    def __init__(self, batch: RowBatch, width: int) -> None:
        offsets = batch.token_offsets
        self.rows, self.width = len(batch), width
        self.offsets: Ints = np.arange(self.rows + 1, dtype=np.int64) * width
        self._lengths = np.diff(offsets)
        self._places = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1] - offsets[:-1], self._lengths)

    def of(self, values: NDArray[ScalarT], fill: int | float | NDArray[Any]) -> NDArray[ScalarT]:
        """Flat: a column with `fill` after the values of each row."""
        padded = np.empty(self.rows * self.width, dtype=values.dtype)
        padded[:] = fill
        padded[self._places] = values
        return padded

    @property
    def counted(self) -> NDArray[np.int32]:
        """A fill: 0, 1, 2, ... from where the padding of each row begins; a document of its own."""
        places = np.tile(np.arange(self.width, dtype=np.int32), self.rows)
        return places - np.repeat(self._lengths.astype(np.int32), self.width)


def with_ends(
    ids: NDArray[ScalarT], offsets: Ints, eod_id: int, values: NDArray[Any]
) -> tuple[NDArray[ScalarT], Ints, NDArray[Any]]:
    """Documents with this token, of the value 0, after each that does not end in it: ids, offsets and values."""
    ends = offsets[1:]
    is_open = ids[ends - 1] != eod_id
    added = ends[is_open]
    grown = offsets + np.append(0, np.cumsum(is_open))
    return np.insert(ids, added, eod_id), grown, np.insert(values, added, 0)


def one_each(documents: Split, capacity: int | None = None) -> RowPlan:
    """A row for each document, in order; `capacity` are its tokens where it has a fixed size."""
    count = len(documents)
    return RowPlan(
        documents=np.arange(count, dtype=np.int64),
        lengths=documents.lengths,
        row_offsets=np.arange(count + 1, dtype=np.int64),
        packed=False,
        capacity=capacity,
    )


def as_stored(documents: Split) -> RowPlan:
    """The rows of the split's plan; without one, episodes one a row."""
    stored = documents.plan
    if stored is None:
        return one_each(documents)
    return RowPlan(
        documents=stored.order,
        lengths=documents.lengths[stored.order],
        row_offsets=stored.bin_offsets,
        packed=True,
        capacity=stored.capacity,
    )


def packed_anew(documents: Split, max_length: int, strategy: Strategy | str) -> RowPlan:
    """Rows of `max_length` tokens, planned over all documents of the split; longer documents are refused.

    With the strategy `ALONE` a row holds one document.
    """
    too_long = np.flatnonzero(documents.lengths > max_length)
    if len(too_long):
        raise DataError(_too_long(documents, too_long, max_length))
    if strategy == ALONE:
        return one_each(documents, max_length)
    made = plan(documents.lengths.astype(np.int32), max_length, strategy)
    return RowPlan(
        documents=made.order,
        lengths=documents.lengths[made.order],
        row_offsets=made.bin_offsets,
        packed=True,
        capacity=max_length,
    )


def _too_long(documents: Split, too_long: Ints, max_length: int) -> str:
    shown = too_long[:3]
    names = documents.facts("record_id", shown) or [f"document {number}" for number in shown.tolist()]
    listed = ", ".join(f"{name} ({documents.lengths[i]:,})" for name, i in zip(names, shown.tolist(), strict=True))
    more = ", ..." if len(too_long) > len(shown) else ""
    return (
        f"{len(too_long):,} of {len(documents):,} documents are longer than a row of {max_length:,} tokens: "
        f"{listed}{more}. Choose a longer row (the longest has {int(documents.lengths.max()):,} tokens), or "
        "build again with `--max-length` and an overflow policy, which counts what is lost"
    )


def as_int32(ids: NDArray[np.uint32], split: str) -> NDArray[np.int32]:
    """Ids as trainers read them; those that int32 does not hold are refused."""
    if len(ids) and int(ids.max()) > MAX_ID:
        raise DataError(f"{split}: a token has the id {ids.max():,}; int32 holds ids up to {MAX_ID:,}")
    return ids.astype(np.int32)
