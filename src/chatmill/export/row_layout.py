"""Documents laid out as rows for an export, and some consecutive rows as flat values and Arrow columns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of
from chatmill.errors import DataError
from chatmill.pack.plan import Plan
from chatmill.store.split import Documents, Split

Ints = NDArray[np.int64]
ScalarT = TypeVar("ScalarT", bound=np.generic)

MAX_ID = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """Which documents are in which row: row `r` holds `documents[row_offsets[r]:row_offsets[r + 1]]`."""

    documents: Ints
    """Numbers of documents, row after row."""
    lengths: Ints
    """Tokens of each of them."""
    row_offsets: Ints
    """One more than there are rows."""
    packed: bool
    """Whether rows may hold several documents."""
    capacity: int | None = None
    """Tokens of a row, padding included; None where rows have no fixed size."""
    width: int = 0
    """Tokens that the target pads every row to; 0: it does not pad."""

    @classmethod
    def of(cls, documents: Split, plan: Plan | None, capacity: int | None = None) -> Self:
        """Return the bins of a plan; without one, a row of up to `capacity` tokens for each document, in order."""
        order = np.arange(len(documents), dtype=np.int64) if plan is None else plan.order
        return cls(
            documents=order,
            lengths=documents.lengths[order],
            row_offsets=np.arange(len(order) + 1, dtype=np.int64) if plan is None else plan.bin_offsets,
            packed=plan is not None,
            capacity=capacity if plan is None else plan.capacity,
        )

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
        """Tokens of each row, with the padding of the target."""
        return np.maximum(np.diff(offsets_of(self.lengths)[self.row_offsets]), self.width)

    @property
    def longest(self) -> int:
        """Tokens that a row can have."""
        return self.capacity or int(self.row_tokens.max(initial=0))


@dataclass(frozen=True, kw_only=True)
class RowBatch:
    """Consecutive rows; what is flat has no padding."""

    split: str
    documents: Documents
    """Their documents, one after another."""
    numbers: Ints
    """The number of each document."""
    row_offsets: Ints
    """One more than there are rows: which documents belong to each."""
    packed: bool
    """Whether rows may hold several documents."""
    width: int
    """Tokens that columns are padded to; 0: they are not."""

    def __len__(self) -> int:
        return len(self.row_offsets) - 1

    @cached_property
    def ids(self) -> NDArray[np.int32]:
        """The ids of all tokens; those that int32 does not hold are refused."""
        ids = self.documents.ids
        if len(ids) and int(ids.max()) > MAX_ID:
            raise DataError(f"{self.split}: a token has the id {ids.max():,}; int32 holds ids up to {MAX_ID:,}")
        return ids.astype(np.int32)

    @property
    def lengths(self) -> Ints:
        """Tokens of each document."""
        return np.diff(self.documents.offsets)

    @property
    def token_offsets(self) -> Ints:
        """One more than there are rows: where the tokens of each begin."""
        return self.documents.offsets[self.row_offsets]

    @property
    def starts(self) -> Ints:
        """Where each document starts in its row."""
        return self.documents.offsets[:-1] - np.repeat(self.token_offsets[:-1], np.diff(self.row_offsets))

    @property
    def positions(self) -> NDArray[np.int32]:
        """The place of every token in its document."""
        offsets = self.documents.offsets
        return (np.arange(offsets[-1]) - np.repeat(offsets[:-1], self.lengths)).astype(np.int32)

    @property
    def numbers_in_row(self) -> NDArray[np.int32]:
        """For every token the number of its document in the row, from 1."""
        documents = np.arange(len(self.numbers)) - np.repeat(self.row_offsets[:-1], np.diff(self.row_offsets)) + 1
        return np.repeat(documents, self.lengths).astype(np.int32)

    def padded(self, values: NDArray[ScalarT], fill: int | NDArray[Any] = 0) -> NDArray[ScalarT]:
        """Flat values of tokens, with `fill` after those of each row."""
        padded = np.empty(len(self) * self.width, dtype=values.dtype)
        padded[:] = fill
        padded[self._places] = values
        return padded

    @cached_property
    def _places(self) -> Ints:
        """Where every token is in padded rows."""
        offsets = self.token_offsets
        return np.arange(offsets[-1]) + np.repeat(np.arange(len(self)) * self.width - offsets[:-1], np.diff(offsets))

    @property
    def counted_padding(self) -> NDArray[np.int32]:
        """A fill: 0, 1, 2, ... from where the padding of each row begins, so that it is a document of its own."""
        places = np.tile(np.arange(self.width, dtype=np.int32), len(self))
        return places - np.repeat(np.diff(self.token_offsets).astype(np.int32), self.width)

    def per_token(self, values: Any, fill: int = 0) -> Any:
        """Return a column with a list a row of values of its tokens (flat, NumPy or Arrow), padded where rows are."""
        if not self.width:
            return arrow_lists(values, self.token_offsets)
        return arrow_lists(self.padded(values, fill), np.arange(len(self) + 1) * self.width)

    def per_document(self, values: Any) -> Any:
        """Return a column with a list a row of values of its documents."""
        return arrow_lists(values, self.row_offsets)

    def problem_with_ends(self, eos_id: int) -> str:
        """Return what is wrong where documents should have their one eos at the end; empty where nothing is."""
        is_eos, ends = self.documents.ids == eos_id, self.documents.offsets[1:] - 1
        inside = int(np.count_nonzero(is_eos)) - int(np.count_nonzero(is_eos[ends]))
        if inside:
            return f"{self.split}: the end token {eos_id} occurs {inside:,} times inside documents"
        if not is_eos[ends].all():
            without = int(np.count_nonzero(~is_eos[ends]))
            return f"{self.split}: {without:,} documents do not end in the end token {eos_id}"
        return ""


def arrow_lists(values: Any, offsets: Ints) -> Any:
    """Return an Arrow array of lists: row `r` has the values from `offsets[r]` to `offsets[r + 1]`."""
    import pyarrow as pa

    flat = values if isinstance(values, pa.Array) else pa.array(values)
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), flat)


def with_ends(
    ids: NDArray[ScalarT], offsets: Ints, eod_id: int, values: NDArray[Any]
) -> tuple[NDArray[ScalarT], Ints, NDArray[Any]]:
    """Documents with this token, of the value 0, after each that does not end in it: ids, offsets and values."""
    ends = offsets[1:]
    is_open = ids[ends - 1] != eod_id
    added = ends[is_open]
    grown = offsets + np.append(0, np.cumsum(is_open))
    return np.insert(ids, added, eod_id), grown, np.insert(values, added, 0)
