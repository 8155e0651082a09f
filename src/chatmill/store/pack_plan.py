"""The packed rows of a split: which episodes share a row. The manifest states them, the planner makes them again."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import ChatmillError, FormatError
from chatmill.pack.plan import Strategy, plan
from chatmill.store.episode_manifest import PackedRows

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PackPlan:
    """Row `r` holds the episodes `order[row_offsets[r]:row_offsets[r + 1]]`, one after the other, then padding."""

    length: int
    """Tokens of a row, padding included."""
    strategy: Strategy
    order: Ints
    """Numbers of episodes; each exactly once."""
    row_offsets: Ints
    """One more than there are rows."""
    row_tokens: Ints
    """Tokens of each row, padding not counted."""
    lower_bound: int
    """No packing of whole episodes can use fewer rows."""

    def __len__(self) -> int:
        return len(self.row_tokens)

    @property
    def tokens(self) -> int:
        """Tokens of all episodes."""
        return int(self.row_tokens.sum())

    @property
    def padding(self) -> int:
        """Places of all rows that hold no token."""
        return len(self) * self.length - self.tokens

    @property
    def stated(self) -> PackedRows:
        """What the manifest of the split says of the rows."""
        return PackedRows(length=self.length, strategy=str(self.strategy), count=len(self))

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the rows: a position in them means the same wherever it is the same."""
        digest = hashlib.sha256(f"{self.length}\0".encode())
        for values in (self.order, self.row_offsets):
            digest.update(np.ascontiguousarray(values, dtype="<i8").data)
        return digest.hexdigest()

    def row(self, number: int) -> Ints:
        """The episodes of a row, in the order in which they are laid."""
        return self.order[self.row_offsets[number] : self.row_offsets[number + 1]]


def plan_rows(lengths: Ints, length: int, strategy: Strategy | str = Strategy.BEST_FIT) -> PackPlan:
    """Plan rows of `length` tokens over the lengths of all episodes."""
    made = plan(lengths, length, strategy)
    return PackPlan(
        length=made.capacity,
        strategy=made.strategy,
        order=made.order,
        row_offsets=made.bin_offsets,
        row_tokens=made.bin_lengths(lengths),
        lower_bound=made.lower_bound,
    )


def stated_rows(stated: PackedRows, lengths: Ints, where: str) -> PackPlan:
    """The rows that a manifest states, planned again; another number of them is an error that names `where`."""
    try:
        made = plan_rows(lengths, stated.length, stated.strategy)
    except ChatmillError as error:
        raise FormatError(f"{where}: rows of {stated.length:,} tokens cannot be planned again: {error}") from None
    if len(made) != stated.count:
        raise FormatError(
            f"{where} states {stated.count:,} packed rows of {stated.length:,} tokens by {stated.strategy}, and the "
            f"planner makes {len(made):,} of its episodes: it was edited, or built by another version; build it again"
        )
    return made
