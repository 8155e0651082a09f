"""All plans of a template as columns: which rows a record has, what the ledger counts, and which texts it loses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of, ranges
from chatmill.render.plan_table import RecordPlan, TrimmedField

Ints = NDArray[np.int64]


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

    rows: Lists
    counts: Ints
    hidden: Lists
    """Origin and message."""
    trimmed: Lists
    """Origin, message, and the number of the operations after which the text is shown."""
    pieced: Lists
    """The number, among all such fields, of a text that is shown in pieces, or otherwise in other rows."""


class RecordPlans:
    """Collects plans; `columns` gives all of them as arrays."""

    def __init__(self) -> None:
        """No plans."""
        self._plans: list[RecordPlan] = []
        self.pieced: list[TrimmedField] = []
        self._columns = PlanColumns(
            *(_lists([], 1), np.empty((0, 4), dtype=np.int64), _lists([], 2), _lists([], 3), _lists([], 1))
        )
        self._done = 0

    def __len__(self) -> int:
        """How many."""
        return len(self._plans)

    def __getitem__(self, number: int) -> RecordPlan:
        """One plan."""
        return self._plans[number]

    def add(self, plan: RecordPlan) -> int:
        """Keep a plan; its number."""
        self._plans.append(plan)
        return len(self._plans) - 1

    @property
    def columns(self) -> PlanColumns:
        """All plans as columns."""
        new = self._plans[self._done :]
        if new:
            simple, pieced = [], []
            for plan in new:
                numbers = range(len(self.pieced), len(self.pieced) + sum(map(_is_pieced, plan.trimmed)))
                self.pieced += filter(_is_pieced, plan.trimmed)
                pieced.append([(number,) for number in numbers])
                simple.append([(f.origin, f.message, f.showings[0][0]) for f in plan.trimmed if not _is_pieced(f)])
            old = self._columns
            self._columns = PlanColumns(
                rows=_joined(old.rows, _lists(([(row,) for row in plan.rows] for plan in new), 1)),
                counts=np.concatenate([old.counts, np.array([plan.counts for plan in new], dtype=np.int64)]),
                hidden=_joined(old.hidden, _lists((plan.hidden for plan in new), 2)),
                trimmed=_joined(old.trimmed, _lists(simple, 3)),
                pieced=_joined(old.pieced, _lists(pieced, 1)),
            )
            self._done = len(self._plans)
        return self._columns


def _is_pieced(field: TrimmedField) -> bool:
    return bool(field.showings[1:] or field.showings[0][1:])


def _lists(lists: Iterable[Iterable[tuple[Any, ...]]], width: int) -> Lists:
    kept = [list(one) for one in lists]
    entries = [entry for one in kept for entry in one]
    return Lists(
        offsets_of(np.array([len(one) for one in kept], dtype=np.int64)),
        np.array(entries, dtype=np.int64).reshape(len(entries), width),
    )


def _joined(one: Lists, other: Lists) -> Lists:
    offsets = np.concatenate([one.offsets, other.offsets[1:] + one.offsets[-1]])
    return Lists(offsets, np.concatenate([one.entries, other.entries]))
