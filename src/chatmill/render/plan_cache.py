"""Finds the plan of every record of a batch: by its key, or by running the template.

The key of a record is its shape (what a template sees of it without asking) and its replies to the questions that
the template may ask. A record with a new key has its questions asked one by one; where no record of its shape has given
the same replies, the template runs for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Conversation
from chatmill.core.conversations import Conversations
from chatmill.errors import RecordError
from chatmill.render.bound import BoundTemplate, WrittenRecord
from chatmill.render.fill import fill
from chatmill.render.fragments import Fragment
from chatmill.render.jinja.expressions import Expression, Notes, evaluate, root
from chatmill.render.jinja.record_view import Arguments, RecordView
from chatmill.render.jinja.renderer import OF_ITS_SHAPE, NotFollowedError, TraceError, Variants
from chatmill.render.jinja.traced import plain_text
from chatmill.render.record_keys import BatchKeys, Key, RecordKeys
from chatmill.render.record_plans import RecordPlan, RecordPlans, losses_of
from chatmill.render.sequence_items import Ids
from chatmill.render.sequence_table import SequenceTable

MAX_ITEMS = 400_000
"""Items of plans that are kept; beyond, everything is learned again."""
MAX_QUESTIONS = 1_000_000
"""Questions of plans and refusals that are kept, likewise."""
FIRST_RECORDS = 256
"""While questions are new, few records are looked at at once: each question is answered for all that are left."""
MAX_SLICE = 4096
"""Records that keys are made for at once while a template is new: new questions call for new keys."""
CHECKED_USES = (1024, 32768)
"""The uses of a plan at which the record is also written by itself, and compared."""
CHECKED_AT_ONCE = 32
"""One in so many plans is compared at its second use already; of users' templates in Python, which may read texts in
ways that cannot be followed (`"".join`), each."""

UNKNOWN = -1
"""What is found in place of a plan's number where there is none."""

Ints = NDArray[np.int64]


class PlanCache:
    """All plans of one template with one tokenizer."""

    def __init__(self, template: BoundTemplate) -> None:
        """No plans yet."""
        self.lock, self.process = threading.Lock(), os.getpid()
        """Held while conversations are rendered: what is learned of them is not for two threads at once."""
        self._template, self._form = template, template.form
        self._arguments_are_text = template.form.arguments is Arguments.STRING
        is_ours = type(template).__module__.partition(".")[0] == __name__.partition(".")[0]
        self._checked_at_once = CHECKED_AT_ONCE if is_ours else 1
        self.traced = 0
        """Records for which the template ran."""
        self._forget()

    def _forget(self) -> None:
        self.sequences = SequenceTable(arguments_are_text=self._arguments_are_text)
        self.plans = RecordPlans()
        self._refusals: dict[int, RecordError] = {}
        """Why the records of a plan are refused, by its number."""
        self._by_shape: dict[Key, Variants] = {}
        self._by_key: dict[Key, int] = {}
        self._keys = RecordKeys(self._form, by_value=self._template.knows_by_value)
        self._questions_kept = 0
        self._uses: Ints = np.zeros(0, dtype=np.int64)
        """How often each plan was used."""
        self._settled = 0
        """Records since the last one that brought a new question."""

    def find(self, batch: Conversations) -> tuple[Ints, list[tuple[int, RecordError]]]:
        """The number of every conversation's plan, negative for those that the template refuses; and why."""
        if self.sequences.size > MAX_ITEMS or self._questions_kept > MAX_QUESTIONS:
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
        refused = np.isin(numbers, list(self._refusals))
        for index in np.flatnonzero(refused).tolist():
            known = self._refusals[int(numbers[index])]
            place = {"record_id": batch.ids[index], "where": batch.wheres[index]}
            failed.append((index, RecordError(known.message, code=known.code, path=known.path, **place)))
        numbers[refused] = UNKNOWN
        self._count_uses(batch, numbers)
        return numbers, sorted(failed, key=lambda pair: pair[0])

    def _look_up(
        self, batch: Conversations, first: int, keys: BatchKeys, numbers: Ints, failed: list[tuple[int, RecordError]]
    ) -> int | None:
        """Fill in the numbers of some conversations; the index behind which new questions call for new keys."""
        known, count = self._by_key, len(keys.which)
        found = np.array([known.get(key, UNKNOWN) for key in keys.different], dtype=np.int64)[keys.which]
        numbers[first : first + count] = found
        version = self._keys.version
        for place in np.flatnonzero(found == UNKNOWN).tolist():
            index, key = first + place, keys.different[keys.which[place]]
            number = known.get(key)
            if number is None:
                try:
                    number = self._slowly(batch[index], key)
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

    def _count_uses(self, batch: Conversations, numbers: Ints) -> None:
        """Count how often plans are used, and compare some of their uses."""
        places = np.flatnonzero(numbers >= 0)[::-1]  # the last use of a plan: its first one may have made it
        used, lasts, counts = np.unique(numbers[places], return_index=True, return_counts=True)
        self._uses = np.append(self._uses, np.zeros(max(len(self.plans) - len(self._uses), 0), dtype=np.int64))
        before = self._uses[used]
        after = self._uses[used] = before + counts
        due = np.searchsorted(CHECKED_USES, before, side="right") < np.searchsorted(CHECKED_USES, after, side="right")
        due |= (before < 2) & (after >= 2) & (used % self._checked_at_once == 0)
        for number, index in zip(used[due].tolist(), places[lasts[due]].tolist(), strict=True):
            self._spot_check(batch, index, self.plans[number])

    def _spot_check(self, batch: Conversations, index: int, plan: RecordPlan) -> None:
        """Compare what a plan gives for a record with what the template writes for that record alone."""
        one, nothing = batch.take(np.array([index])), np.zeros(len(plan.sequences), dtype=np.int64)
        table = SequenceTable(arguments_are_text=self._arguments_are_text)
        try:
            written = self._template.write(batch[index])
        except RecordError as error:
            raise TraceError(f"a record that others of its shape were written like is refused: {error}") from error
        sequences = [table.add(sequence) for sequence in written.fragments]
        tokenizer, compute = self._template.tokenizer, self.computer(one)
        mine = fill(self.sequences, np.array(plan.sequences), nothing, one, tokenizer, compute).tokens
        alone = fill(
            table, np.array(sequences), np.zeros(len(sequences), dtype=np.int64), one, tokenizer, compute
        ).tokens
        if not all(
            np.array_equal(getattr(mine, name), getattr(alone, name))
            for name in ("ids", "offsets", "kinds", "messages")
        ):
            raise TraceError(
                f"the template {self._template.name!r} writes record {batch.ids[index] or batch.wheres[index]!r} "
                f"otherwise than {OF_ITS_SHAPE}"
            )

    def _slowly(self, conversation: Conversation, key: Key) -> int:
        """The plan of one conversation: by asking its questions one by one, else by running the template."""
        known = self._by_shape.setdefault(self._keys.shape_in(key), Variants())
        number: int | None = known.find(RecordView(conversation, self._form))
        if number is None:
            self.traced += 1
            notes = Notes()
            number = self._planned(conversation, notes)
            known.put(notes.replies, number)
            self._questions_kept += len(notes.replies)
        if self._keys.learn(self.plans[number].questions):
            self._by_key[key] = number
        return number

    def _planned(self, conversation: Conversation, notes: Notes) -> int:
        """A new plan for a conversation, or for all that are refused like it."""
        try:
            written = self._template.write(conversation, notes, by_messages=True)
        except RecordError as error:
            if not error.is_general:
                raise
            number = self.plans.add(RecordPlan(tuple(notes.replies)))
            self._refusals[number] = RecordError(str(error.message), code=error.code, path=error.path)
            return number
        self._check_texts(conversation, written)
        sequences = tuple(map(self.sequences.add, written.fragments))
        losses = tuple(losses_of(conversation, written.fragments))
        return self.plans.add(RecordPlan(tuple(notes.replies), sequences, written.counts, losses))

    def _check_texts(self, conversation: Conversation, written: WrittenRecord) -> None:
        """Compare every text of new rows with what its expression gives, which is what will be written."""
        fields = RecordView(conversation, self._form).field
        for fragment in (row[0] for row in written.fragments if type(row[0]) is Fragment):
            for item in fragment.items:
                if isinstance(item, Ids) or item.expression is None or root(item.expression) is None:
                    continue
                if evaluate(item.expression, fields) != plain_text(item.text):
                    named = conversation.id or conversation.where
                    raise NotFollowedError(
                        f"the template {self._template.name!r} makes {item.text[:60]!r} of a text of record {named!r} "
                        "in a way that cannot be followed: a fault of Chatmill. Please report it with the template"
                    )

    def computer(self, batch: Conversations) -> Callable[[int, Expression], str]:
        """Evaluates expressions for the conversations of a batch."""
        views: dict[int, RecordView] = {}
        listed: dict[tuple[str, Expression], str] = {}

        def compute(index: int, expression: Expression) -> str:
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
            return evaluate(expression, view.field)

        return compute
