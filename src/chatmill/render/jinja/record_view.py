"""One conversation as a chat template sees it: plain values, traced values, and its fields by path.

The paths of a conversation's texts, used by expressions:

    (k, "content"), (k, "reasoning"), (k, "name"), (k, "tool_call_id")      message k
    (k, "channel"), (k, "recipient"), (k, "content_type")                   its fields of Harmony
    (k, "call", j, "name"), (k, "call", j, "id")                            call j of message k
    (k, "call", j, "arguments", ...)                                        its arguments, and what is inside them
    (k, "parts", j)                                                         text part j of message k
    (k, "extra", name, ...)                                                 a field that means nothing here
    ("tools", ...)                                                          tool definitions
    ("options", ...)                                                        its `chat_template_kwargs`
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Conversation, Message, call_keys
from chatmill.core.conversations import Conversations
from chatmill.core.kinds import RoleCode
from chatmill.core.message_parser import check_json
from chatmill.core.pictures import Picture
from chatmill.core.tools import tools_of
from chatmill.errors import RecordError
from chatmill.json_values import decoded_text
from chatmill.render.jinja.expressions import KEY, Notes, Path, kind_of_value
from chatmill.render.jinja.message_fields import MessageFields
from chatmill.render.jinja.traced import field, made_of
from chatmill.render.jinja.traced_values import wrapped
from chatmill.render.official_harmony import content_text, has_function_tools


class Arguments(StrEnum):
    """How the arguments of a tool call are given to a template."""

    STRING = "string"
    """The text as the record has it."""
    OBJECT = "object"
    """Decoded JSON."""


class Content(StrEnum):
    """How the content of a message is given to a template."""

    TEXT = "text"
    PARTS = "parts"
    """A list with one part: `[{"type": "text", "text": ...}]`."""


class InputForm(NamedTuple):
    """How a template wants its input if there is more than one way; found out by probing it."""

    arguments: Arguments = Arguments.STRING
    content: Content = Content.TEXT
    empty_content: str | None = None
    """The content of a message that has tool calls and nothing else."""
    reasoning_names: tuple[str, ...] = ("reasoning_content", "thinking")
    more_fields: frozenset[str] = frozenset()
    """Names that the template reads and Chatmill gives no meaning to: fields of messages with such a name are given."""


_ROLE_CODES = tuple(RoleCode)
_OPTIONAL = ("name", "tool_call_id", "channel", "recipient", "content_type")
"""Texts that a message may not have, under the names that templates read."""


class RecordView:
    """A conversation for one template: what its tracing and its columns both start from."""

    def __init__(self, conversation: Conversation | tuple[Conversations, int], form: InputForm) -> None:
        """Take a conversation, or its place in a batch; nothing is decoded until it is asked for."""
        if isinstance(conversation, Conversation):
            self.conversation = conversation
        else:
            self._place = conversation
        self.form, self.identity = form, object()
        self._decoded: dict[tuple[int, int], Any] = {}
        self._plain: list[dict[str, Any]] = []
        """Messages without tracing; no template can change what it is given."""
        self.is_keyed = True
        """Whether all that was asked of its texts so far is part of every record's key."""
        self.classes: Any = None
        """The classes of its messages, where they are known (`RecordKeys`)."""
        self.probes: Probes | None = None
        self.probe_of: tuple[RecordView, int] | None = None
        """Where the last message is a probe, the view that has it, and its index among that view's probes."""
        """Messages that answers are tried with, where a template writes stops as part of the next message."""

    @cached_property
    def conversation(self) -> Conversation:
        """The conversation as an object, which takes longer to make than most records need to be written."""
        batch, index = self._place
        return batch[index]

    @cached_property
    def _place(self) -> tuple[Conversations, int]:
        return Conversations.of([self.conversation]), 0

    def columns(self) -> tuple[Conversations, int, slice]:
        """Return the batch that holds the record, its place there, and those of its messages."""
        batch, index = self._place
        return batch, index, slice(*batch.offsets[index : index + 2].tolist())

    @cached_property
    def role_codes(self) -> NDArray[np.uint8]:
        """Of the messages."""
        batch, _, places = self.columns()
        return np.ascontiguousarray(batch.messages.roles[places])

    @cached_property
    def roles(self) -> list[RoleCode]:
        """The same as a list."""
        return [_ROLE_CODES[code] for code in self.role_codes.tolist()]

    @cached_property
    def trained(self) -> list[int]:
        """The answers, but those that the record wants untrained."""
        batch, _, places = self.columns()
        is_trained = (self.role_codes == RoleCode.ASSISTANT) & (batch.messages.weights[places] != 0)
        return np.flatnonzero(is_trained).tolist()

    @cached_property
    def is_plain(self) -> bool:
        """Whether no message has a channel or a recipient."""
        batch, _, places = self.columns()
        return not (batch.messages.channels.any_in(places) or batch.messages.recipients.any_in(places))

    @property
    def has_structured(self) -> bool:
        """Whether a message has a content of Harmony's own, whose text depends on the other messages."""
        batch, _, places = self.columns()
        return batch.messages.structured.any_in(places)

    @property
    def has_pictures(self) -> bool:
        """Whether a message has pictures."""
        batch, _, places = self.columns()
        parts = batch.messages.parts
        return bool(parts.strides[0]) and any(parts[places].tolist())

    @property
    def is_of_harmony(self) -> bool:
        """Whether a message has something that only the Harmony format has."""
        batch, _, places = self.columns()
        return not self.is_plain or self.has_structured or batch.messages.content_types.any_in(places)

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the template that the record chooses."""
        batch, index, _ = self.columns()
        return self.conversation.options if batch.options.lengths[index] else {}

    @property
    def given(self) -> Any:
        """What tells its tools and options from those of other records."""
        batch, index, _ = self.columns()
        return batch.tools[index], batch.options[index]

    def again(self) -> RecordView:
        """Return the same conversation, of which nothing is asked yet."""
        view = copy(self)
        view.is_keyed, view.probes = True, None
        return view

    def probe(self, messages: Sequence[Message]) -> None:
        """Have messages that may follow an answer; their numbers are counted on after those of the conversation."""
        view = self.again()
        view.conversation = self.conversation._replace(messages=(*self.conversation.messages, *messages))
        view.classes, view._plain = None, []
        view.__dict__.pop("_shapes", None)
        self.probes = Probes(view, RecordView(Conversation(tuple(messages)), self.form))

    def probed(self, count: int, probe: int) -> RecordView:
        """Return the first messages, the last of which is a probe."""
        messages = self.conversation.messages if self.probes is None else self.probes.view.conversation.messages
        shown = (*messages[: count - 1], messages[probe])
        view = RecordView(Conversation(shown, tools=self.conversation.tools), self.form)
        view.probe_of = None if self.probes is None else (self, probe - len(self.conversation.messages))
        return view

    @property
    def has_tools(self) -> bool:
        """Whether the record has tool definitions."""
        batch, index, _ = self.columns()
        return bool(batch.tools.lengths[index])

    @cached_property
    def tools(self) -> tuple[Any, ...]:
        """The tool definitions."""
        if "conversation" in self.__dict__:
            return self.conversation.tools
        batch, index, _ = self.columns()
        return tools_of(batch.tools[index])

    @property
    def named(self) -> str:
        """What tells the record from others: its id, or where it is."""
        batch, index, _ = self.columns()
        return batch.ids[index] or batch.wheres[index]

    def check_arguments(self) -> None:
        """Raise a `RecordError` for arguments that the template cannot be given."""
        batch, _, places = self.columns()
        if self.form.arguments is Arguments.OBJECT and batch.messages.call_counts[places].any():
            for k, message in enumerate(self.conversation.messages):
                for j in range(len(message.tool_calls)):
                    self._arguments(k, j)

    def values(self, count: int, notes: Notes | None) -> tuple[list[dict[str, Any]], Any]:
        """Return the first messages and the tools; traced if there are notes to be taken."""
        if notes is None:
            done = len(self._plain)
            self._plain += [self.message(k, None) for k in range(done, count)]
            messages: list[dict[str, Any]] = self._plain[:count]
        else:
            messages = [MessageFields(self.message(k, notes)) for k in range(count)]
        tools: Any = list(self.conversation.tools) or None
        if tools is not None and notes is not None:
            tools = wrapped(tools, ("tools",), notes)
        return messages, tools

    def plain_message(self, index: int) -> dict[str, Any]:
        """Return one message with plain values."""
        return self.values(index + 1, None)[0][index]

    def shape_numbers(self, numbers: dict[Any, int]) -> list[int]:
        """Return the shape of every message as a number."""
        return [numbers.setdefault(shape, len(numbers)) for shape in self._shapes]

    @cached_property
    def _shapes(self) -> list[tuple[Any, ...]]:
        return list(map(self._shape, self.conversation.messages))

    def _shape(self, message: Message) -> tuple[Any, ...]:
        return (
            message.role.value,
            message.reasoning is not None,
            tuple(getattr(message, name) is not None for name in _OPTIONAL),
            tuple((call.id is not None, call.order) for call in message.tool_calls),
            bool(message.tool_calls) and not message.content,
            tuple(isinstance(part, Picture) for part in message.parts),
            None if message.structured is None else self._structured(message),
            tuple((name, kind_of_value(message.extra[name])) for name in more_fields(message, self.form)),
        )

    def message(self, k: int, notes: Notes | None, address: Any = None) -> dict[str, Any]:
        """Return one message; traced if there are notes to be taken, with paths that begin with an address."""
        message, at = self.conversation.messages[k], k if address is None else address
        fields: dict[str, Any] = {"role": message.role.value}
        content: Any = self._text(message.content, (at, "content"), notes)
        if message.structured is not None:
            text, fields["structured"] = self._structured(message), True
            content = text if notes is None else made_of(text, ("const", text, (at, "content")), notes)
        if message.parts:
            content = [self._part(part, (at, "parts", j), notes) for j, part in enumerate(message.parts)]
        elif message.tool_calls and not message.content:
            content = self.form.empty_content
        if not message.parts and self.form.content is Content.PARTS and content is not None:
            content = [{"type": "text", "text": content}]
        fields["content"] = content
        if message.reasoning is not None:
            reasoning = self._text(message.reasoning, (at, "reasoning"), notes)
            fields |= dict.fromkeys(self.form.reasoning_names, reasoning)
        for name in _OPTIONAL:
            text = getattr(message, name)
            if text is not None:
                fields[name] = self._text(text, (at, name), notes)
        if message.tool_calls:
            fields["tool_calls"] = [self._call(k, j, notes, at) for j in range(len(message.tool_calls))]
        for name in more_fields(message, self.form):
            path = f"messages[{k}].{name}"
            check_json(message.extra[name], path=path, code="field_type")
            fields[name] = message.extra[name]
            if notes is not None:
                fields[name] = wrapped(fields[name], (at, "extra", name), notes)
        return fields

    def _part(self, part: str | Picture, path: Path, notes: Notes | None) -> dict[str, Any]:
        """Return a text or a picture of a message, as templates read it."""
        if isinstance(part, Picture):
            return {"type": "image"}
        return {"type": "text", "text": self._text(part, path, notes)}

    def _call(self, k: int, j: int, notes: Notes | None, at: Any) -> dict[str, Any]:
        call = self.conversation.messages[k].tool_calls[j]
        path = (at, "call", j, "arguments")
        if self.form.arguments is Arguments.STRING:
            arguments: Any = self._text(call.arguments, path, notes)
        else:
            arguments = self._arguments(k, j)
            if notes is not None:
                arguments = wrapped(arguments, path, notes)
        keys, inner = call_keys(call.order)
        parts = {"name": self._text(call.name, (at, "call", j, "name"), notes), "arguments": arguments}
        fields: dict[str, Any] = {"type": "function", "function": {key: parts[key] for key in inner}}
        if call.id is not None:
            fields["id"] = self._text(call.id, (at, "call", j, "id"), notes)
        return {key: fields[key] for key in keys if key in fields}

    @staticmethod
    def _text(text: str, path: Path, notes: Notes | None) -> str:
        return text if notes is None else field(text, path, notes)

    def _arguments(self, k: int, j: int) -> Any:
        arguments = self._decoded.get((k, j))
        if arguments is None:
            arguments = _decoded_arguments(
                self.conversation.messages[k].tool_calls[j].arguments, f"messages[{k}].tool_calls[{j}].arguments"
            )
            self._decoded[k, j] = arguments
        return arguments

    def field(self, path: Path) -> Any:
        """Return the value at a path."""
        if path[0] == "tools":
            return _inside(self.tools, path[1:]) if path[1:] else list(self.tools)
        message = self.conversation.messages[path[0]]
        if path[1] == "extra":
            return _inside(message.extra, path[2:])
        if path[1] == "parts":
            return message.parts[path[2]]
        if path[1] != "call":
            return getattr(message, path[1])
        if path[3] != "arguments":
            return getattr(message.tool_calls[path[2]], path[3])
        if self.form.arguments is Arguments.STRING:
            return message.tool_calls[path[2]].arguments
        return _inside(self._arguments(path[0], path[2]), path[4:])

    def _structured(self, message: Message) -> str:
        """Return the text of a Harmony system or developer content."""
        conversation = self.conversation
        has_tools = bool(conversation.tools) or any(has_function_tools(one.structured) for one in conversation.messages)
        return content_text(message.role.value, json.dumps(message.structured), has_tools)


class Probes(NamedTuple):
    """Messages that may follow an answer."""

    view: RecordView
    """The conversation, with the probes as messages after its own."""
    alone: RecordView
    """The probes."""


def _decoded_arguments(text: str, path: str) -> dict[str, Any]:
    """Return the arguments of a call, whose place is `path`, as the object that a template takes."""
    try:
        arguments = decoded_text(text)
    except RecordError as error:
        if error.code in ("duplicate_key", "number_range"):
            raise RecordError(error.message, code=error.code, path=path) from None
        arguments = None
    if not isinstance(arguments, dict):
        raise RecordError(
            f"the template takes the arguments of a call as a JSON object, and these are none: {text[:60]!r}",
            code="arguments_not_an_object",
            path=path,
        )
    return arguments


def more_fields(message: Message, form: InputForm) -> tuple[str, ...]:
    """Return the fields of a message that mean nothing here, and that the template reads."""
    return tuple(name for name in message.extra if name in form.more_fields) if message.extra else ()


def _inside(value: Any, path: Sequence[Any]) -> Any:
    for key in path:
        if type(key) is tuple:
            value = list(value if key[0] == KEY else value.values())[key[1]]
        else:
            value = value[key]
    return value
