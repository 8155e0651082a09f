"""Finds the plan of every record of a batch: by its shape and its answers, or by running the template.

What a template may ask about texts is known after a few records (`'</think>' in content`). Those questions are answered
for all messages of a batch at once. Shape and answers of a record are then a few bytes, which lead to its plan.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Conversation
from chatmill.core.conversations import Conversations
from chatmill.core.native.row_layout import Origin
from chatmill.errors import RecordError
from chatmill.render.bound import BoundTemplate, WrittenRecord
from chatmill.render.fill import fill
from chatmill.render.jinja.expressions import Expression, Notes, Path, Question, evaluate, root
from chatmill.render.jinja.record import Arguments, RecordView, shape_by_value
from chatmill.render.jinja.renderer import TraceError, Variants
from chatmill.render.plan_table import HiddenField, PlanTable, RecordPlan
from chatmill.render.record_keys import BatchKeys, Key, RecordKeys
from chatmill.render.record_plans import RecordPlans
from chatmill.render.row_items import TextPart

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
"""One in so many plans is compared at its second use already."""

UNKNOWN, REFUSED = -1, -2
"""What is found in place of a plan: nothing, or (this and below) a refusal."""

Ints = NDArray[np.int64]


class KnownRefusal(NamedTuple):
    """Why the records of one shape that give the same answers are refused."""

    questions: tuple[Question, ...]
    message: str
    code: str
    path: str

    def error(self, record_id: str, where: str) -> RecordError:
        """The error of one of them."""
        return RecordError(self.message, code=self.code, path=self.path, record_id=record_id, where=where)


class PlanBook:
    """All plans of one template with one tokenizer."""

    def __init__(self, template: BoundTemplate) -> None:
        """An empty book."""
        self._template, self._form = template, template.form
        self._arguments_are_text = template.form.arguments is Arguments.STRING
        self.traced = 0
        """Records for which the template ran."""
        self._forget()

    def _forget(self) -> None:
        self.table = PlanTable(arguments_are_text=self._arguments_are_text)
        self._shapes: dict[Any, Variants] = {}
        self.plans = RecordPlans()
        self._refusals: list[KnownRefusal] = []
        self._by_key: dict[Key, int] = {}
        """The number of a plan, or REFUSED minus that of a refusal."""
        self._keys = RecordKeys(self._form, by_value=self._template.knows_by_value)
        self._questions_kept = 0
        self._uses: Ints = np.zeros(0, dtype=np.int64)
        """How often each plan was used."""
        self._settled = 0
        """Records since the last one that brought a new question."""

    def find(self, batch: Conversations) -> tuple[Ints, list[tuple[int, RecordError]]]:
        """The number of every conversation's plan, negative for those that the template refuses; and why."""
        if self.table.size > MAX_ITEMS or self._questions_kept > MAX_QUESTIONS:
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
        for index in np.flatnonzero(numbers <= REFUSED).tolist():
            refusal = self._refusals[REFUSED - int(numbers[index])]
            failed.append((index, refusal.error(batch.ids[index], batch.wheres[index])))
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
        due |= (before < 2) & (after >= 2) & (used % CHECKED_AT_ONCE == 0)
        for number, index in zip(used[due].tolist(), places[lasts[due]].tolist(), strict=True):
            self._spot_check(batch, index, self.plans[number])

    def _spot_check(self, batch: Conversations, index: int, plan: RecordPlan) -> None:
        """Compare what a plan gives for a record with what the template writes for that record alone."""
        one, nothing = batch.take(np.array([index])), np.zeros(len(plan.rows), dtype=np.int64)
        table = PlanTable(arguments_are_text=self._arguments_are_text)
        rows = [table.add(items) for items in self._template.write(batch[index]).rows]
        tokenizer, compute = self._template.tokenizer, self.computer(one)
        mine = fill(self.table, np.array(plan.rows), nothing, one, tokenizer, compute).tokens
        alone = fill(table, np.array(rows), np.zeros(len(rows), dtype=np.int64), one, tokenizer, compute).tokens
        if not all(
            np.array_equal(getattr(mine, name), getattr(alone, name))
            for name in ("ids", "offsets", "kinds", "messages")
        ):
            raise TraceError(
                f"the template {self._template.name!r} writes record {batch.ids[index] or batch.wheres[index]!r} "
                "otherwise than other records of its shape: a fault of Chatmill, or of a template that reads texts in "
                "ways that cannot be followed"
            )

    def _slowly(self, conversation: Conversation, key: Key) -> int:
        """The plan of one conversation: by asking its questions one by one, else by running the template."""
        view = RecordView(conversation, self._form)
        if self._template.knows_by_value:
            shape: Any = (shape_by_value(conversation), json.dumps(conversation.tools))
        else:
            shape = (view.shape(), bool(conversation.tools))
        shape += (json.dumps(conversation.options, sort_keys=True),)
        known = self._shapes.get(shape)
        if known is None:
            known = self._shapes[shape] = Variants()
        number: int | None = known.find(view)
        if number is None:
            self.traced += 1
            notes = Notes()
            try:
                written = self._template.write(conversation, notes, by_messages=True)
            except RecordError as error:
                error.record_id = error.record_id or conversation.id
                error.where = error.where or conversation.where
                if not error.is_general:
                    raise
                self._refusals.append(KnownRefusal(tuple(notes.answers), str(error.message), error.code, error.path))
                number = REFUSED - (len(self._refusals) - 1)
            else:
                number = self.plans.add(self._planned(conversation, written, notes))
            known.put(notes.answers, number)
            self._questions_kept += len(notes.answers)
        found = self.plans[number] if number >= 0 else self._refusals[REFUSED - number]
        if self._keys.learn(found.questions):
            self._by_key[key] = number
        return number

    def _planned(self, conversation: Conversation, written: WrittenRecord, notes: Notes) -> RecordPlan:
        if written.fragments:
            rows: tuple[int, ...] = (self.table.add_fragments(written.fragments),)
            shown = frozenset().union(*(fragment.shown for fragment in written.fragments))
            trimmed = self.table.trimmed_in(written.fragments)
        else:
            rows = tuple(map(self.table.add, written.rows))
            items = (item for row in written.rows for item in row)
            shown = frozenset(root(i.expression) for i in items if isinstance(i, TextPart) and i.expression)
            trimmed = self.table.trimmed(written.rows)
        return RecordPlan(
            questions=tuple(notes.answers),
            rows=rows,
            counts=written.counts,
            hidden=tuple(_hidden(conversation, shown)),
            trimmed=tuple(trimmed),
            options=written.options,
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


def _hidden(conversation: Conversation, shown: Collection[Path | None]) -> Iterator[HiddenField]:
    """Contents and reasoning that are not shown."""
    for k, message in enumerate(conversation.messages):
        if (k, "content") not in shown:
            yield HiddenField(Origin.CONTENT, k)
        if message.reasoning is not None and (k, "reasoning") not in shown:
            yield HiddenField(Origin.REASONING, k)
