"""Token data as a trainer reads it: flat ids, which of them are targets, rows and the documents inside rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from chatmill.core.trainer_columns import Bools, Column, Ints, TrainerRows, read_columns
from chatmill.errors import DataError


@dataclass(frozen=True, kw_only=True)
class TokenizedSet(TrainerRows):
    """Rows of token ids, and what is known of the trainer that reads them."""

    wanted_shift: int
    """The shift of labels that the trainer takes: 0 if it shifts labels itself, as transformers does, else 1."""
    keys: frozenset[str]
    """The columns of stored rows, or what batches hold; an `attention_mask` only if it is over pairs of tokens."""
    are_batches: bool
    """Whether the rows are from batches, as a model gets them."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def bounds(self) -> tuple[Ints, Ints]:
        """First and last + 1 token of each document that is no padding; equal if all of it is."""
        live = np.append(np.flatnonzero(~self.padding), len(self.ids))
        at = np.searchsorted(live, self.documents)
        filled = at[1:] > at[:-1]
        begins = np.where(filled, live[at[:-1]], self.documents[:-1])
        ends = np.where(filled, live[np.maximum(at[1:] - 1, 0)] + 1, self.documents[:-1])
        return begins, ends

    @cached_property
    def filled(self) -> Bools:
        """Which documents are more than padding."""
        begins, ends = self.bounds
        return ends > begins

    @property
    def packed_rows(self) -> Ints:
        """The rows that hold two documents and more."""
        row = self.row_of(self.documents[:-1][self.filled])
        return np.flatnonzero(np.bincount(row, minlength=len(self)) > 1)

    def document_of(self, places: Ints) -> Ints:
        """Find the documents of tokens."""
        return np.searchsorted(self.documents, places, side="right") - 1

    def row_of(self, places: Ints) -> Ints:
        """Find the rows of tokens."""
        return np.searchsorted(self.offsets, places, side="right") - 1


def from_columns(
    columns: Mapping[str, Column],
    *,
    mask: str | None = None,
    pad_id: int | None = None,
    shifted: bool = False,
    batch_keys: frozenset[str] | None = None,
) -> TokenizedSet:
    """Make a set of its columns.

    `mask` names the column that says what is trained, if it is not the usual one. `pad_id` is padding at the ends
    of rows without an attention mask. With `shifted`, labels that are shifted already are as they should be.
    `batch_keys` are the keys of batches, if the columns are from some.
    """
    rows = read_columns(columns, mask=mask, pad_id=pad_id)
    if not len(rows.ids):
        raise DataError("the set holds no tokens")
    return TokenizedSet(
        **{field.name: getattr(rows, field.name) for field in fields(rows)},
        wanted_shift=int(shifted),
        keys=frozenset(columns) - {"attention_mask"} if batch_keys is None else batch_keys,
        are_batches=batch_keys is not None,
    )
