"""The fast way to read the common form of a record: many lines of JSON at a time, straight into columns.

Anything else (another role spelling, a null content, an unknown field in a message, any mistake) is declined, and the
slow path of `read.files` and `read.shapes` reads it, with its checks and its errors. Where this way does not decline,
both give the same conversation, but for the metadata, which this one does not keep.

Lines are scanned by compiled code (`core.native.scan`), or where that is missing decoded by msgspec into typed fields:
both decline when in doubt, and give the same where they do not.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from chatmill.core.batch import ConversationBatch, MessageColumns, record_key
from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.kinds import RoleCode
from chatmill.core.native.scan import Scanned, count_lines, scan_lines
from chatmill.core.texts import Texts
from chatmill.core.tokens import offsets_of, ranges
from chatmill.core.tools import listed_tools
from chatmill.errors import RecordError


class _Plain(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    role: Role
    content: str


class _PlainRecord(msgspec.Struct, gc=False):
    messages: list[_Plain]
    id: str | None = None
    source: str | None = None
    tools: None = None
    messages_json: msgspec.UnsetType = msgspec.UNSET
    """No value fits, so a record with this field is declined: a Harmony row may hold its messages in there."""


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
    messages_json: msgspec.UnsetType = msgspec.UNSET


_Record = _PlainRecord | _RichRecord
_plain = msgspec.json.Decoder(_PlainRecord).decode
_rich = msgspec.json.Decoder(_RichRecord).decode
_tools = msgspec.json.Decoder(list[dict[str, object]] | None).decode
_new = tuple.__new__
_REST = Message(Role.USER, "")[6:]
_CODES = {role: RoleCode[role.name].value for role in Role}
_TOOLS_KEPT = 256
_KNOWN_TOOLS: dict[bytes, tuple[Any, ...]] = {}
_MOST_DIGITS = 4300
"""Python refuses to make an integer of more."""
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (_MOST_DIGITS + 1))

Slow = Callable[[bytes, int], Conversation | RecordError | None]
"""Reads a declined line, given its number; None for a blank one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lines:
    """L lines and what was read of them, whichever way; a line that was declined has no messages."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    """The range of each line in the data, its line end included."""
    read: NDArray[np.bool_]
    messages: MessageColumns
    offsets: NDArray[np.int64]
    """L + 1 offsets into the messages."""
    ids: Texts
    """Empty where a record has none."""
    sources: list[str]
    tools: Texts
    """As `listed_tools` writes them; empty where a record has none."""


def typed_conversation(line: bytes, where: str, source: str) -> Conversation | None:
    """The conversation of one line of JSONL in the OpenAI or Harmony shape; None when the slow path must read it."""
    (record,) = _decoded([line])
    return None if record is None else _conversation(record, where, source)


def line_groups(data: bytes, max_bytes: int, max_lines: int | None = None) -> Iterator[tuple[int, int, int]]:
    """Ranges of whole lines with at most `max_bytes` each, but for a longer line, which is a range of its own.

    Each is a start, a stop, and how many lines stand before it. `max_lines` ends the last range after so many lines.
    """
    end = len(data)
    if max_lines is not None:
        feeds = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == ord("\n"))
        end = 0 if max_lines == 0 else int(feeds[max_lines - 1]) + 1 if max_lines <= len(feeds) else end
    start = passed = 0
    while start < end:
        stop = end
        if end - start > max_bytes:
            stop = data.rfind(b"\n", start, start + max_bytes) + 1 or data.find(b"\n", start, end) + 1 or end
        yield start, stop, passed
        passed += count_lines(data, start, stop)
        start = stop


def read_batch(
    data: bytes, start: int, stop: int, first: int, path: str, source: str, slow: Slow
) -> tuple[ConversationBatch, list[RecordError]]:
    """The conversations of the lines in `data[start:stop]`, and the errors of those that hold none.

    Blank lines are passed over. `first` is the number of the first line in the file `path`, `source` names the records
    that do not name theirs, and `slow` reads the lines that this way declines.
    """
    scanned = scan_lines(data, start, stop)
    lines = _by_msgspec(data, start, stop, source) if scanned is None else _by_scanner(data, scanned, source)
    others: dict[int, Conversation] = {}
    errors: list[RecordError] = []
    for line in np.flatnonzero(~lines.read).tolist():
        found = slow(data[lines.starts[line] : lines.stops[line]], first + line)
        if isinstance(found, RecordError):
            errors.append(found)
        elif found is not None:
            others[line] = found

    def make(line: int) -> Conversation:
        if line in others:
            return others[line]
        raw, number = data[lines.starts[line] : lines.stops[line]], first + line
        made = typed_conversation(raw, f"{path}:{number}", source) or slow(raw, number)
        assert isinstance(made, Conversation), f"line {number} was read, and now gives {made!r}"
        return made

    return _batch(lines, others, make, lambda line: f"{path}:{first + line}"), errors


def _batch(
    lines: _Lines,
    others: dict[int, Conversation],
    make: Callable[[int], Conversation],
    where: Callable[[int], str],
) -> ConversationBatch:
    """The lines that hold a conversation: those that were read, and beside them those that the slow path has read."""
    is_kept = lines.read.copy()
    is_kept[list(others)] = True
    kept = np.flatnonzero(is_kept)
    if not others and lines.ids.lengths[kept].all():
        keys: Sequence[str] = lines.ids.take(kept)
    else:
        keys = [record_key(others[i]) if i in others else lines.ids[i] or where(i) for i in kept.tolist()]
    sources = lines.sources
    if len(kept) < len(sources) or others:
        sources = [others[line].source if line in others else sources[line] for line in kept.tolist()]
    return ConversationBatch(
        messages=lines.messages,
        offsets=np.append(lines.offsets[kept], lines.offsets[-1:]),
        in_columns=lines.read[kept],
        tools=lines.tools.take(kept),
        sources=sources,
        keys=keys,
        make=make,
        numbers=kept,
    )


def _by_scanner(data: bytes, scanned: Scanned, source: str) -> _Lines:
    """What compiled code has read; tools that it only found are decoded here."""
    tools = Texts(scanned.listed, scanned.listed_starts, np.maximum(scanned.listed_lengths, 0))
    listed: dict[int, str] = {}
    declined: list[int] = []
    for line in np.flatnonzero((scanned.tools_lengths >= 0) & (scanned.listed_lengths < 0)).tolist():
        start = scanned.tools_starts[line]
        try:
            listed[line] = listed_tools(_tool_definitions(data[start : start + scanned.tools_lengths[line]]))
        except (ValueError, RecursionError):
            declined.append(line)
    if listed:
        tools = tools.replaced(np.array(list(listed)), Texts.of(list(listed.values())))
    lines = _Lines(
        starts=scanned.line_starts,
        stops=scanned.line_stops,
        read=scanned.read,
        messages=_scanned_messages(scanned),
        offsets=scanned.message_offsets,
        ids=Texts(scanned.text, scanned.id_starts, np.maximum(scanned.id_lengths, 0)),
        sources=_scanned_sources(scanned, source),
        tools=tools,
    )
    return _without(lines, declined) if declined else lines


def _without(lines: _Lines, declined: list[int]) -> _Lines:
    """The same lines with some of them declined after all."""
    read, counts = lines.read.copy(), np.diff(lines.offsets)
    read[declined], counts[declined] = False, 0
    messages = lines.messages.take(ranges(lines.offsets[:-1], counts))
    return replace(lines, read=read, messages=messages, offsets=offsets_of(counts))


def _scanned_messages(scanned: Scanned) -> MessageColumns:
    text = scanned.text
    return MessageColumns(
        roles=scanned.roles,
        contents=Texts(text, scanned.content_starts, np.maximum(scanned.content_lengths, 0)),
        has_reasoning=scanned.reasoning_lengths >= 0,
        reasoning=Texts(text, scanned.reasoning_starts, np.maximum(scanned.reasoning_lengths, 0)),
        named=scanned.named,
        call_offsets=scanned.call_offsets,
        call_names=Texts(text, scanned.name_starts, scanned.name_lengths),
        call_arguments=Texts(text, scanned.argument_starts, scanned.argument_lengths),
    )


def _scanned_sources(scanned: Scanned, source: str) -> list[str]:
    """The source of every line; each one that the scanner has kept is decoded once."""
    at = np.where(scanned.source_lengths < 0, -1, scanned.source_starts)
    _, firsts, which = np.unique(at, return_index=True, return_inverse=True)
    texts = Texts(scanned.text, scanned.source_starts, scanned.source_lengths)
    names = [source if at[first] < 0 else texts[first] for first in firsts.tolist()]
    return [names[i] for i in which.tolist()]


def _by_msgspec(data: bytes, start: int, stop: int, source: str) -> _Lines:
    """What msgspec decodes, as the columns that the scanner would give."""
    raw = io.BytesIO(data[start:stop]).readlines()
    records = _decoded(raw)
    ends = start + offsets_of(np.array([len(line) for line in raw], dtype=np.int64))
    tools = [_tool_definitions(r.tools) if isinstance(r, _RichRecord) else () for r in records]
    return _Lines(
        starts=ends[:-1],
        stops=ends[1:],
        read=np.array([record is not None for record in records], dtype=np.bool_),
        messages=_decoded_messages([message for r in records if r is not None for message in r.messages]),
        offsets=offsets_of(np.array([0 if r is None else len(r.messages) for r in records], dtype=np.int64)),
        ids=Texts.of([(r and r.id) or "" for r in records]),
        sources=[(r and r.source) or source for r in records],
        tools=Texts.of([listed_tools(defined) if defined else "" for defined in tools]),
    )


def _decoded_messages(items: Sequence[_Plain | _Rich]) -> MessageColumns:
    count = len(items)
    reasoning, has_reasoning = [""] * count, np.zeros(count, dtype=np.bool_)
    named, call_counts = np.zeros(count, dtype=np.bool_), np.zeros(count, dtype=np.int64)
    calls: list[_Call] = []
    for place, item in enumerate(items):
        if isinstance(item, _Rich):
            reasoning[place], has_reasoning[place] = item.reasoning_content or "", item.reasoning_content is not None
            named[place], call_counts[place] = bool(item.tool_call_id or item.name), len(item.tool_calls or ())
            calls += item.tool_calls or ()
    return MessageColumns(
        roles=np.array([_CODES[item.role] for item in items], dtype=np.uint8),
        contents=Texts.of([item.content or "" for item in items]),
        has_reasoning=has_reasoning,
        reasoning=Texts.of(reasoning),
        named=named,
        call_offsets=offsets_of(call_counts),
        call_names=Texts.of([call.function.name for call in calls]),
        call_arguments=Texts.of([call.function.arguments for call in calls]),
    )


def _decoded(lines: Sequence[bytes]) -> list[_Record | None]:
    """Every line as a record; None where something in it needs the slow path.

    A record that is nothing but roles and contents is tried first: where that form fits, little is left to be checked.
    """
    records: list[_Record | None] = []
    for line in lines:
        try:
            record: _Record | None = _plain(line)
        except (ValueError, RecursionError):
            record = _rich_record(line)
        if (
            not record
            or not record.messages
            or record.source == ""
            or (len(line) > _MOST_DIGITS and _LONG_NUMBER.search(line))
        ):
            record = None
        records.append(record)
    # What msgspec does not mind is searched for in all lines at once; one of them has it only where this finds it.
    decoded = [line for line, record in zip(lines, records, strict=True) if record is not None]
    joined = b"".join(decoded)
    if joined.count(b'"messages"') != len(decoded) or joined.count(b'"conversations"') > 1 or not _is_utf8(joined):
        return [r if r and _is_sure(line) else None for line, r in zip(lines, records, strict=True)]
    return records


def _is_sure(line: bytes) -> bool:
    """Whether no key can stand twice that must not (the slow path looks closer), and all of the line is UTF-8."""
    return line.count(b'"messages"') == 1 and line.count(b'"conversations"') <= 1 and _is_utf8(line)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


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


def _tool_definitions(raw: msgspec.Raw | bytes) -> tuple[Any, ...]:
    """The decoded tools; records of one source repeat them, so the last ones are kept."""
    key = bytes(raw)
    if not key:
        return ()
    found = _KNOWN_TOOLS.get(key)
    if found is None:
        if len(_KNOWN_TOOLS) >= _TOOLS_KEPT:
            _KNOWN_TOOLS.clear()
        found = _KNOWN_TOOLS[key] = tuple(_tools(key) or ())
    return found
