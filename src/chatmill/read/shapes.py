"""Shapes of records: how OpenAI messages, ShareGPT, Alpaca, prompt/completion and Harmony rows become conversations."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from chatmill.core.conversation import (
    HARMONY_PARTS,
    ROLE_ALIASES,
    Conversation,
    Message,
    Role,
    checked_text,
    json_type,
    parse_messages,
)
from chatmill.errors import RecordError, UnknownNameError
from chatmill.read.files import TOO_DEEP, decode_line

Record = Mapping[str, Any]
SHAREGPT_ROLES: Mapping[str, Role] = {**ROLE_ALIASES, "function_call": Role.ASSISTANT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One way to write a conversation as a record."""

    name: str
    fields: frozenset[str]
    """Fields it gives a meaning to; the others are kept as metadata."""
    fits: Callable[[Record], bool]
    """Whether a record looks like this shape (used for detection only)."""
    messages: Callable[[Record], tuple[Message, ...]]
    """The messages of a record, or a `RecordError`."""


def conversation_of(record: object, shape: Shape, *, where: str = "", source: str = "") -> Conversation:
    """One conversation from one decoded record; a `RecordError` knows the place, the record id and the field."""
    record_id = ""
    try:
        if not isinstance(record, Mapping):
            raise RecordError(f"a record must be an object, found {json_type(record)}", code="record_type")
        record_id = _label(record, "id", code="id_type")
        messages = shape.messages(record)
        tools = _tools(record)
        known = shape.fields
        return Conversation(
            messages,
            record_id,
            _label(record, "source", code="field_type") or source,
            tools,
            where,
            {key: value for key, value in record.items() if key not in known},
        )
    except RecordError as error:
        error.where, error.record_id = where, record_id
        raise
    except RecursionError:
        raise RecordError(TOO_DEEP, code="invalid_json", where=where, record_id=record_id) from None


def _label(record: Record, key: str, *, code: str) -> str:
    """What names a record: a string, or an integer as text; "" where there is none."""
    value = record.get(key)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RecordError(f"{key!r} must be a string or an integer, found {str(value)[:60]}", code=code, path=key)
    return checked_text(str(value), key)


def _tools(record: Record) -> tuple[Any, ...]:
    tools = record.get("tools")
    if not tools:
        return ()
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise RecordError(f"'tools' is a string and not JSON: {error}", code="bad_tools", path="tools") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RecordError("'tools' must be a list of objects", code="bad_tools", path="tools")
    try:
        msgspec.json.encode(tools)
    except UnicodeEncodeError as error:
        checked_text(error.object, "tools")  # raises, and names the character
    except OverflowError:  # an integer beyond 64 bits, which is no fault
        pass
    return tuple(tools)


def _openai(record: Record) -> tuple[Message, ...]:
    if "messages" not in record:
        raise RecordError(
            f"the record has no 'messages'; it has: {_keys(record)}", code="missing_field", path="messages"
        )
    return parse_messages(record["messages"])


def _harmony(record: Record) -> tuple[Message, ...]:
    if "messages_json" not in record:
        return _openai(record)
    line = _text(record, "messages_json").encode()
    _, decoded, error = decode_line(line, "")
    if error is not None:
        raise RecordError(error.message, code=error.code, path="messages_json")
    if not isinstance(decoded, dict) or "messages" not in decoded:
        raise RecordError("must hold an object with 'messages'", code="missing_field", path="messages_json")
    return parse_messages(decoded["messages"], path="messages_json.messages")


def _sharegpt(record: Record) -> tuple[Message, ...]:
    key = "conversations" if "conversations" in record else "messages"
    if key not in record:
        raise RecordError(
            f"the record has no 'conversations'; it has: {_keys(record)}",
            code="missing_field",
            path="conversations",
        )
    items = record[key]
    if isinstance(items, list):
        items = [_sharegpt_item(item, f"{key}[{i}]") for i, item in enumerate(items)]
    messages = parse_messages(items, path=key, role_key="from", content_key="value", aliases=SHAREGPT_ROLES)
    system = _text(record, "system", default="")
    return (Message(Role.SYSTEM, system), *messages) if system else messages


def _sharegpt_item(item: object, path: str) -> object:
    """A `function_call` turn holds the call as JSON text; it becomes an assistant message with tool calls."""
    if not isinstance(item, dict) or str(item.get("from")).strip().lower() != "function_call":
        return item
    try:
        calls = json.loads(item["value"])
    except (KeyError, TypeError, json.JSONDecodeError):
        raise RecordError(
            "a function_call turn must hold the call as JSON", code="bad_tool_call", path=f"{path}.value"
        ) from None
    rest = {key: value for key, value in item.items() if key != "value"}
    return {**rest, "value": "", "tool_calls": calls if isinstance(calls, list) else [calls]}


def _alpaca(record: Record) -> tuple[Message, ...]:
    """Instruction and input are one user message, parted by a newline; `system` and `history` go before it."""
    instruction, extra = _text(record, "instruction"), _text(record, "input", default="")
    items: list[Message] = []
    system = _text(record, "system", default="")
    if system:
        items.append(Message(Role.SYSTEM, system))
    history = record.get("history") or []
    if not isinstance(history, list):
        raise RecordError("'history' must be a list of pairs of texts", code="bad_history", path="history")
    for i, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise RecordError("each entry must be a pair of texts", code="bad_history", path=f"history[{i}]")
        items.append(Message(Role.USER, checked_text(pair[0], f"history[{i}][0]")))
        items.append(Message(Role.ASSISTANT, checked_text(pair[1], f"history[{i}][1]")))
    items.append(Message(Role.USER, f"{instruction}\n{extra}" if extra else instruction))
    items.append(Message(Role.ASSISTANT, _text(record, "output")))
    return tuple(items)


def _prompt_completion(record: Record) -> tuple[Message, ...]:
    """Prompt and completion as texts, or both as lists of messages."""
    if isinstance(record.get("prompt"), list) and isinstance(record.get("completion"), list):
        return parse_messages(record["prompt"], path="prompt") + parse_messages(record["completion"], path="completion")
    return (Message(Role.USER, _text(record, "prompt")), Message(Role.ASSISTANT, _text(record, "completion")))


def _text(record: Record, key: str, default: str | None = None) -> str:
    value = record.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        found = "nothing" if key not in record else json_type(value)
        raise RecordError(f"{key!r} must be a string, found {found}", code="missing_field", path=key)
    return checked_text(value, key)


def _keys(record: Record) -> str:
    return ", ".join(map(str, list(record)[:12])) or "nothing"


def _first_message(record: Record, key: str) -> Mapping[str, Any]:
    items = record.get(key)
    first = items[0] if isinstance(items, list) and items else None
    return first if isinstance(first, Mapping) else {}


def _is_harmony(record: Record) -> bool:
    if isinstance(record.get("messages_json"), str):
        return True
    items = record.get("messages")
    return isinstance(items, list) and any(
        isinstance(m, Mapping) and ("channel" in m or _has_harmony_part(m.get("content"))) for m in items
    )


def _has_harmony_part(content: object) -> bool:
    return isinstance(content, list) and any(
        isinstance(part, Mapping) and part.get("type") in list(HARMONY_PARTS) for part in content
    )


_COMMON = frozenset({"id", "source", "tools"})
SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape(
            name="harmony",
            fields=_COMMON | {"messages", "messages_json"},
            fits=_is_harmony,
            messages=_harmony,
        ),
        Shape(
            name="sharegpt",
            fields=_COMMON | {"conversations", "messages", "system"},
            fits=lambda r: "from" in _first_message(r, "conversations") or "from" in _first_message(r, "messages"),
            messages=_sharegpt,
        ),
        Shape(
            name="openai",
            fields=_COMMON | {"messages"},
            fits=lambda r: isinstance(r.get("messages"), list),
            messages=_openai,
        ),
        Shape(
            name="alpaca",
            fields=_COMMON | {"instruction", "input", "output", "system", "history"},
            fits=lambda r: "instruction" in r and "output" in r,
            messages=_alpaca,
        ),
        Shape(
            name="prompt_completion",
            fields=_COMMON | {"prompt", "completion"},
            fits=lambda r: "prompt" in r and "completion" in r,
            messages=_prompt_completion,
        ),
    )
}
"""Known shapes, in the order in which detection tries them."""


def find_shape(name: str) -> Shape:
    """A shape by name."""
    if name not in SHAPES:
        raise UnknownNameError("shape", name, list(SHAPES))
    return SHAPES[name]


def detect_shape(records: Sequence[object], where: str) -> Shape:
    """The shape that most of these first records fit, earlier shapes winning ties; none fits: an error."""
    objects = [record for record in records if isinstance(record, Mapping)]
    counts = {name: sum(shape.fits(record) for record in objects) for name, shape in SHAPES.items()}
    best = max(counts, key=lambda name: counts[name])
    if not counts[best]:
        found = f"the first record has: {_keys(objects[0])}" if objects else "none of them is an object"
        raise RecordError(
            f"cannot tell the shape of the records: {found}. Name the shape: {', '.join(SHAPES)}.",
            code="unknown_shape",
            where=where,
        )
    return SHAPES[best]
