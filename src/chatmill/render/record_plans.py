"""Plans of records, also as columns: the sequences of a record, what the ledger counts, and which texts are lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of, ranges
from chatmill.render.jinja.turn_sequences import Counts

Ints = NDArray[np.int64]
Entry = tuple[int, int]


class RecordPlan(NamedTuple):
    """Everything about the records that give the same replies to what the template asks."""

    sizes: tuple[int, ...]
    """How many stretches their sequences have."""
    entries: Ints
    """These stretches, with the messages that they count from."""
    counts: Counts


class Lists(NamedTuple):
    """A list of entries for each of many plans; an entry is a line of numbers."""

    offsets: Ints
    entries: Ints

    def of(self, plans: Ints) -> tuple[Ints, Ints]:
        """The entries of some plans, and for each entry which of these plans it belongs to."""
        counts = self.offsets[plans + 1] - self.offsets[plans]
        return self.entries[ranges(self.offsets[plans], counts)], np.repeat(np.arange(len(plans)), counts)


class PlanColumns(NamedTuple):
    """What `RecordPlan` holds, for all plans."""

    sizes: Lists
    """How many stretches each sequence has."""
    entries: Lists
    """The stretches of all sequences of a plan, with the messages that they count from."""
    counts: Ints


class RecordPlans:
    """Collects plans; `columns` gives all of them as arrays."""

    def __init__(self) -> None:
        """No plans."""
        self._new: list[RecordPlan] = []
        sizes, entries = (Lists(np.zeros(1, np.int64), np.empty((0, n), np.int64)) for n in (1, 2))
        self._columns = PlanColumns(sizes, entries, np.empty((0, 4), dtype=np.int64))

    def add(self, plan: RecordPlan) -> int:
        """Keep a plan; its number."""
        self._new.append(plan)
        return len(self._columns.counts) + len(self._new) - 1

    @property
    def columns(self) -> PlanColumns:
        """All plans as columns."""
        old, new = self._columns, self._new
        if new:
            sizes = [np.array(plan.sizes, dtype=np.int64).reshape(-1, 1) for plan in new]
            self._columns = PlanColumns(
                sizes=_joined(old.sizes, sizes),
                entries=_joined(old.entries, [plan.entries for plan in new]),
                counts=np.concatenate([old.counts, np.array([plan.counts for plan in new], dtype=np.int64)]),
            )
            self._new = []
        return self._columns


def plan_of(sequences: Sequence[Sequence[Entry]], counts: Counts) -> RecordPlan:
    """A plan of sequences."""
    entries = np.array([entry for one in sequences for entry in one], dtype=np.int64).reshape(-1, 2)
    return RecordPlan(tuple(map(len, sequences)), entries, counts)


def _joined(old: Lists, new: Sequence[Ints]) -> Lists:
    offsets = offsets_of(np.array([len(one) for one in new], dtype=np.int64))
    return Lists(np.concatenate([old.offsets, offsets[1:] + old.offsets[-1]]), np.concatenate([old.entries, *new]))
