"""A shape says what the fields of records are called; a record of a known shape becomes a conversation here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import NOTHING, Conversation, Message, Role
from chatmill.core.conversations import options_json
from chatmill.core.message_parser import (
    ROLE_ALIASES,
    check_json,
    checked_text,
    field_text,
    mistyped,
    parse_message,
    parse_messages,
    reasoning_of,
    refuse_media,
)
from chatmill.core.messages import MessageColumns
from chatmill.core.native.scan import ShapeNames
from chatmill.core.pictures import PICTURE_FIELDS
from chatmill.core.sides import Side
from chatmill.core.tools import listed_tools
from chatmill.errors import RecordError
from chatmill.json_values import TOO_DEEP, decoded_text
from chatmill.read.agents.branches import refusal
from chatmill.read.files import Raw, without_nulls
from chatmill.read.part_shapes import plain_messages, plain_tool
from chatmill.read.preferences import LABEL, after_system, label_of, labelled, margin_of
from chatmill.read.record_pictures import with_pictures

Record = Mapping[str, Any]
LABEL_FALSE = "label_false"
"""The reason code of a record whose answer people did not like (KTO)."""


Turn = tuple[Role, tuple[str, ...]]
"""A message that is in fields of its record: the role, and the fields whose texts are joined, with newlines."""


class RowRules(NamedTuple):
    """What rows must keep to be read from columns; the others are read one by one, which tells what is wrong."""

    names: Callable[[], ShapeNames]
    """What the scanner has to know of the messages."""
    keep: Callable[[MessageColumns, NDArray[np.int64]], NDArray[np.bool_]]
    """Which conversations keep the rules."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Shape:
    """One way to write a conversation as a record: what its fields are called.

    The slow reader and the compiled scanner both go by these names.
    """

    name: str
    lists: tuple[str, ...] = ()
    """Fields that may hold the list of messages; the first one that a record has something in counts."""
    role: str = "role"
    content: str = "content"
    roles: Mapping[str, Role] = field(default_factory=lambda: ROLE_ALIASES)
    """Spellings of roles."""
    calls_role: str = ""
    """Spelling of a role whose content is tool calls, as JSON."""
    system: tuple[str, ...] = ()
    """Fields of a system text, which goes before all messages; no message where they are missing or empty."""
    turns: tuple[Turn, ...] = ()
    """The messages of records without a list; each turn may be a list of messages too, if all turns are."""
    reasoning: tuple[str, ...] = ()
    """Fields that may hold the reasoning of the last answer, next to turns."""
    history: str = ""
    """Field with pairs of texts, a question and an answer each, that go before the turns."""
    nested: str = ""
    """Field with a text that holds an object with `messages`; it counts before the list."""
    typed_parts: bool = False
    """Whether calls, results and reasoning are parts of contents, as Anthropic writes them."""
    covers: str = ""
    """Another shape, all records of which this one reads as well."""
    id: str = "id"
    source: str = "source"
    tools: str = "tools"
    tools_in: str = ""
    """Field with an object that holds the tools; empty: the record itself does."""
    functions: str = "functions"
    """Field with tool definitions in the older form, without `type` and `function` around them."""
    reader: Callable[[Record], tuple[Message, ...]] | None = None
    """Reads the messages of records that have neither a list of them nor turns."""
    pair_reader: Callable[[Record], tuple[tuple[Message, ...], tuple[Message, ...]]] | None = None
    """Reads the two conversations of a pair, the chosen one first."""
    nulls_are_absent: bool = False
    """Whether a field of any object that is null is absent."""
    labelled: bool = False
    """Whether the field `label` of every record says if people liked its answer."""
    more_fields: tuple[str, ...] = ()
    """Fields that it reads."""
    options: str = "chat_template_kwargs"
    rules: RowRules | None = None
    """Of a dataset whose rows are held to more than the names of fields; no other column of theirs is read."""
    embedded: Callable[[Raw], Iterable[Raw]] = lambda raw: (raw,)
    """Takes apart a record that holds others: what is left of it, and those."""
    fits: Callable[[Record], bool] = lambda record: False
    """Whether a record looks like this shape (used for detection only)."""
    choose: Callable[[Record], Shape] | None = None
    """Finds the format of one record, where records of one file may have different ones; raises a `RecordError`."""
    hint: Callable[[Record, str], str] = lambda record, field: ""
    """Advice for a record that lacks a field of this format."""
    definition: str = ""
    """A field map as JSON, or the name with what is changed; empty for a shape that is built in."""

    @property
    def key(self) -> str:
        """What finds the same shape anywhere and later."""
        return self.definition or self.name

    @property
    def is_plain(self) -> bool:
        """Whether the names of fields say all: only then records with a list are read as columns."""
        return self.reader is None and self.pair_reader is None and not (self.labelled or self.nulls_are_absent)

    @cached_property
    def fields(self) -> frozenset[str]:
        """Fields it gives a meaning to; the others are kept as metadata."""
        common: tuple[str, ...] = (self.id, self.source, self.tools, self.functions, self.options, self.history)
        common += (self.nested, *self.reasoning, *self.more_fields, LABEL if self.labelled else "")
        return frozenset({*common, *self.lists, *self.system, *(key for _, keys in self.turns for key in keys)} - {""})

    def list_of(self, record: Record) -> str | None:
        """The field that the list of messages is read from: the first that holds something, else the first there is."""
        there = [key for key in (self.nested, *self.lists) if key and key in record]
        return next((key for key in there if record[key] is not None), there[0] if there else None)

    def messages(self, record: Record) -> tuple[Message, ...]:
        """Return the messages of a record, or a `RecordError`."""
        if self.reader is not None:
            return self.reader(record)
        key = self.list_of(record)
        if key and key == self.nested:
            return _nested(record, key)
        if not self.lists:
            return _with_reasoning((*_system(record, self), *_turns(record, self)), record, self.reasoning)
        if key is None:
            raise self._lacks(record, self.lists[0])
        return after_system(_system(record, self), self._listed(record[key], key))

    def refuse_missing(self, record: Record) -> None:
        """Raise a `RecordError` if the first field of a turn is missing."""
        for _, keys in self.turns:
            if keys[0] not in record:
                raise self._lacks(record, keys[0])

    def _lacks(self, record: Record, field: str) -> RecordError:
        """Make the error for a record without one of the fields of this format."""
        message = f"the record has no {field!r}; it has: {_keys(record)}{self.hint(record, field)}"
        return RecordError(message, code="missing_field", path=field)

    def _listed(self, items: Any, key: str) -> tuple[Message, ...]:
        """Return the messages of a list, or of a text of JSON with one, as in a column of a CSV file."""
        if isinstance(items, str) and items.lstrip().startswith("["):
            items = _decoded(items, key, "a text with a list of messages: ")
        names: dict[str, Any] = {"role_key": self.role, "content_key": self.content, "aliases": self.roles}
        if self.calls_role and isinstance(items, list):
            items = [_with_calls(item, f"{key}[{i}]", self) for i, item in enumerate(items)]
        if not (self.typed_parts and isinstance(items, list) and items):
            return parse_messages(items, path=key, **names)
        places = [f"{key}[{i}]" for i in range(len(items))]
        return tuple(
            parse_message(plain, place, **names)
            for item, place in zip(items, places, strict=True)
            for plain in plain_messages(item, place)
        )


def conversation_of(record: object, shape: Shape, *, where: str = "", source: str = "") -> Conversation:
    """Return one conversation from one decoded record; a `RecordError` knows the place, the record id and the field."""
    record_id = ""
    try:
        if not isinstance(record, Mapping):
            raise mistyped("a record must be an object", record, code="record_type", path="")
        record = without_nulls(record) if shape.nulls_are_absent else record
        if shape.choose is not None:
            shape = shape.choose(record)
        record_id = _label(record, shape.id, code="id_type")
        if (refused := refusal(record)) is not None:
            raise refused
        _refuse_unfit(record, shape)
        margin = None if shape.pair_reader is None else margin_of(record)
        messages, rejected, side = _sides(record, shape)
        messages = _pictured(messages, record, shape)
        rejected = _pictured(rejected, record, shape) if rejected else ()
        return Conversation(
            messages,
            record_id,
            _label(record, shape.source, code="field_type") or source,
            _all_tools(record, shape),
            where,
            _unused(record, shape),
            _options(record, shape.options),
            side,
            rejected,
            margin,
        )
    except RecordError as error:
        error.where, error.record_id = where, record_id
        raise
    except RecursionError:
        raise RecordError(TOO_DEEP, code="invalid_json", where=where, record_id=record_id) from None


def _sides(record: Record, shape: Shape) -> tuple[tuple[Message, ...], tuple[Message, ...], Side]:
    """Return the messages of a record, those of the rejected answer of a pair, and its side."""
    if shape.pair_reader is not None:
        return *shape.pair_reader(record), Side.CHOSEN
    messages = shape.messages(record)
    if not shape.labelled:
        return messages, (), Side.NONE
    messages, side = labelled(record, messages)
    return messages, (), side


def conversation_or_error(raw: Raw, shape: Shape, source: str) -> Conversation | RecordError:
    """Return the conversation of a record as it was read, or what is wrong with it."""
    if raw.error is not None:
        return raw.error
    try:
        return conversation_of(raw.value, shape, where=raw.where, source=source)
    except RecordError as error:
        return error


def _label(record: Record, key: str, *, code: str) -> str:
    """Return what names a record: a string, or an integer as text; "" if there is none."""
    value = record.get(key)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RecordError(f"{key!r} must be a string or an integer, found {str(value)[:60]}", code=code, path=key)
    return checked_text(str(value), key)


def _unused(record: Record, shape: Shape) -> dict[str, Any]:
    """Fields that mean nothing, and lists of messages besides the one that is read."""
    read = shape.list_of(record) if shape.reader is None else None
    others = () if read is None else tuple(key for key in (shape.nested, *shape.lists) if key != read)
    is_liked = label_of(record) is True  # which says no more than that the answer is a good one
    return {
        key: value
        for key, value in record.items()
        if key in others or not (key in shape.fields or key in PICTURE_FIELDS or (is_liked and key == LABEL))
    }


def _refuse_unfit(record: Record, shape: Shape) -> None:
    """`RecordError` for what must not be trained as it is: sound, video, and answers that people did not like."""
    named = shape.fields  # what a shape gives a meaning to has no other one
    refuse_media({key: record[key] for key in ("videos", "audios") if key in record and key not in named})
    if label_of(record) is False and LABEL not in named:
        raise RecordError(
            "'label' is false: people did not like this answer (KTO), and training on it would teach it. Leave such "
            "records out with preferences: chosen (--set preferences=chosen), or keep labels with preferences: pairs",
            code="label_false",
            path=LABEL,
        )


def _pictured(messages: tuple[Message, ...], record: Record, shape: Shape) -> tuple[Message, ...]:
    """Return the messages with the pictures of the record's own field in their places."""
    pictures = {key: record[key] for key in PICTURE_FIELDS if record.get(key) and key not in shape.fields}
    return with_pictures(messages, pictures) if pictures or any(message.parts for message in messages) else messages


def _system(record: Record, shape: Shape) -> tuple[Message, ...]:
    if not shape.system:
        return ()
    key = shape.system[0]
    if shape.typed_parts and isinstance(record.get(key), list):
        return parse_messages([{"role": "system", "content": record[key]}], path=key)
    text = _joined_text(record, shape.system, default="")
    return (Message(Role.SYSTEM, text),) if text else ()


def _all_tools(record: Record, shape: Shape) -> tuple[Any, ...]:
    """Tool definitions; those of the older field are put into the form of `tools`."""
    holder = record.get(shape.tools_in) if shape.tools_in else record
    tools = _tools(holder if isinstance(holder, Mapping) else {}, shape.tools)
    functions = _tools(record, shape.functions) if shape.functions != shape.tools else ()
    if tools and functions:
        raise RecordError(
            f"{shape.tools!r} and {shape.functions!r} are both given; keep one", code="bad_tools", path=shape.functions
        )
    if functions:
        return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in functions)
    return tuple(map(plain_tool, tools)) if shape.typed_parts else tools


def _tools(record: Record, key: str) -> tuple[Any, ...]:
    """Return the tool definitions in a field, a list or its JSON."""
    tools = record.get(key)
    if not tools:
        return ()
    if isinstance(tools, str):
        tools = _decoded(tools, key, "a text with tool definitions: ", "bad_tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RecordError(f"{key!r} must be a list of objects", code="bad_tools", path=key)
    check_json(tools, path=key, code="bad_tools")
    return tuple(tools)


def tools_text(value: Any) -> str | None:
    """Tool definitions, a list or its JSON, as `listed_tools`; None where the full reader must see the record."""
    try:
        return listed_tools(_tools({"tools": value}, "tools"))
    except (RecordError, RecursionError):
        return None


def _options(record: Record, key: str) -> Mapping[str, Any]:
    options = record.get(key)
    if options is None:
        return NOTHING
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        rule = f"{key!r} must be an object with the options of the chat template"
        raise mistyped(rule, options, code="bad_options", path=key)
    check_json(options, path=key, code="bad_options")
    return options


def options_text(value: Any) -> str | None:
    """Template options as JSON, empty for none; None where the full reader must see the record."""
    try:
        options = _options({"options": value}, "options")
    except (RecordError, RecursionError):
        return None
    return options_json(options) if options else ""


def _nested(record: Record, key: str) -> tuple[Message, ...]:
    inner = _decoded(field_text(record, key), key)
    if not isinstance(inner, dict) or "messages" not in inner:
        raise RecordError("must hold an object with 'messages'", code="missing_field", path=key)
    return parse_messages(inner["messages"], path=f"{key}.messages")


def _decoded(text: str, path: str, what: str = "", code: str = "invalid_json") -> Any:
    """Return the value of a text of JSON in a field; `code` is the reason where it is no JSON."""
    checked_text(text, path)
    try:
        return decoded_text(text)
    except RecordError as error:
        reason = code if error.code == "invalid_json" else error.code
        raise RecordError(f"{what}{error.message}", code=reason, path=path) from None


def _with_calls(item: object, path: str, shape: Shape) -> object:
    """Turn calls that are held as JSON text into an assistant message with tool calls."""
    if not isinstance(item, dict) or str(item.get(shape.role)).strip().lower() != shape.calls_role:
        return item
    text, place = item.get(shape.content), f"{path}.{shape.content}"
    what = f"a {shape.calls_role} turn must hold the call as JSON"
    if not isinstance(text, str):
        raise mistyped(what, text, code="bad_tool_call", path=place)
    calls = _decoded(text, place, f"{what}: ", "bad_tool_call")
    rest = {key: value for key, value in item.items() if key != shape.content}
    return {**rest, shape.content: "", "tool_calls": calls if isinstance(calls, list) else [calls]}


def _turns(record: Record, shape: Shape) -> Iterator[Message]:
    """Yield the messages that are fields of their own."""
    shape.refuse_missing(record)
    if all(isinstance(record.get(keys[0]), list) for _, keys in shape.turns):
        for _, (key, *_) in shape.turns:
            yield from parse_messages(record[key], path=key, aliases=shape.roles)
        return
    if shape.history:
        yield from _history(record, shape.history)
    for role, keys in shape.turns:
        yield Message(role, _joined_text(record, keys))


def _joined_text(record: Record, keys: Sequence[str], default: str | None = None) -> str:
    """The texts of fields, those after the first unless they are missing or empty, with newlines between them."""
    more = [text for key in keys[1:] if (text := field_text(record, key, default=""))]
    return "\n".join([field_text(record, keys[0], default), *more])


def _with_reasoning(messages: tuple[Message, ...], record: Record, fields: tuple[str, ...]) -> tuple[Message, ...]:
    """Return the messages of a record that has the reasoning of its last answer in a field of its own."""
    reasoning = reasoning_of(record, "", fields)
    if not reasoning:
        return messages
    last = max((k for k, message in enumerate(messages) if message.role is Role.ASSISTANT), default=None)
    if last is None or messages[last].reasoning not in (None, "", reasoning):
        raise RecordError(
            "has the reasoning of an answer, and there is none or it has a reasoning of its own; keep one",
            code="reasoning_twice",
            path=next(name for name in fields if record.get(name)),
        )
    return (*messages[:last], messages[last]._replace(reasoning=reasoning), *messages[last + 1 :])


def _history(record: Record, key: str) -> Iterator[Message]:
    history = record.get(key) or []
    if not isinstance(history, list):
        raise RecordError(f"{key!r} must be a list of pairs of texts", code="bad_history", path=key)
    for i, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise RecordError("each entry must be a pair of texts", code="bad_history", path=f"{key}[{i}]")
        yield Message(Role.USER, checked_text(pair[0], f"{key}[{i}][0]"))
        yield Message(Role.ASSISTANT, checked_text(pair[1], f"{key}[{i}][1]"))


def _keys(record: Record) -> str:
    return ", ".join(map(str, list(record)[:12])) or "nothing"
