"""Rows of which some begin like an earlier one: what they share is there once.

A row is its own runs, and before them a beginning of the row that it goes on from: all that this one shares, and its
own runs up to one of them. So rows are the branches of a tree, which is not yet one of tokens (`chatmill.core.trees`):
rows that go apart may still go on with the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import REPEATED
from chatmill.core.native.gather import gathered
from chatmill.core.tokens import Tokens, offsets_of, ranges

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SharedRows:
    """Rows of tokens."""

    own: Tokens
    """The own runs of each row; all of the messages of its conversation."""
    parents: Ints
    """The earlier row that each goes on from; -1 for none."""
    until: Ints
    """The run of the parent before which a row leaves it, among all runs; one of its own, or the first after them."""
    others: Ints
    """Rows, runs and kinds, in this order: what a run of an earlier row is in one that shares it. It differs in the
    flag of repeated answers alone: an answer is trained in one of its rows."""

    @classmethod
    def apart(cls, tokens: Tokens) -> SharedRows:
        """Rows that share nothing."""
        nothing = np.zeros(len(tokens), dtype=np.int64)
        return cls(own=tokens, parents=nothing - 1, until=nothing, others=np.empty((0, 3), dtype=np.int64))

    @property
    def are_apart(self) -> bool:
        """Whether no row shares anything."""
        return bool((self.parents < 0).all())

    @cached_property
    def begins(self) -> Ints:
        """Number of tokens each row shares."""
        tokens = self.own
        begins = np.where(self.parents < 0, 0, tokens.run_offsets[self.until] - tokens.offsets[self.parents])
        above = self.parents
        while (above >= 0).any():  # once for every branch of the longest path
            begins, above = begins + np.where(above < 0, 0, begins[above]), np.where(above < 0, -1, above[above])
        return begins

    @property
    def lengths(self) -> Ints:
        """Tokens of each row."""
        return self.begins + self.own.lengths

    @cached_property
    def times(self) -> Ints:
        """How many rows have each run."""
        count, runs = len(self.parents), self.own.document_runs
        going_on = [1] * (count + 1)  # the rows that go on from each, and itself; the last: those without a parent
        for row, parent in reversed(list(enumerate(self.parents.tolist()))):
            going_on[parent] += going_on[row]
        rows, shares = np.array(going_on), np.flatnonzero(self.parents >= 0)
        more = np.zeros(len(self.own.run_kinds) + 1, dtype=np.int64)
        np.add.at(more, runs[self.parents[shares]], rows[shares])
        np.subtract.at(more, self.until[shares], rows[shares])
        return 1 + np.cumsum(more)[:-1]

    @cached_property
    def unrepeated(self) -> Ints:
        """How many of these rows do not have each run as a repeated answer."""
        is_repeated = (self.own.run_kinds & REPEATED) != 0
        count = np.where(is_repeated, 0, self.times)
        np.add.at(count, self.others[:, 1], np.where(self.others[:, 2] & REPEATED, -1, 1))
        return count

    @cached_property
    def merged(self) -> Tokens:
        """The own runs, as answers that are context only if they are so in all rows."""
        if self.are_apart:
            return self.own
        kinds = np.where(self.unrepeated > 0, self.own.run_kinds & ~np.uint8(REPEATED), self.own.run_kinds)
        return replace(self.own, run_kinds=kinds)

    @cached_property
    def whole(self) -> Tokens:
        """Every row with all its tokens."""
        if self.are_apart:
            return self.own
        tokens, count = self.own, len(self.parents)
        rows, at, ends = np.arange(count), np.arange(count), tokens.document_runs[1:]
        parts: list[tuple[Ints, Ints, Ints]] = []  # rows, first runs and last ones, the last part of each row first
        while len(rows):
            parts.append((rows, tokens.document_runs[at], ends))
            goes_on = self.parents[at] >= 0
            rows, at = rows[goes_on], at[goes_on]
            at, ends = self.parents[at], self.until[at]
        row, first, last = (np.concatenate(column) for column in zip(*reversed(parts), strict=True))
        order = np.argsort(row, kind="stable")
        row, first, last = row[order], first[order], last[order]
        run = ranges(first, last - first)
        starts, sizes = tokens.run_offsets[first], tokens.run_offsets[last] - tokens.run_offsets[first]
        run_offsets, kinds = offsets_of(tokens.run_lengths[run]), tokens.run_kinds[run]
        numbers = np.repeat(row, last - first) * len(tokens.run_kinds) + run  # they increase
        kinds[np.searchsorted(numbers, self.others[:, 0] * len(tokens.run_kinds) + self.others[:, 1])] = self.others[
            :, 2
        ]
        document_runs = offsets_of(np.bincount(row, weights=last - first, minlength=count).astype(np.int64))
        return replace(
            tokens,
            ids=gathered([tokens.ids], np.zeros(len(starts), dtype=np.uint8), starts, sizes),
            offsets=run_offsets[document_runs],
            run_offsets=run_offsets,
            run_kinds=kinds,
            run_messages=tokens.run_messages[run],
            document_runs=document_runs,
        )
