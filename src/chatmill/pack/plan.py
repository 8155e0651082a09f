"""The planner: a pure, deterministic function from document lengths and a capacity to bins (rows)."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from chatmill.core.tokens import offsets_of
from chatmill.errors import ConfigError, DataError, member
from chatmill.pack.bins import decreasing, greedy, lower_bound

Ints = NDArray[np.int64]


class Strategy(StrEnum):
    """How documents are given to bins; documents stay whole in all of them."""

    BEST_FIT = "best_fit"
    """Longest first (ties: input order), into the bin with least room that holds it (ties: opened first)."""
    FIRST_FIT = "first_fit"
    """Longest first (ties: input order), into the bin opened earliest of those that hold it."""
    GREEDY = "greedy"
    """In input order, into the newest bin, else a new one: the bins one after another are the input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which documents are in which bin: bin `b` holds `order[bin_offsets[b]:bin_offsets[b + 1]]`."""

    order: Ints
    """Document indices, bin after bin in opening order, in placing order inside a bin; each exactly once."""
    bin_offsets: Ints
    """One more than there are bins; offsets into `order`."""
    capacity: int
    """Tokens that a bin can hold."""
    strategy: Strategy
    tokens: int
    """Sum of all lengths."""
    lower_bound: int
    """No packing of whole documents can use fewer bins than this (the Martello-Toth bound L2)."""

    def __len__(self) -> int:
        return self.bins

    @property
    def bins(self) -> int:
        """How many bins there are."""
        return len(self.bin_offsets) - 1

    @property
    def fill(self) -> float:
        """Tokens over room, 0..1; a plan without bins wastes nothing and is 1."""
        return self.tokens / (self.bins * self.capacity) if self.bins else 1.0

    @property
    def padding(self) -> int:
        """Places of all bins that hold no token."""
        return self.bins * self.capacity - self.tokens

    def bin(self, index: int) -> Ints:
        """Return the documents of one bin, in placing order (a view)."""
        index = range(self.bins)[index]
        return self.order[self.bin_offsets[index] : self.bin_offsets[index + 1]]

    def bin_lengths(self, lengths: ArrayLike) -> Ints:
        """Tokens in each bin, from the lengths that were planned."""
        ends = offsets_of(np.asarray(lengths, dtype=np.int64)[self.order])
        return np.diff(ends[self.bin_offsets])


def plan(lengths: ArrayLike, capacity: int, strategy: Strategy | str = Strategy.BEST_FIT) -> Plan:
    """Place documents of the given token lengths into bins of `capacity` tokens.

    `lengths` are integers in 1..capacity, one per document; the plan is global over all of them and depends
    on nothing else. Time: `best_fit` and `first_fit` loop over distinct lengths, `greedy` over bins.
    """
    chosen = member(Strategy, "packing strategy", strategy)
    most = np.iinfo(np.int32).max
    room = whole(capacity, "the capacity of a bin is a whole number of tokens from 1 to 2^31 - 1", most)
    checked = _checked(lengths, room)
    if chosen in (Strategy.BEST_FIT, Strategy.FIRST_FIT):
        order, bin_offsets = decreasing(checked, room, best=chosen is Strategy.BEST_FIT)
    else:
        order, bin_offsets = greedy(checked, room)
    return Plan(
        order=order,
        bin_offsets=bin_offsets,
        capacity=room,
        strategy=chosen,
        tokens=int(checked.sum(dtype=np.int64)),
        lower_bound=lower_bound(checked, room),
    )


def whole(value: Any, rule: str, most: float = math.inf) -> int:
    """Return a whole number from 1 to `most`; anything else is an error that states the rule."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if not 1 <= number <= most:
        raise ConfigError(f"{rule}, not {value!r}")
    return number


def _checked(lengths: ArrayLike, capacity: int) -> NDArray[np.int32]:
    """Return the lengths as int32, or raise an error that names the first wrong one."""
    values = np.asarray(lengths)
    if values.ndim != 1:
        raise DataError(f"lengths are one number per document, not an array of shape {values.shape}")
    if not len(values):
        return np.empty(0, dtype=np.int32)
    if not np.issubdtype(values.dtype, np.integer):
        raise DataError(f"lengths are integers (tokens per document), not {values.dtype}: {values[:3].tolist()}...")
    low, high = int(values.min()), int(values.max())
    if low < 1:
        at = int(np.argmax(values < 1))
        raise DataError(f"document {at} has length {values[at]}: a document has at least 1 token; leave empty ones out")
    if high > capacity:
        at = int(np.argmax(values > capacity))
        raise DataError(
            f"document {at} has length {values[at]}, more than the capacity of {capacity} "
            f"({int((values > capacity).sum())} such documents of {len(values)}): choose an overflow policy, "
            "or a larger capacity"
        )
    return values.astype(np.int32, copy=False)
