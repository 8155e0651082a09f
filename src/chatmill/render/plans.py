"""Finds the plan of every record of a batch: by its key, or by running the template.

The key of a record is its shape (what a template sees of it without asking) and its replies to the questions that
the template may ask. A record with a new key is written from what is remembered of the template's turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Conversation
from chatmill.core.conversations import Conversations
from chatmill.core.tokens import offsets_of, ranges
from chatmill.errors import RecordError, fault_of
from chatmill.render.documents import Counts, RecordPlan
from chatmill.render.fill import Entries
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.replay import Classes
from chatmill.render.model_template import ModelTemplate
from chatmill.render.plan_store import FIRST_RECORDS
from chatmill.render.record_keys import BatchKeys

UNKNOWN = -1
"""What is found in place of a plan's number if there is none."""

Ints = NDArray[np.int64]


class FoundPlans(NamedTuple):
    """The documents of a batch."""

    entries: Entries
    conversations: Ints
    """For each document the number of its conversation in the batch."""
    counts: Ints
    """What the ledger says of each conversation, a line for each; 0 for those that the template refuses."""
    failed: dict[int, RecordError]


def find_plans(batch: Conversations, template: ModelTemplate) -> FoundPlans:
    """Find the documents of all conversations that the template does not refuse."""
    search = _Search(batch, template)
    search.run()
    plans, planned = search.plans, np.flatnonzero(search.numbers != UNKNOWN)
    numbers = search.numbers[planned]
    sizes, of = _taken(numbers, [np.array(plan.sizes, dtype=np.int64) for plan in plans])
    stretches, _ = _taken(numbers, [plan.entries for plan in plans])
    stretches = stretches.reshape(-1, 2)
    counts = np.zeros((len(batch), len(Counts._fields)), dtype=np.int64)
    if plans:
        counts[planned] = np.array([plan.counts for plan in plans], dtype=np.int64)[numbers]
    return FoundPlans(Entries(stretches[:, 0], stretches[:, 1], sizes), planned[of], counts, search.failed)


def _taken(numbers: Ints, lists: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Return the lists with some numbers, one after the other, and the place of its number for each entry."""
    if not len(numbers):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    offsets = offsets_of(np.array([len(listed) for listed in lists], dtype=np.int64))
    counts = np.diff(offsets)[numbers]
    return np.concatenate(lists)[ranges(offsets[numbers], counts)], np.repeat(np.arange(len(numbers)), counts)


def plan_prompt(conversation: Conversation, template: ModelTemplate) -> RecordPlan:
    """Return the plan of a conversation with the generation prompt after it."""
    writer = template.write_prompt(conversation).writer
    return writer.plan(by_texts=template.rules.depends_on_texts)


class _Search:
    """Looks for the plans of one batch."""

    def __init__(self, batch: Conversations, template: ModelTemplate) -> None:
        self._batch, self._template, self._store = batch, template, template.store
        self.plans: list[RecordPlan] = []
        """Those of the batch."""
        self.numbers = np.full(len(batch), UNKNOWN, dtype=np.int64)
        """Which of them each conversation has."""
        self.failed: dict[int, RecordError] = {}

    def run(self) -> None:
        """Look for all plans."""
        batch, store = self._batch, self._store
        first = 0
        while first < len(batch):
            last = min(first + store.slice, len(batch))
            keys = store.keys.of(batch if last - first == len(batch) else batch.take(np.arange(first, last)))
            first = self._look_up(first, keys)
            store.slice = 4 * store.slice if first == last else FIRST_RECORDS

    def _look_up(self, first: int, keys: BatchKeys) -> int:
        """Find the plans of some conversations; return the first one that new questions call for a new key of."""
        store, batch = self._store, self._batch
        version, count = store.keys.version, len(keys.which)
        plans = store.plans
        numbers = {key: self._add(plans[key]) for key in keys.different if key in plans}
        numbers_found = self.numbers[first : first + count]
        numbers_found[:] = np.array([numbers.get(key, UNKNOWN) for key in keys.different], dtype=np.int64)[keys.which]
        unknown = np.flatnonzero(numbers_found == UNKNOWN).tolist()
        classes = store.keys.classes(keys.codes) if unknown else np.empty(0, dtype=np.int32)
        for place in unknown:
            key, index = keys.different[keys.which[place]], first + place
            if key in numbers:
                numbers_found[place] = numbers[key]
            else:
                view = self._template.view((batch, index))
                places = slice(*(batch.offsets[index : index + 2] - batch.offsets[first]).tolist())
                view.classes = Classes(classes[places], version)
                try:
                    plan, is_keyed = self._new(view)
                except RecordError as error:
                    error.__traceback__ = error.__context__ = None  # whose frames hold the batch
                    self.failed[index] = error
                except Exception as error:  # the record is lost, and the build goes on
                    self.failed[index] = fault_of(error)
                    store.is_in_doubt = True
                else:
                    numbers_found[place] = self._add(plan)
                    if is_keyed and store.keys.version == version:
                        store.keep(key, plan)
                        numbers[key] = int(numbers_found[place])
            if store.keys.version != version:
                numbers_found[place + 1 :] = UNKNOWN
                return index + 1
        return first + count

    def _add(self, plan: RecordPlan) -> int:
        self.plans.append(plan)
        return len(self.plans) - 1

    def _new(self, view: RecordView) -> tuple[RecordPlan, bool]:
        """Make the plan of a conversation; and say whether its key decides it."""
        template, store = self._template, self._store
        store.unknown += 1
        written = template.write(view)
        plan = written.writer.plan(by_texts=template.rules.depends_on_texts)
        return plan, written.is_keyed() and not template.rules.looks_back
