"""Finds the plan of every record of a batch: by its shape and its answers, or by running the template.

What a template may ask about texts is known after a few records (`'</think>' in content`). Those questions are answered
for all messages of a batch at once. Shape and answers of a record are then a few bytes, which lead to its plan.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Conversation
from chatmill.core.conversations import Conversations
from chatmill.core.messages import MessageColumns
from chatmill.core.native.distinct import distinct
from chatmill.core.native.find import positions_of
from chatmill.core.texts import OptionalTexts, Texts
from chatmill.errors import RecordError
from chatmill.render.bound import BoundTemplate, WrittenRecord
from chatmill.render.fill import applied, fill
from chatmill.render.jinja.expressions import Expression, Path, Question, ask, evaluate, root
from chatmill.render.jinja.notes import Notes
from chatmill.render.jinja.record import Arguments, RecordView, shape_by_value
from chatmill.render.jinja.renderings import TraceError, Variants
from chatmill.render.plan_table import HiddenField, Origin, PlanTable, RecordPlan, place_of
from chatmill.render.record_plans import RecordPlans
from chatmill.render.row_items import TextPart

MAX_ITEMS = 400_000
"""Items of plans that are kept; beyond, everything is learned again."""
MAX_QUESTIONS = 1_000_000
"""Questions of plans and refusals that are kept, likewise."""
MAX_COLUMNS = 48
MAX_TOOL_QUESTIONS = 64
"""A template that asks more about tools is taken to depend on all of their text."""
KEPT_TOOLS = 4096
FIRST_RECORDS = 256
"""While questions are new, few records are looked at at once: each question is answered for all that are left."""
MAX_SLICE = 4096
"""Records that keys are made for at once while a template is new: new questions call for new keys."""
CHECKED_USES = frozenset({1024, 32768})
"""The uses of a plan at which the record is also written by itself, and compared."""
CHECKED_AT_ONCE = 32
"""One in so many plans is compared at its second use already."""

UNKNOWN, REFUSED = -1, -2
"""What is found in place of a plan: nothing, or (this and below) a refusal."""

Ints = NDArray[np.int64]
ColumnQuestion = tuple[str, Origin, int, Any, Any]
"""What is asked, of which column and which call of a message, after which operations, with which argument."""
Key = bytes | tuple[bytes, str | int, str]
"""A few bytes per message; with tools or options, these too."""


class KnownRefusal(NamedTuple):
    """Why the records of one shape that give the same answers are refused."""

    questions: tuple[Question, ...]
    message: str
    code: str
    path: str

    def error(self, record_id: str, where: str) -> RecordError:
        """The error of one of them."""
        return RecordError(self.message, code=self.code, path=self.path, record_id=record_id, where=where)


class _Keys(NamedTuple):
    """The keys of some conversations."""

    which: Ints
    """For each of them the number of its key."""
    different: list[Key]


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
        self._columns: list[ColumnQuestion] = []
        self._tool_questions: dict[Question, None] = {}
        self._tools_by_value = self._template.knows_by_value
        self._key_form = 0
        """Changes whenever keys are made of something else."""
        self._questions_kept = 0
        self._tool_answers: dict[str, int] = {}
        self._tool_views: dict[str, RecordView] = {}
        self._signatures: dict[Any, int] = {}
        self._uses: dict[int, int] = {}
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
            keys = self._keys(batch if last - first == len(batch) else batch.take(np.arange(first, last)))
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
        self, batch: Conversations, first: int, keys: _Keys, numbers: Ints, failed: list[tuple[int, RecordError]]
    ) -> int | None:
        """Fill in the numbers of some conversations; the index behind which new questions call for new keys."""
        known, count = self._by_key, len(keys.which)
        found = np.array([known.get(key, UNKNOWN) for key in keys.different], dtype=np.int64)[keys.which]
        numbers[first : first + count] = found
        form = self._key_form
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
            if self._key_form != form:
                self._by_key = {}
                numbers[index + 1 : first + count] = UNKNOWN
                return index
        return None

    def _count_uses(self, batch: Conversations, numbers: Ints) -> None:
        """Count how often plans are used, and compare some of their uses."""
        places = np.flatnonzero(numbers >= 0)[::-1]  # the last use of a plan: its first one may have made it
        used, lasts, counts = np.unique(numbers[places], return_index=True, return_counts=True)
        for number, index, count in zip(used.tolist(), places[lasts].tolist(), counts.tolist(), strict=True):
            before = self._uses.get(number, 0)
            self._uses[number] = after = before + count
            if any(before < wanted <= after for wanted in CHECKED_USES) or (
                before < 2 <= after and number % CHECKED_AT_ONCE == 0
            ):
                self._spot_check(batch, index, self.plans[number])

    def _spot_check(self, batch: Conversations, index: int, plan: RecordPlan) -> None:
        """Compare what a plan gives for a record with what the template writes for that record alone."""
        one, nothing = batch.take(np.array([index])), np.zeros(len(plan.rows), dtype=np.int64)
        table = PlanTable(arguments_are_text=self._arguments_are_text)
        rows = [table.add(items) for items in self._template.write(batch[index]).rows]
        tokenizer, compute = self._template.tokenizer, self.computer(one)
        mine = fill(self.table, np.array(plan.rows), nothing, one, tokenizer, compute)
        alone = fill(table, np.array(rows), np.zeros(len(rows), dtype=np.int64), one, tokenizer, compute)
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
            shape = (view.shape(), bool(conversation.tools), json.dumps(conversation.options, sort_keys=True))
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
        if self._learn(found.questions):
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

    def _learn(self, questions: tuple[Question, ...]) -> bool:
        """Whether all questions of a plan are answered by its key; those that could be will be from now on."""
        complete = True
        for question in questions:
            if _is_about_tools(question):
                if not self._tools_by_value and question not in self._tool_questions:
                    self._ask_of_tools(question)
                continue
            column = self._column_of(question)
            if column is None or (column not in self._columns and len(self._columns) >= MAX_COLUMNS):
                complete = False
            elif column not in self._columns:
                self._columns.append(column)
                self._key_form += 1
        return complete

    def _ask_of_tools(self, question: Question) -> None:
        """Answer one more question about tools in every key."""
        self._tool_questions[question] = None
        self._tool_answers = {}
        self._key_form += 1
        if len(self._tool_questions) > MAX_TOOL_QUESTIONS:
            self._tools_by_value, self._tool_questions = True, {}

    def _column_of(self, question: Question) -> ColumnQuestion | None:
        """A question that can be answered for all messages at once."""
        what = question[0]
        if what not in ("filled", "contains", "equals", "method"):
            return None
        place = place_of(question[1], self._arguments_are_text)
        if place is None or place.origin is Origin.TOOL:
            return None
        if any(name not in ("strip", "lstrip", "rstrip") for name, _ in place.operations):
            return None
        argument = question[2:]
        if what == "method" and (argument[0] not in ("startswith", "endswith") or len(argument[1]) != 1):
            return None
        if what == "method" and not isinstance(argument[1][0], str):
            return None
        return (what, place.origin, place.call, place.operations, argument)

    # ---- keys

    def _keys(self, batch: Conversations) -> _Keys:
        codes = self._codes(batch)
        flat, starts = codes.reshape(-1), codes.shape[1] * batch.offsets
        which, firsts = distinct(flat, starts[:-1], np.diff(starts))

        def own(index: int) -> bytes:
            return flat[starts[index] : starts[index + 1]].tobytes()

        keys: list[Key] = [own(index) for index in firsts.tolist()]
        for index in np.flatnonzero((batch.tools.lengths > 0) | (batch.options.lengths > 0)).tolist():
            text = batch.tools[index]
            shown = self._tools_key(text, batch, index) if text else ""
            which[index] = len(keys)
            keys.append((own(index), shown, batch.options[index]))
        return _Keys(which, keys)

    def _tools_key(self, text: str, batch: Conversations, index: int) -> int | str:
        if self._tools_by_value:
            return blake2b(text.encode(), digest_size=16).hexdigest()
        found = self._tool_answers.get(text)
        if found is None:
            if len(self._tool_answers) >= KEPT_TOOLS:
                self._tool_answers, self._tool_views = {}, {}
            view = self._tool_views.get(text)
            if view is None:
                view = self._tool_views[text] = RecordView(Conversation((), tools=batch[index].tools), self._form)
            answers = tuple(repr(ask(question, view.field)) for question in self._tool_questions)
            found = self._tool_answers[text] = self._signatures.setdefault(answers, len(self._signatures) + 1)
        return found

    def _codes(self, batch: Conversations) -> NDArray[np.uint8]:
        """A few bytes per message: what the template sees without asking, and its answers."""
        messages = batch.messages
        calls = messages.call_counts
        flags = messages.roles.astype(np.uint8)
        silent = (calls > 0) & (messages.contents.lengths == 0)
        for bit, column in enumerate(
            (
                messages.has_reasoning,
                messages.names.present,
                messages.tool_call_ids.present,
                silent,
                messages.weights == 0,
            ),
            start=3,
        ):
            flags |= column.astype(np.uint8) << np.uint8(bit)
        with_id = (
            np.add.reduceat(np.append(messages.call_ids.present, False), messages.call_offsets[:-1])
            if len(calls)
            else calls
        )
        with_id = np.where(calls > 0, with_id, 0)
        mixed = (with_id > 0) & (with_id < calls)
        columns = [flags, np.minimum(calls, 255).astype(np.uint8), ((with_id > 0) + 2 * mixed).astype(np.uint8)]
        columns += self._values(batch) if self._template.knows_by_value else self._rarities(batch, mixed)
        answers = [self._answers(batch, column) for column in self._columns]
        if answers:
            columns += list(np.packbits(np.stack(answers), axis=0))
        return np.stack(columns, axis=1)

    def _rarities(self, batch: Conversations, mixed: NDArray[np.bool_]) -> list[NDArray[np.uint8]]:
        """Four bytes for messages that the other bytes do not tell apart, and for those with fields of Harmony."""
        messages = batch.messages

        def value(place: int) -> Any:
            first, last = messages.call_offsets[place : place + 2].tolist()
            fields = (messages.recipients[place], messages.channels[place], messages.content_types[place])
            is_structured = bool(messages.structured.present[place])
            return (fields, is_structured, messages.call_ids.present[first:last].tobytes())

        rare = [messages.recipients, messages.channels, messages.content_types, messages.structured]
        return self._numbered(messages, rare, mixed | (messages.call_counts > 254), value)

    def _values(self, batch: Conversations) -> list[NDArray[np.uint8]]:
        """Four bytes that stand for the names, channels, calls and the like of a message."""
        messages = batch.messages
        rare = [messages.names, messages.tool_call_ids, messages.recipients, messages.channels]
        rare += [messages.content_types, messages.structured]

        def value(place: int) -> Any:
            first, last = messages.call_offsets[place : place + 2].tolist()
            calls = tuple((messages.call_names[i], messages.call_ids[i]) for i in range(first, last))
            return (*(column[place] for column in rare), calls)

        return self._numbered(messages, rare, messages.call_counts > 0, value)

    def _numbered(
        self,
        messages: MessageColumns,
        rare: Sequence[OptionalTexts],
        special: NDArray[np.bool_],
        value: Callable[[int], Any],
    ) -> list[NDArray[np.uint8]]:
        """Four bytes that stand for the value of a message: 0 where it has none of the rare texts and is not special.

        The value is made once for all messages with the same texts, and for every special one.
        """
        numbers = np.zeros(len(messages), dtype=np.uint32)
        present = np.stack([column.present for column in rare])
        places = np.flatnonzero(special | present.any(axis=0))
        if len(places):
            codes = np.zeros((len(places), len(rare) + 1), dtype=np.int32)
            for number in np.flatnonzero(present.any(axis=1)).tolist():
                there, column = np.flatnonzero(present[number, places]), rare[number]
                own = places[there]
                codes[there, number] = distinct(column.data, column.starts[own], column.lengths[own])[0] + 1
            alone = np.flatnonzero(special[places])
            codes[alone, -1] = np.arange(1, len(alone) + 1)
            width = codes.shape[1] * codes.itemsize
            starts = np.arange(0, codes.nbytes, width)
            which, firsts = distinct(codes.view(np.uint8).reshape(-1), starts, np.full(len(places), width))
            values = [value(place) for place in places[firsts].tolist()]
            known = [self._signatures.setdefault(one, len(self._signatures) + 1) for one in values]
            numbers[places] = np.array(known, dtype=np.uint32)[which]
        return list(numbers.view(np.uint8).reshape(-1, 4).T)

    @staticmethod
    def _answers(batch: Conversations, column: ColumnQuestion) -> NDArray[np.bool_]:
        """The answer of every message; False for those that do not have what is asked about."""
        what, origin, call, operations, argument = column
        places, texts = _texts_of(batch.messages, origin, call)
        answers = np.zeros(len(batch.messages), dtype=np.bool_)
        answers[places] = _answered(what, applied(texts, operations), argument)
        return answers

    # ---- texts without a column

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


def _texts_of(messages: MessageColumns, origin: Origin, call: int) -> tuple[NDArray[Any] | slice, Texts]:
    """The texts of a column, and which messages they belong to."""
    if origin in (Origin.CONTENT, Origin.REASONING):
        return slice(None), messages.contents if origin is Origin.CONTENT else messages.reasoning
    if origin in (Origin.NAME, Origin.TOOL_CALL_ID):
        column = messages.names if origin is Origin.NAME else messages.tool_call_ids
        places = np.flatnonzero(column.present)
        return places, Texts(column.data, column.starts[places], column.lengths[places])
    places = np.flatnonzero(messages.call_counts > call)
    at = messages.call_offsets[places] + call
    if origin is Origin.CALL_ID:
        has_id = messages.call_ids.present[at]
        places, at = places[has_id], at[has_id]
        return places, Texts(messages.call_ids.data, messages.call_ids.starts[at], messages.call_ids.lengths[at])
    return places, (messages.call_names if origin is Origin.CALL_NAME else messages.call_arguments).take(at)


def _answered(what: str, texts: Texts, argument: Any) -> NDArray[np.bool_]:
    """What every text answers to a question."""
    if what == "filled":
        return texts.lengths > 0
    if what == "contains":
        return contains(texts, argument[0].encode())
    if what == "equals":
        wanted = argument[0].encode()
        equal: NDArray[np.bool_] = begins(texts, wanted) & (texts.lengths == len(wanted))
        return equal
    name, (part,) = argument
    wanted = part.encode()
    if name == "startswith":
        return begins(texts, wanted)
    shifted = Texts(texts.data, texts.starts + texts.lengths - len(wanted), texts.lengths)
    ends: NDArray[np.bool_] = (texts.lengths >= len(wanted)) & begins(shifted, wanted)
    return ends


def contains(texts: Texts, part: bytes) -> NDArray[np.bool_]:
    """Which texts contain a part."""
    if not part:
        return np.ones(len(texts), dtype=np.bool_)
    found = positions_of(part, texts.data)
    first = np.searchsorted(found, texts.starts)
    after = np.searchsorted(found, texts.starts + texts.lengths - len(part), side="right")
    return after > first


def begins(texts: Texts, part: bytes) -> NDArray[np.bool_]:
    """Which texts begin with a part."""
    answer = texts.lengths >= len(part)
    for offset, byte in enumerate(part):
        going = np.flatnonzero(answer)
        if not len(going):
            break
        answer[going] = texts.data[texts.starts[going] + offset] == byte
    return answer


def _is_about_tools(question: Question) -> bool:
    path = question[1]
    if path and path[0] in ("field", "apply", "json", "text", "const"):
        path = root(path)
    return bool(path) and path[0] == "tools"


def _hidden(conversation: Conversation, shown: Collection[Path | None]) -> Iterator[HiddenField]:
    """Contents and reasoning that are not shown."""
    for k, message in enumerate(conversation.messages):
        if (k, "content") not in shown:
            yield HiddenField(Origin.CONTENT, k)
        if message.reasoning is not None and (k, "reasoning") not in shown:
            yield HiddenField(Origin.REASONING, k)
