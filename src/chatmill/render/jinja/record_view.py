"""One conversation as a chat template sees it: plain values, traced values, and its fields by path.

The paths of a conversation's texts, used by expressions:

    (k, "content"), (k, "reasoning"), (k, "name"), (k, "tool_call_id")      message k
    (k, "call", j, "name"), (k, "call", j, "id")                            call j of message k
    (k, "call", j, "arguments", ...)                                        its arguments, and what is inside them
    (k, "extra", name, ...)                                                 a field that means nothing here
    ("tools", ...)                                                          tool definitions
    ("options", ...)                                                        its `chat_template_kwargs`
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from chatmill.core.conversation import Conversation, Message, call_keys, check_json
from chatmill.errors import RecordError
from chatmill.render.jinja.expressions import Notes, Path, kind_of_value
from chatmill.render.jinja.traced import field
from chatmill.render.jinja.traced_values import wrapped


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
    """How a template wants its input where there is more than one way; found out by probing it."""

    arguments: Arguments = Arguments.STRING
    content: Content = Content.TEXT
    empty_content: str | None = None
    """The content of a message that has tool calls and nothing else."""
    reasoning_names: tuple[str, ...] = ("reasoning_content", "thinking")
    more_fields: frozenset[str] = frozenset()
    """Names that the template reads and Chatmill gives no meaning to: fields of messages with such a name are given."""


class RecordView:
    """A conversation for one template: what its tracing and its columns both start from."""

    __slots__ = ("_decoded", "_plain", "_shapes", "conversation", "form", "turns")

    def __init__(self, conversation: Conversation, form: InputForm) -> None:
        """Nothing is decoded until it is asked for."""
        self.conversation, self.form = conversation, form
        self._decoded: dict[tuple[int, int], Any] = {}
        self._plain: list[dict[str, Any]] = []
        """Messages without tracing; no template can change what it is given."""
        self._shapes: list[tuple[Any, ...]] | None = None
        self.turns: dict[tuple[int, int], Any] = {}
        """Turns of loops that were taken in renderings of its first messages."""

    def values(self, count: int, notes: Notes | None) -> tuple[list[dict[str, Any]], Any]:
        """The first messages and the tools; traced where there are notes to be taken."""
        if notes is None:
            known = len(self._plain)
            new = self.conversation.messages[known:count]
            self._plain += [self._message(k, m, None) for k, m in enumerate(new, known)]
            messages = self._plain[:count]
        else:
            messages = [self._message(k, m, notes) for k, m in enumerate(self.conversation.messages[:count])]
        tools: Any = list(self.conversation.tools) or None
        if tools is not None and notes is not None:
            tools = wrapped(tools, ("tools",), notes)
        return messages, tools

    def message(self, index: int, notes: Notes, address: Any) -> dict[str, Any]:
        """One message with traced values, whose paths begin with an address."""
        return self._message(index, self.conversation.messages[index], notes, address)

    def plain_message(self, index: int) -> dict[str, Any]:
        """One message with plain values."""
        return self.values(index + 1, None)[0][index]

    def keys(self, index: int) -> Collection[str]:
        """The fields that a message is given with."""
        return self.plain_message(index).keys()

    def calls_shape(self, index: int) -> tuple[Any, ...]:
        """What a template sees of the calls of a message without asking."""
        return tuple((call.id is not None, call.order) for call in self.conversation.messages[index].tool_calls)

    def shape_numbers(self, numbers: dict[Any, int]) -> list[int]:
        """The shape of every message as a number; arguments that the template cannot be given are a `RecordError`."""
        if self._shapes is None:
            self._shapes = [self._turn_shape(k, message) for k, message in enumerate(self.conversation.messages)]
        return [numbers.setdefault(shape, len(numbers)) for shape in self._shapes]

    def _turn_shape(self, k: int, message: Message) -> tuple[Any, ...]:
        if message.tool_calls and self.form.arguments is Arguments.OBJECT:
            for j in range(len(message.tool_calls)):
                self._arguments(k, j)
        kinds = tuple(kind_of_value(message.extra[name]) for name in more_fields(message, self.form))
        return (*_shape_of(message, self.form), kinds)

    def _message(self, k: int, message: Message, notes: Notes | None, address: Any = None) -> dict[str, Any]:
        at = k if address is None else address
        given: dict[str, Any] = {"role": message.role.value}
        content: Any = self._text(message.content, (at, "content"), notes)
        if message.tool_calls and not message.content:
            content = self.form.empty_content
        if self.form.content is Content.PARTS and content is not None:
            content = [{"type": "text", "text": content}]
        given["content"] = content
        if message.reasoning is not None:
            reasoning = self._text(message.reasoning, (at, "reasoning"), notes)
            given |= dict.fromkeys(self.form.reasoning_names, reasoning)
        if message.name is not None:
            given["name"] = self._text(message.name, (at, "name"), notes)
        if message.tool_call_id is not None:
            given["tool_call_id"] = self._text(message.tool_call_id, (at, "tool_call_id"), notes)
        if message.tool_calls:
            given["tool_calls"] = [self._call(k, j, notes, at) for j in range(len(message.tool_calls))]
        for name in more_fields(message, self.form):
            path = f"messages[{k}].{name}"
            check_json(message.extra[name], path=path, code="field_type")
            given[name] = message.extra[name]
            if notes is not None:
                given[name] = wrapped(given[name], (at, "extra", name), notes)
        return given

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
        given: dict[str, Any] = {"type": "function", "function": {key: parts[key] for key in inner}}
        if call.id is not None:
            given["id"] = self._text(call.id, (at, "call", j, "id"), notes)
        return {key: given[key] for key in keys if key in given}

    @staticmethod
    def _text(text: str, path: Path, notes: Notes | None) -> str:
        return text if notes is None else field(text, path, notes)

    def _arguments(self, k: int, j: int) -> Any:
        found = self._decoded.get((k, j))
        if found is None:
            text = self.conversation.messages[k].tool_calls[j].arguments
            try:
                found = json.loads(text)
            except (ValueError, RecursionError):
                found = None
            if not isinstance(found, dict):
                error = RecordError(
                    f"the template takes the arguments of a call as a JSON object, and these are none: {text[:60]!r}",
                    code="arguments_not_an_object",
                    path=f"messages[{k}].tool_calls[{j}].arguments",
                )
                error.is_general = False
                raise error
            self._decoded[k, j] = found
        return found

    def field(self, path: Path) -> Any:
        """The value at a path."""
        if path[0] == "tools":
            return _inside(list(self.conversation.tools), path[1:])
        message = self.conversation.messages[path[0]]
        if path[1] == "extra":
            return _inside(message.extra, path[2:])
        if path[1] != "call":
            return getattr(message, path[1])
        if path[3] != "arguments":
            return getattr(message.tool_calls[path[2]], path[3])
        if self.form.arguments is Arguments.STRING:
            return message.tool_calls[path[2]].arguments
        return _inside(self._arguments(path[0], path[2]), path[4:])

    def shape(self) -> tuple[Any, ...]:
        """What the template may see without asking, message by message: roles, and which fields there are."""
        return tuple(_shape_of(message, self.form) for message in self.conversation.messages)


def more_fields(message: Message, form: InputForm) -> tuple[str, ...]:
    """The fields of a message that mean nothing here, and that the template reads."""
    return tuple(name for name in message.extra if name in form.more_fields) if message.extra else ()


def _shape_of(message: Message, form: InputForm) -> tuple[Any, ...]:
    calls = message.tool_calls
    return (
        message.role.value,
        message.reasoning is not None,
        message.name is not None,
        message.tool_call_id is not None,
        tuple((call.id is not None, call.order) for call in calls),
        bool(calls) and not message.content,
        message.weight == 0,
        *(message.channel, message.recipient, message.content_type, message.structured is not None),  # refused
        more_fields(message, form),
    )


def _inside(value: Any, path: Sequence[Any]) -> Any:
    for key in path:
        value = value[key]
    return value


def traced_conversation(conversation: Conversation, notes: Notes) -> Conversation:
    """A conversation whose contents, reasoning and arguments are traced; the rest of it is part of its shape."""
    messages = []
    for k, message in enumerate(conversation.messages):
        calls = tuple(
            call._replace(arguments=field(call.arguments, (k, "call", j, "arguments"), notes))
            for j, call in enumerate(message.tool_calls)
        )
        reasoning = message.reasoning
        messages.append(
            message._replace(
                content=field(message.content, (k, "content"), notes),
                reasoning=None if reasoning is None else field(reasoning, (k, "reasoning"), notes),
                tool_calls=calls,
            )
        )
    return conversation._replace(messages=tuple(messages))
