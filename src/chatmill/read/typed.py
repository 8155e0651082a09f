"""The fast way to read the common form of a record: JSON decoded straight into typed fields, many lines at a time.

Anything else (another role spelling, a null content, an unknown field in a message, any mistake) is declined, and the
slow path of `read.files` and `read.shapes` reads it, with its checks and its errors. Where this way does not decline,
both give the same conversation, but for the metadata, which this one does not keep.

A record that is nothing but roles and contents is tried first: where that form fits, nothing is left to be checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from chatmill.core.batch import ConversationBatch
from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.tokens import offsets_of
from chatmill.errors import RecordError


class _Plain(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    role: Role
    content: str


class _PlainRecord(msgspec.Struct, gc=False):
    messages: list[_Plain]
    id: str | None = None
    source: str | None = None
    tools: None = None


class _Function(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    name: str
    arguments: str


class _Call(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    function: _Function
    id: str | None = None
    type: str | None = None


class _Rich(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    role: Role
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


_NO_TOOLS = msgspec.Raw(b"")


class _RichRecord(msgspec.Struct, gc=False):
    messages: list[_Rich]
    id: str | None = None
    source: str | None = None
    tools: msgspec.Raw = _NO_TOOLS


_Record = _PlainRecord | _RichRecord
_plain = msgspec.json.Decoder(_PlainRecord).decode
_rich = msgspec.json.Decoder(_RichRecord).decode
_tools = msgspec.json.Decoder(list[dict[str, object]] | None).decode
_new = tuple.__new__
_REST = Message(Role.USER, "")[6:]
_TOOLS_KEPT = 256
_KNOWN_TOOLS: dict[bytes, tuple[Any, ...]] = {}

Slow = Callable[[bytes, int], Conversation | RecordError | None]
"""Reads a declined line, given its number; None for a blank one."""


def typed_conversation(line: bytes, where: str, source: str) -> Conversation | None:
    """The conversation of one line of JSONL in the OpenAI or Harmony shape; None when the slow path must read it."""
    (record,) = _decoded([line])
    return None if record is None else _conversation(record, where, source)


def read_batch(
    lines: Sequence[bytes], first: int, path: str, source: str, slow: Slow
) -> tuple[ConversationBatch, list[RecordError]]:
    """The conversations of consecutive lines, and the errors of those that hold none; blank lines are passed over.

    `first` is the number of the first line in the file `path`; `slow` reads the lines that this way declines.
    """
    records = _decoded(lines)
    numbers: Sequence[int] = range(first, first + len(lines))
    others: dict[int, Conversation] = {}
    errors: list[RecordError] = []
    if None in records:
        kept: list[_Record | None] = []
        kept_numbers: list[int] = []
        for record, number, line in zip(records, numbers, lines, strict=True):
            if record is None:
                found = slow(line, number)
                if isinstance(found, RecordError):
                    errors.append(found)
                if not isinstance(found, Conversation):
                    continue
                others[len(kept)] = found
            kept.append(record)
            kept_numbers.append(number)
        records, numbers = kept, kept_numbers
    return _batch(records, numbers, others, path, source), errors


def _decoded(lines: Sequence[bytes]) -> list[_Record | None]:
    """Every line as a record; None where something in it needs the slow path."""
    records: list[_Record | None] = []
    for line in lines:
        try:
            record: _Record | None = _plain(line)
        except (ValueError, RecursionError):
            record = _rich_record(line)
        records.append(record)
    # A line that was decoded has the key at least once: so this tells whether one of them has it twice.
    decoded = [line for line, record in zip(lines, records, strict=True) if record is not None]
    if b"".join(decoded).count(b'"messages"') != len(decoded):
        records = [r if line.count(b'"messages"') == 1 else None for line, r in zip(lines, records, strict=True)]
    return [record if record and record.messages and record.source != "" else None for record in records]


def _rich_record(line: bytes) -> _RichRecord | None:
    """A record with calls, reasoning or tools; None where a message says nothing, or anything else is amiss."""
    try:
        record = _rich(line)
        _tool_definitions(record.tools)
    except (ValueError, RecursionError):
        return None
    for message in record.messages:
        if message.content is None and not message.tool_calls:
            return None
    return record


def _batch(
    records: list[_Record | None], numbers: Sequence[int], others: dict[int, Conversation], path: str, source: str
) -> ConversationBatch:
    """Columns of all records; those that the slow path has read stand beside them."""

    def make(number: int) -> Conversation:
        record = records[number]
        return others[number] if record is None else _conversation(record, f"{path}:{numbers[number]}", source)

    def key(number: int) -> str:
        return others[number].id or others[number].where if number in others else f"{path}:{numbers[number]}"

    offsets = offsets_of(np.array([len(r.messages) if r else 0 for r in records], dtype=np.int64))
    messages: list[Any] = list(itertools.chain.from_iterable([r.messages for r in records if r]))
    firsts = offsets.tolist()
    rich: dict[int, Message] = {}
    tools: dict[int, tuple[Any, ...]] = {}
    for number in [i for i, r in enumerate(records) if type(r) is _RichRecord]:
        record = records[number]
        assert isinstance(record, _RichRecord)
        defined = _tool_definitions(record.tools)
        if defined:
            tools[number] = defined
        for place, item in enumerate(record.messages, firsts[number]):
            if item.tool_calls or item.reasoning_content is not None or item.tool_call_id or item.name:
                rich[place] = _message(item)
    return ConversationBatch(
        roles=[message.role for message in messages],
        contents=[message.content or "" for message in messages] if rich else [m.content for m in messages],
        offsets=offsets,
        in_columns=np.array([r is not None for r in records], dtype=np.bool_),
        rich=rich,
        tools=tools,
        sources=[(r.source or source) if r else others[i].source for i, r in enumerate(records)],
        keys=[(r and r.id) or key(i) for i, r in enumerate(records)],
        make=make,
        numbers=np.arange(len(records)),
    )


def _conversation(record: _Record, where: str, source: str) -> Conversation:
    if isinstance(record, _RichRecord):
        messages = tuple(map(_message, record.messages))
        return Conversation(messages, record.id or "", record.source or source, _tool_definitions(record.tools), where)
    plain = tuple([Message(message.role, message.content) for message in record.messages])
    return Conversation(plain, record.id or "", record.source or source, (), where)


def _message(item: _Rich) -> Message:
    calls = tuple([ToolCall(call.function.name, call.function.arguments, call.id) for call in item.tool_calls or ()])
    fields = (item.role, item.content or "", item.reasoning_content, calls, item.tool_call_id, item.name)
    return _new(Message, fields + _REST)


def _tool_definitions(raw: msgspec.Raw) -> tuple[Any, ...]:
    """The decoded tools; records of one source repeat them, so the last ones are kept."""
    if raw is _NO_TOOLS:
        return ()
    key = bytes(raw)
    found = _KNOWN_TOOLS.get(key)
    if found is None:
        if len(_KNOWN_TOOLS) >= _TOOLS_KEPT:
            _KNOWN_TOOLS.clear()
        found = _KNOWN_TOOLS[key] = tuple(_tools(key) or ())
    return found
