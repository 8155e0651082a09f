"""The key of a record: what a template sees of it without asking, and its replies to what is asked, in a few bytes.

What a template may ask about texts is known after a few records (`'</think>' in content`). Those questions are answered
for all messages of a batch at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Conversation
from chatmill.core.conversations import Conversations
from chatmill.core.messages import MessageColumns
from chatmill.core.native.document_layout import COLUMNS, Origin
from chatmill.core.native.text_ranges import distinct, positions_of
from chatmill.core.pictures import Picture
from chatmill.core.texts import OptionalTexts, Texts
from chatmill.core.tools import tools_of
from chatmill.render.fill import applied
from chatmill.render.jinja.expressions import Question, ask, kind_of_value
from chatmill.render.jinja.questions import paths_of
from chatmill.render.jinja.record_view import Arguments, InputForm, RecordView
from chatmill.render.jinja.replay import Classes
from chatmill.render.text_columns import Operations, column_of

MAX_COLUMNS = 48
MAX_TOOL_QUESTIONS = 64
"""A template that asks more about tools is taken to depend on all of their text."""
BYTES_OF_ONE = 32
"""Tools take much room: so many bytes of their text count like a class of messages."""

ColumnQuestion = tuple[str, Origin, int, Any, Any]
"""What is asked, of which column and which call of a message, after which operations, with which argument."""
Ints = NDArray[np.int64]
_SPACE_HEADS = sorted({chr(point).encode()[0] for point in range(0x3001) if chr(point).isspace()})
"""The first bytes of white space."""
Key = bytes | tuple[bytes, str | int, bytes]
"""A few bytes per message; with tools or options, these too."""


class BatchKeys(NamedTuple):
    """The keys of some conversations."""

    which: Ints
    """For each of them the number of its key."""
    different: list[Key]
    codes: NDArray[np.uint8]
    """For each message its bytes."""


class RecordKeys:
    """Makes keys, and knows what they are made of."""

    def __init__(self, form: InputForm) -> None:
        """Nothing is asked yet."""
        self._form, self._tools_by_value = form, False
        self._arguments_are_text = form.arguments is Arguments.STRING
        self._knows_arguments = False
        """Whether keys tell apart arguments of calls by the types of their values, and not only if they are objects."""
        self._columns: list[ColumnQuestion] = []
        self._tool_questions: dict[Question, None] = {}
        self._tool_replies: dict[bytes, int] = {}
        self._tool_views: dict[bytes, RecordView] = {}
        self._tool_size = 0
        self._signatures: dict[Any, int] = {}
        self._classes: dict[bytes, int] = {}
        self._classes_of = 0
        self.version = 0
        """Changes whenever keys are made of something else."""

    @property
    def size(self) -> int:
        """How much is known of messages and tools."""
        return len(self._classes) + len(self._signatures) + self._tool_size

    def learn(self, questions: Sequence[Question]) -> bool:
        """Return whether all questions of a plan are answered by its key; those that could be will be from now on."""
        complete = True
        for question in questions:
            if _is_about_tools(question):
                if not self._tools_by_value and question not in self._tool_questions:
                    self._ask_of_tools(question)
                continue
            if not self._arguments_are_text and _is_about_arguments(question):
                self.version += not self._knows_arguments
                self._knows_arguments = True
                continue
            column = self._column_of(question)
            if column is None or (column not in self._columns and len(self._columns) >= MAX_COLUMNS):
                complete = False
            elif column not in self._columns:
                self._columns.append(column)
                self.version += 1
        return complete

    def _ask_of_tools(self, question: Question) -> None:
        """Answer one more question about tools in every key."""
        self._tool_questions[question] = None
        self._tool_replies = {}
        self.version += 1
        if len(self._tool_questions) > MAX_TOOL_QUESTIONS:
            self._tools_by_value, self._tool_questions = True, {}

    def _column_of(self, question: Question) -> ColumnQuestion | None:
        """Return a question that can be answered for all messages at once."""
        kind = question[0]
        if kind not in ("filled", "contains", "equals", "method"):
            return None
        place = column_of(question[1], self._arguments_are_text)
        if place is None or place.origin is Origin.TOOL:
            return None
        if any(name not in ("strip", "lstrip", "rstrip") for name, _ in place.operations):
            return None
        argument = question[2:]
        if kind == "method" and (argument[0] not in ("startswith", "endswith") or len(argument[1]) != 1):
            return None
        if kind == "method" and not isinstance(argument[1][0], str):
            return None
        return (kind, place.origin, place.call, place.operations, argument)

    def of(self, batch: Conversations) -> BatchKeys:
        """Return the keys of some conversations."""
        codes = self._codes(batch)
        flat, starts = codes.reshape(-1), codes.shape[1] * batch.offsets
        which, firsts = distinct(flat, starts[:-1], np.diff(starts))

        def own(index: int) -> bytes:
            return flat[starts[index] : starts[index + 1]].tobytes()

        keys: list[Key] = [own(index) for index in firsts.tolist()]
        rich = np.flatnonzero((batch.tools.lengths > 0) | (batch.options.lengths > 0))
        if len(rich):
            self._add_rich(batch, rich, which, keys)
        return BatchKeys(which, keys, codes)

    def classes(self, codes: NDArray[np.uint8]) -> NDArray[np.int32]:
        """For each message the number of its class; messages of one class have the same bytes (`BatchKeys.codes`)."""
        width = codes.shape[1]
        starts = np.arange(0, codes.size, width, dtype=np.int64)
        which, firsts = distinct(codes.reshape(-1), starts, np.full(len(codes), width, dtype=np.int64))
        if self._classes_of != self.version:
            self._classes, self._classes_of = {}, self.version
        numbers = [self._classes.setdefault(codes[place].tobytes(), len(self._classes)) for place in firsts.tolist()]
        return np.array(numbers, dtype=np.int32)[which]

    def classes_of(self, view: RecordView) -> Classes | None:
        """Return the classes of a conversation's messages, as keys are made now; None where they do not say it all."""
        if view.has_structured:
            return None
        if view.classes is None or view.classes.version != self.version:
            view.classes = Classes(self.classes(self._codes(Conversations.of([view.conversation]))), self.version)
        classes: Classes = view.classes
        return classes

    def _add_rich(self, batch: Conversations, rich: Ints, which: Ints, keys: list[Key]) -> None:
        """The keys of conversations with tools or options: what they have is looked at once for all that share it."""
        listed, options_given = batch.tools.take(rich), batch.options.take(rich)
        tools_of, tool_firsts = distinct(listed.data, listed.starts, listed.lengths)
        options_of, option_firsts = distinct(options_given.data, options_given.starts, options_given.lengths)
        shown = [
            self._tools_key(text, batch, index) if text else ""
            for text, index in zip(listed.raw(tool_firsts), rich[tool_firsts].tolist(), strict=True)
        ]
        chosen = options_given.raw(option_firsts)
        joint = np.stack([which[rich], tools_of, options_of], axis=1)
        width = joint.strides[0]
        starts = np.arange(0, joint.nbytes, width)
        number, firsts = distinct(joint.reshape(-1).view(np.uint8), starts, np.full(len(rich), width))
        which[rich] = len(keys) + number
        keys += [(keys[key], shown[tools], chosen[options]) for key, tools, options in joint[firsts].tolist()]

    def record_key(self, view: RecordView) -> tuple[int | str, bytes]:
        """Return what stands for the tools and options of a record in its key."""
        batch, index, _ = view.columns()
        place = np.array([index], dtype=np.int64)
        (tools,), (options,) = batch.tools.raw(place), batch.options.raw(place)
        return (self._tools_key(tools, batch, index) if tools else ""), options

    def _tools_key(self, text: bytes, batch: Conversations, index: int) -> int | str:
        if self._tools_by_value:
            return blake2b(text, digest_size=16).hexdigest()
        key = self._tool_replies.get(text)
        if key is None:
            view = self._tool_views.get(text)
            if view is None:
                self._tool_size += 1 + len(text) // BYTES_OF_ONE
                view = self._tool_views[text] = RecordView(
                    Conversation((), tools=tools_of(batch.tools[index])), self._form
                )
            replies = tuple(repr(ask(question, view.field)) for question in self._tool_questions)
            key = self._tool_replies[text] = self._signature(replies)
        return key

    def _codes(self, batch: Conversations) -> NDArray[np.uint8]:
        """Return a few bytes per message: what the template sees without asking, and its replies."""
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
        orders = np.zeros(len(calls), dtype=np.uint8)
        if messages.call_orders.any():
            padded = np.append(messages.call_orders, np.uint8(0))
            lowest, highest = (f.reduceat(padded, messages.call_offsets[:-1]) for f in (np.minimum, np.maximum))
            orders = np.where(calls > 0, lowest, 0).astype(np.uint8)
            mixed |= (calls > 0) & (lowest != highest)
        columns = [flags, np.minimum(calls, 255).astype(np.uint8), ((with_id > 0) + 2 * mixed).astype(np.uint8), orders]
        columns += self._rarities(messages, mixed)
        replies = list(self._replies(batch))
        if replies:
            columns += list(np.packbits(np.stack(replies), axis=0))
        return np.stack(columns, axis=1)

    def _rarities(self, messages: MessageColumns, mixed: NDArray[np.bool_]) -> list[NDArray[np.uint8]]:
        """Which fields of Harmony a message has, and four bytes where the other bytes do not tell messages apart."""
        fields = np.zeros(len(messages), dtype=np.uint8)
        for bit, column in enumerate((messages.recipients, messages.channels, messages.content_types)):
            fields |= column.present.astype(np.uint8) << np.uint8(bit)
        more = np.zeros(len(messages), dtype=np.bool_)
        if self._form.more_fields and len(messages) and messages.extra.strides[0]:  # else all are the one empty mapping
            more = np.array([not self._form.more_fields.isdisjoint(one) for one in messages.extra.tolist()])

        def value(place: int) -> Any:
            first, last = messages.call_offsets[place : place + 2].tolist()
            extra = messages.extra[place]
            fields = tuple((name, kind_of_value(extra[name])) for name in extra if name in self._form.more_fields)
            ids, orders = messages.call_ids.present[first:last], messages.call_orders[first:last]
            shown = tuple(isinstance(part, Picture) for part in messages.parts[place])
            seen = (messages.structured[place], fields, ids.tobytes(), orders.tobytes(), shown)
            return seen if self._arguments_are_text else (*seen, tuple(shapes[first:last]))

        shapes: list[Any] = []
        special = mixed | more | (messages.call_counts > (0 if self._knows_arguments else 254))
        if not self._arguments_are_text and len(messages.call_names):
            shapes = list(map(_shape, messages.call_arguments))
            if not self._knows_arguments:
                shapes = [shape is not None for shape in shapes]
                is_wrong = np.append(np.logical_not(shapes), False)
                is_wrong = np.logical_or.reduceat(is_wrong, messages.call_offsets[:-1])
                special |= is_wrong & (messages.call_counts > 0)
        special[messages.pictured] = True
        numbers = np.zeros(len(messages), dtype=np.uint32)
        alone = np.flatnonzero(special)
        numbers[alone] = [self._signature(value(place)) for place in alone.tolist()]
        structured = messages.structured
        places = np.flatnonzero(structured.present & ~special)
        if len(places):  # made once for all messages with the same text
            which, firsts = distinct(structured.data, structured.starts[places], structured.lengths[places])
            signatures = [self._signature(value(place)) for place in places[firsts].tolist()]
            numbers[places] = np.array(signatures, dtype=np.uint32)[which]
        return [fields, *numbers.view(np.uint8).reshape(-1, 4).T]

    def _signature(self, value: Any) -> int:
        """Return a number that stands for a value; 0 for none."""
        return self._signatures.setdefault(value, len(self._signatures) + 1)

    def _replies(self, batch: Conversations) -> Iterator[NDArray[np.bool_]]:
        """Yield the replies of every message to each question; False for those that do not have what is asked about."""
        texts_of: dict[Any, tuple[NDArray[Any] | slice, Texts]] = {}
        for kind, origin, call, operations, argument in self._columns:
            applied_first = () if kind == "filled" else operations
            texts_asked = (origin, call, applied_first)
            if texts_asked not in texts_of:
                places, texts = _texts_of(batch.messages, origin, call)
                texts_of[texts_asked] = places, applied(texts, applied_first)
            places, texts = texts_of[texts_asked]
            replies = np.zeros(len(batch.messages), dtype=np.bool_)
            replies[places] = _filled(texts, operations) if kind == "filled" else _answered(kind, texts, argument)
            yield replies


def _filled(texts: Texts, operations: Operations) -> NDArray[np.bool_]:
    """Which texts have something left after they were stripped; those that begin with what stays need no look."""
    filled = texts.lengths > 0
    goes = np.zeros(256, dtype=np.bool_)
    for _, (characters,) in operations:
        if characters is None:
            goes[_SPACE_HEADS] = True
        else:
            goes[[character.encode()[0] for character in characters]] = True
    places = np.flatnonzero(filled)
    doubtful = places[goes[texts.data[texts.starts[places]]]]
    filled[doubtful] = applied(texts.take(doubtful), operations).lengths > 0
    return filled


def _texts_of(messages: MessageColumns, origin: Origin, call: int) -> tuple[NDArray[Any] | slice, Texts]:
    """Return the texts of a column, and which messages they belong to."""
    column: Texts | OptionalTexts = getattr(messages, COLUMNS[origin])
    places: NDArray[Any] | slice = slice(None)
    if origin >= Origin.CALL_NAME:
        places = np.flatnonzero(messages.call_counts > call)
        column = column.take(messages.call_offsets[places] + call)
    if isinstance(column, Texts):
        return places, column
    there = np.flatnonzero(column.present)
    return there if isinstance(places, slice) else places[there], column.take(there).texts


def _answered(kind: str, texts: Texts, argument: Any) -> NDArray[np.bool_]:
    """Return the reply of every text to a question."""
    if kind == "contains":
        return contains(texts, argument[0].encode())
    if kind == "equals":
        wanted = argument[0].encode()
        equal: NDArray[np.bool_] = begins(texts, wanted) & (texts.lengths == len(wanted))
        return equal
    name, (part,) = argument
    wanted = part.encode()
    if name == "startswith":
        return begins(texts, wanted)
    long = np.flatnonzero(texts.lengths >= len(wanted))
    tails = Texts(texts.data, (texts.starts + texts.lengths)[long] - len(wanted), np.full(len(long), len(wanted)))
    ends = np.zeros(len(texts), dtype=np.bool_)
    ends[long] = begins(tails, wanted)
    return ends


def contains(texts: Texts, part: bytes) -> NDArray[np.bool_]:
    """Return which texts contain a part."""
    if not part:
        return np.ones(len(texts), dtype=np.bool_)
    if any(part.endswith(part[:size]) for size in range(1, len(part))):
        # One that lies across two texts may hide one in the second: those that overlap it are not looked for.
        return np.array([part in text for text in texts.raw(np.arange(len(texts)))], dtype=np.bool_)
    positions = positions_of(part, texts.data)
    first = np.searchsorted(positions, texts.starts)
    after = np.searchsorted(positions, texts.starts + texts.lengths - len(part), side="right")
    return after > first


def begins(texts: Texts, part: bytes) -> NDArray[np.bool_]:
    """Return which texts begin with a part."""
    does_begin = texts.lengths >= len(part)
    for offset, byte in enumerate(part):
        going = np.flatnonzero(does_begin)
        if not len(going):
            break
        does_begin[going] = texts.data[texts.starts[going] + offset] == byte
    return does_begin


def _shape(arguments: str) -> Any:
    """Return what `_is_about_arguments` asks of the arguments of a call."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    return tuple((bool(key), kind_of_value(value), value != "") for key, value in found.items())


def _is_about_arguments(question: Question) -> bool:
    """Whether a question about the arguments of a call is how many there are, of which types, or whether empty."""
    what, subject = question[:2]
    path = subject
    if what == "filled" and subject[0] in ("field", "json", "text"):
        path = subject[-1]
    elif what not in ("size", "type", "has_arguments"):
        return False
    if path[1:2] != ("call",) or path[3] != "arguments":
        return False
    is_one = len(path) == 5 and isinstance(path[4], tuple)
    return is_one if what == "filled" else len(path) == 4 or (is_one and what == "type")


def _is_about_tools(question: Question) -> bool:
    """Return whether a question is about tools alone; of two texts that are compared only one may be a tool's."""
    return question[0] != "equal" and all(isinstance(path[0], str) for path in paths_of(question))
