"""Finds the plan of every record of a batch: by its key, or by running the template.

The key of a record is its shape (what a template sees of it without asking) and its replies to the questions that
the template may ask. A record with a new key is written from what is remembered of the template's turns.
"""

from __future__ import annotations

import os
import threading

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Conversation
from chatmill.core.conversations import Conversations
from chatmill.errors import RecordError
from chatmill.render.fill import Compute
from chatmill.render.jinja.expressions import Expression, evaluate, root
from chatmill.render.jinja.kept_values import shifted
from chatmill.render.jinja.record_view import Arguments, RecordView
from chatmill.render.jinja.replay import Classes
from chatmill.render.jinja.turn_sequences import Entry
from chatmill.render.model_template import ModelTemplate, WrittenRecord
from chatmill.render.quick_plans import QuickPlans
from chatmill.render.record_keys import BatchKeys, Key
from chatmill.render.record_plans import RecordPlan, RecordPlans, plan_of
from chatmill.render.stretches import Stretches

MAX_ENTRIES = 2_000_000
"""Stretches of plans that are kept; beyond, plans are made again."""
MAX_ITEMS = 400_000
"""Items of stretches that are kept, likewise."""
FIRST_RECORDS = 256
"""While questions are new, few records are looked at at once: each question is answered for all that are left."""
MAX_SLICE = 4096
"""Records that keys are made for at once while a template is new: new questions call for new keys."""

UNKNOWN = -1
"""What is found in place of a plan's number if there is none."""

Ints = NDArray[np.int64]


def plans_of(template: ModelTemplate) -> PlanCache:
    """The plans that were made of a template so far in this process."""
    kept, process = vars(template), os.getpid()
    if "plan_cache" not in kept:
        kept.setdefault("plan_cache", PlanCache(template))
    found: PlanCache = kept["plan_cache"]
    if found.process != process:  # forked: a thread that is not here may have left its work half done
        found = kept["plan_cache"] = PlanCache(template) if found.lock.locked() else found
        found.process = process
    return found


class PlanCache:
    """All plans of one template with one tokenizer."""

    def __init__(self, template: ModelTemplate) -> None:
        """No plans yet."""
        self.lock, self.process = threading.Lock(), os.getpid()
        """Held while conversations are rendered: what is learned of them is not for two threads at once."""
        self._template, self._form = template, template.form
        assert template.record_keys is not None
        self._keys = template.record_keys
        self.unknown = 0
        """Records that had no plan."""
        self._settled = 0
        """Records since the last one that brought a new question."""
        self._forget()

    def _forget(self) -> None:
        self.stretches = Stretches(self._template.rules, arguments_are_text=self._form.arguments is Arguments.STRING)
        self.plans = RecordPlans()
        self._quick = QuickPlans(self._template, self.stretches)
        self._by_key: dict[Key, int] = {}
        self._entries = 0

    def find(self, batch: Conversations) -> tuple[Ints, list[tuple[int, RecordError]]]:
        """The number of every conversation's plan, negative for those that the template refuses; and why."""
        if self._entries > MAX_ENTRIES or self.stretches.table.size > MAX_ITEMS:
            self._forget()
        numbers = np.full(len(batch), UNKNOWN, dtype=np.int64)
        failed: list[tuple[int, RecordError]] = []
        first, size = 0, FIRST_RECORDS if self._settled < FIRST_RECORDS else len(batch)
        while first < len(batch):
            last = min(first + size, len(batch))
            keys = self._keys.of(batch if last - first == len(batch) else batch.take(np.arange(first, last)))
            stopped = self._look_up(batch, first, keys, numbers, failed)
            if stopped is None:
                self._settled += last - first
                first, size = last, max(size, min(4 * size, MAX_SLICE))
            else:
                self._settled = 0
                first = stopped + 1
        return numbers, failed

    def _look_up(
        self, batch: Conversations, first: int, keys: BatchKeys, numbers: Ints, failed: list[tuple[int, RecordError]]
    ) -> int | None:
        """Fill in the numbers of some conversations; the index after which new questions call for new keys."""
        known, count = self._by_key, len(keys.which)
        found = np.array([known.get(key, UNKNOWN) for key in keys.different], dtype=np.int64)[keys.which]
        numbers[first : first + count] = found
        unknown = np.flatnonzero(found == UNKNOWN).tolist()
        classes = self._keys.classes(keys.codes) if unknown else np.empty(0, dtype=np.int32)
        version = self._keys.version
        begin = int(batch.offsets[first])
        for place in unknown:
            index, key = first + place, keys.different[keys.which[place]]
            number = known.get(key)
            if number is None:
                view = self._template.view((batch, index))
                own = slice(*(batch.offsets[index : index + 2] - begin).tolist())
                view.classes = Classes(classes[own], version)
                try:
                    number = self._slowly(view, key)
                except RecordError as error:
                    error.record_id = error.record_id or batch.ids[index]
                    error.where = error.where or batch.wheres[index]
                    failed.append((index, error))
                    number = UNKNOWN
            numbers[index] = number
            if self._keys.version != version:
                self._by_key = {}
                numbers[index + 1 : first + count] = UNKNOWN
                return index
        return None

    def _slowly(self, view: RecordView, key: Key) -> int:
        """The plan of one conversation, from what is remembered of the template's turns, or by running it."""
        self.unknown += 1
        quick = self._quick.plan(view)
        if quick is not None:
            return self._kept(quick[0], key, is_keyed=quick[1])
        written = self._template.write(view)
        sequences = self._stretches_of(written)
        self._quick.learn(written)
        plan = plan_of(sequences, written.counts)
        return self._kept(plan, key, is_keyed=written.is_keyed() and not self._template.rules.looks_back)

    def _kept(self, plan: RecordPlan, key: Key, *, is_keyed: bool) -> int:
        self._entries += len(plan.entries)
        number = self.plans.add(plan)
        if is_keyed:
            self._by_key[key] = number
        return number

    def prompt(self, conversation: Conversation) -> list[Entry]:
        """The stretches of a conversation and the generation prompt after it."""
        written = self._template.write_prompt(conversation)
        return self._stretches_of(written)[0]

    def _stretches_of(self, written: WrittenRecord) -> list[list[Entry]]:
        labelled, answers = [one.entries for one in written.sequences], written.answers
        return self.stretches.of(labelled, written.labels, answers.view, answers.remembered)

    def computer(self, batch: Conversations) -> Compute:
        """Evaluates expressions for the conversations of a batch."""
        views: dict[int, RecordView] = {}
        listed: dict[tuple[str, Expression], str] = {}

        def compute(index: int, base: int, expression: Expression) -> str:
            path = root(expression)
            if path is not None and path[0] == "tools":
                key = (batch.tools[index], expression)
                found = listed.get(key)
                if found is None:
                    found = listed[key] = evaluate(expression, RecordView(batch[index], self._form).field)
                return found
            view = views.get(index)
            if view is None:
                view = views[index] = RecordView(batch[index], self._form)
            return evaluate(shifted(expression, base), view.field)

        return compute
