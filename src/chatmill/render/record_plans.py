"""Plans of records, also as columns: the sequences of a record, what the ledger counts, and which texts are lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.sequence_layout import Origin
from chatmill.core.tokens import offsets_of, ranges
from chatmill.render.jinja.segments import SegmentFacts
from chatmill.render.jinja.turn_sequences import Counts
from chatmill.render.text_places import Operations

Ints = NDArray[np.int64]
Entry = tuple[int, int]
Showings = tuple[tuple[Operations, ...], ...]
"""How a text is shown: for each sequence that has it, the operations of every part that is there. Empty: none has."""


class Loss(NamedTuple):
    """A content or reasoning that no sequence shows whole."""

    origin: Origin
    message: int
    showings: Showings


def losses_of(
    has_reasoning: Sequence[bool], sequences: Iterable[Sequence[Entry]], shown_by: Sequence[SegmentFacts]
) -> Iterator[Loss]:
    """The contents and reasoning of a conversation that none of its sequences shows whole.

    A sequence is labels, and the messages that they count from; `shown_by` has what is known of each label's segment.
    """
    whole: set[tuple[Origin, int]] = set()
    shown: dict[tuple[Origin, int], dict[tuple[Operations, ...], None]] = {}
    done: set[Entry] = set()  # what shows texts whole does so in every sequence
    for sequence in sequences:
        cut: dict[tuple[Origin, int], list[Operations]] = {}
        for entry in sequence:
            if entry in done:
                continue
            label, base = entry
            is_cut = False
            for (origin, place), operations in shown_by[label].showings.items():
                if () in operations:
                    whole.add((origin, place + base))
                else:
                    cut.setdefault((origin, place + base), []).extend(operations)
                    is_cut = True
            if not is_cut:
                done.add(entry)
        for text, all_operations in cut.items():
            shown.setdefault(text, {})[tuple(all_operations)] = None
    for k, has_own in enumerate(has_reasoning):
        if (Origin.CONTENT, k) not in whole:
            yield Loss(Origin.CONTENT, k, tuple(shown.get((Origin.CONTENT, k), ())))
        if has_own and (Origin.REASONING, k) not in whole:
            yield Loss(Origin.REASONING, k, tuple(shown.get((Origin.REASONING, k), ())))


class RecordPlan(NamedTuple):
    """Everything about the records that give the same replies to what the template asks."""

    sizes: tuple[int, ...] = ()
    """How many stretches their sequences have; none where they are refused."""
    entries: Ints = np.empty((0, 2), dtype=np.int64)
    """These stretches, with the messages that they count from."""
    counts: Counts = Counts(0, 0, 0, 0)
    losses: Ints = np.empty((0, 3), dtype=np.int64)
    """Origin, message, and the number of the showings."""


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
    losses: Lists
    """Origin, message, and the number of the showings."""


class RecordPlans:
    """Collects plans; `columns` gives all of them as arrays."""

    def __init__(self) -> None:
        """No plans."""
        self._plans: list[RecordPlan] = []
        sizes, entries, losses = (Lists(np.zeros(1, np.int64), np.empty((0, n), np.int64)) for n in (1, 2, 3))
        self._columns = PlanColumns(sizes, entries, np.empty((0, 4), dtype=np.int64), losses)
        self._showing_numbers: dict[Showings, int] = {(): 0}
        self.showings: list[Showings] = [()]
        """All ways in which texts are shown; the first is not at all."""

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
        old = self._columns
        new = self._plans[len(old.counts) :]
        if new:
            sizes = [np.array(plan.sizes, dtype=np.int64).reshape(-1, 1) for plan in new]
            self._columns = PlanColumns(
                sizes=_joined(old.sizes, sizes),
                entries=_joined(old.entries, [plan.entries for plan in new]),
                counts=np.concatenate([old.counts, np.array([plan.counts for plan in new], dtype=np.int64)]),
                losses=_joined(old.losses, [plan.losses for plan in new]),
            )
        return self._columns

    def plan_of(self, sequences: Sequence[Sequence[Entry]], counts: Counts, losses: Iterable[Loss]) -> RecordPlan:
        """A plan of sequences and losses, which is not kept yet."""
        listed = [(origin, message, self.number(showings)) for origin, message, showings in losses]
        entries = [entry for one in sequences for entry in one]
        columns = (np.array(rows, dtype=np.int64).reshape(-1, width) for rows, width in ((entries, 2), (listed, 3)))
        return RecordPlan(tuple(map(len, sequences)), next(columns), counts, next(columns))

    def number(self, showings: Showings) -> int:
        """The number of a way in which a text is shown."""
        found = self._showing_numbers.get(showings)
        if found is None:
            found = self._showing_numbers[showings] = len(self.showings)
            self.showings.append(showings)
        return found


def _joined(old: Lists, new: Sequence[Ints]) -> Lists:
    offsets = offsets_of(np.array([len(one) for one in new], dtype=np.int64))
    return Lists(np.concatenate([old.offsets, offsets[1:] + old.offsets[-1]]), np.concatenate([old.entries, *new]))
