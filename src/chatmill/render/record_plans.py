"""Plans of records, also as columns: the sequences of a record, what the ledger counts, and which texts are lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Conversation
from chatmill.core.native.sequence_layout import Origin
from chatmill.core.tokens import offsets_of, ranges
from chatmill.render.fragments import Fragment
from chatmill.render.jinja.expressions import Question
from chatmill.render.jinja.turn_sequences import Counts
from chatmill.render.text_places import Operations

Ints = NDArray[np.int64]
Showings = tuple[tuple[Operations, ...], ...]
"""How a text is shown: for each sequence that has it, the operations of every part that is there. Empty: none has."""


class Loss(NamedTuple):
    """A content or reasoning that no sequence shows whole."""

    origin: Origin
    message: int
    showings: Showings


def losses_of(conversation: Conversation, sequences: Iterable[Sequence[Fragment]]) -> Iterator[Loss]:
    """The contents and reasoning of a conversation that none of its sequences shows whole."""
    shown: dict[tuple[Origin, int], dict[tuple[Operations, ...], None]] = {}
    for sequence in sequences:
        in_sequence: dict[tuple[Origin, int], list[Operations]] = {}
        for fragment in sequence:
            for text, operations in fragment.showings.items():
                in_sequence.setdefault(text, []).extend(operations)
        for text, all_operations in in_sequence.items():
            shown.setdefault(text, {})[tuple(all_operations)] = None
    for k, message in enumerate(conversation.messages):
        for origin, own in ((Origin.CONTENT, message.content), (Origin.REASONING, message.reasoning)):
            showings = tuple(shown.get((origin, k), ()))
            if own is not None and not any(() in parts for parts in showings):
                yield Loss(origin, k, showings)


class RecordPlan(NamedTuple):
    """Everything about the records of one shape that give the same replies to what the template asks."""

    questions: tuple[Question, ...]
    sequences: tuple[int, ...] = ()
    """The numbers of their sequences; none where they are refused."""
    counts: Counts = Counts(0, 0, 0, 0)
    losses: tuple[Loss, ...] = ()


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

    sequences: Lists
    counts: Ints
    losses: Lists
    """Origin, message, and the number of the showings."""


class RecordPlans:
    """Collects plans; `columns` gives all of them as arrays."""

    def __init__(self) -> None:
        """No plans."""
        self._plans: list[RecordPlan] = []
        self._columns = PlanColumns(_lists([], 1), np.empty((0, 4), dtype=np.int64), _lists([], 3))
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
            losses = ([(*loss[:2], self._number(loss.showings)) for loss in plan.losses] for plan in new)
            self._columns = PlanColumns(
                sequences=_joined(
                    old.sequences, _lists(([(sequence,) for sequence in plan.sequences] for plan in new), 1)
                ),
                counts=np.concatenate([old.counts, np.array([plan.counts for plan in new], dtype=np.int64)]),
                losses=_joined(old.losses, _lists(losses, 3)),
            )
        return self._columns

    def _number(self, showings: Showings) -> int:
        found = self._showing_numbers.get(showings)
        if found is None:
            found = self._showing_numbers[showings] = len(self.showings)
            self.showings.append(showings)
        return found


def _lists(lists: Iterable[Sequence[tuple[Any, ...]]], width: int) -> Lists:
    kept = list(lists)
    entries = [entry for one in kept for entry in one]
    return Lists(
        offsets_of(np.array([len(one) for one in kept], dtype=np.int64)),
        np.array(entries, dtype=np.int64).reshape(len(entries), width),
    )


def _joined(one: Lists, other: Lists) -> Lists:
    offsets = np.concatenate([one.offsets, other.offsets[1:] + one.offsets[-1]])
    return Lists(offsets, np.concatenate([one.entries, other.entries]))
