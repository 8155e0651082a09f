"""Records of chats as columns, read by compiled code: every record is read exactly, or declined.

The records are lines of JSONL or a column of JSON texts, and a shape says what their fields are called.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import RoleCode
from chatmill.core.messages import TEXT_FIELDS, MessageColumns, sparse_weights
from chatmill.core.native.library import call, int64s
from chatmill.core.sampled import NUMBER_FIELDS
from chatmill.core.texts import OptionalTexts, Texts

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Flags = NDArray[np.bool_]

SMALLEST_CALL = len(b'{"function":{"name":"","arguments":""}}')
SMALLEST_FIELD = len(b'"":1')
RARE = 40
"""Bytes of data for each text that few messages have: enough room unless nearly all of them have several."""
SLACK = 64
MAX_NAMES = 32
"""Names of a record, a message or a role that names.h has room for."""


class RecordField(IntEnum):
    """What a field of a record means, as in names.h."""

    LIST = 1
    """A list of messages; a second one in the same record is declined."""
    ID = 2
    SOURCE = 3
    TOOLS = 4
    OPTIONS = 5
    EMPTY = 6
    """With anything in it the record is declined."""
    CALLS = 7
    """A list of calls: answers that are nothing but the ids of a prompt and those that were sampled."""
    SYSTEM = 8
    """A text that is a system message before those of the list, unless it is empty."""


class MessageField(IntEnum):
    """What a field of a message means, as in names.h."""

    ROLE = 1
    CONTENT = 2
    REASONING = 3
    TOOL_CALLS = 4
    WEIGHT = 5
    TRAIN = 6
    NAME = 7
    TOOL_CALL_ID = 8
    RECIPIENT = 9
    CHANNEL = 10
    CONTENT_TYPE = 11
    ONE_CONTENT = 12
    """A content without room for doubt: a text, or a list of exactly one part that is nothing but its type and text."""
    FINISH_REASON = 13
    TOKEN_IDS = 14
    PROMPT_TOKEN_IDS = 15
    LOGPROBS = 16


_STRUCTURED = MessageField.LOGPROBS + 1


class ShapeNames:
    """What a shape calls the fields of its records and messages, and the roles."""

    def __init__(
        self, record: Mapping[str, RecordField], message: Mapping[str, MessageField], roles: Mapping[str, RoleCode]
    ) -> None:
        """More names than there is room for are a `ValueError`."""
        if max(len(record), len(message), len(roles)) > MAX_NAMES:
            raise ValueError(f"more than {MAX_NAMES} names of a kind")
        names = [f'{name}"'.encode() for name in (*record, *message, *roles)]
        self.smallest_message = len('{"":"","":""}') + sum(sorted(map(len, message))[:2]) + min(map(len, roles))
        """Bytes that one in a list has at least. Room is made for as many as there can be: too much costs time."""
        self._text = np.frombuffer(b"".join(names), dtype=np.uint8)
        self._lengths = np.array([len(name) for name in names], dtype=np.int64)
        self._meanings = np.array([*record.values(), *message.values(), *roles.values()], dtype=np.uint8)
        arrays = (self._text, self._lengths, self._meanings)
        self.struct = _NameTable(len(record), len(message), len(roles), *(array.ctypes.data for array in arrays))


class _NameTable(ctypes.Structure):
    """The struct `shape_names` of names.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("records", "messages", "role_names")),
        *((name, ctypes.c_void_p) for name in ("text", "lengths", "meanings")),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scanned:
    """R records with their messages; one that was declined (`read` is false) has no messages and no texts."""

    line_starts: Ints
    """Where each record begins in the data that was scanned."""
    line_stops: Ints
    """Where it ends, after its line feed."""
    read: Flags
    offsets: Ints
    """R + 1 offsets into the messages."""
    messages: MessageColumns
    ids: OptionalTexts
    sources: OptionalTexts
    """Equal sources mostly have one start."""
    tools: OptionalTexts
    """The tools as they are written in the data, a list; none where they are a text."""
    listed: OptionalTexts
    """Tool definitions on lines of their own (see `core.tools.listed_tools`); none where Python must decode `tools`."""
    options: OptionalTexts
    """Template options, one JSON object."""
    unused: Ints
    """Fields of records that mean nothing here and hold something: record, start of the name in the data, length."""


def _pairs(*names: str) -> tuple[str, ...]:
    """The two arrays of each column of texts."""
    return tuple(f"{name}_{part}" for name in names for part in ("starts", "lengths"))


_CAPACITIES = ("line", "message", "call", "rare", "weight", "text", "json", "unused")
_LINES = ("line_starts", "line_stops", "read", "message_offsets")
_LINE_TEXTS = _pairs("ids", "sources", "tools", "listed", "options")
_MESSAGE_TEXTS = _pairs("contents", "reasoning")
_MESSAGES = ("roles", *_MESSAGE_TEXTS, "call_offsets")
_CALLS = _pairs("call_names", "call_arguments", "call_ids")
_ARRAYS = (*_LINES, *_LINE_TEXTS, *_MESSAGES, *_CALLS, "call_orders", "rare", "weights", "text", "json", "unused")
_COUNTS = ("lines", "messages", "calls", "rares", "weight_count", "text_bytes", "json_bytes", "unused_count")
_WEIGHT = np.dtype([("message", np.int64), ("value", np.float64)])


class _Columns(ctypes.Structure):
    """The struct `columns` of json.h."""

    _fields_ = (
        *((f"{name}_capacity", ctypes.c_int64) for name in _CAPACITIES),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
        *((name, ctypes.c_int64) for name in _COUNTS),
    )


class _Room:
    """Arrays for what is scanned; what is never written to takes no memory."""

    def __init__(self, lines: int, size: int, names: ShapeNames) -> None:
        """Room for so many lines of so many bytes in all."""
        messages, calls = size // names.smallest_message + lines + 1, size // SMALLEST_CALL + 1
        rare, text = size // RARE + 16, 2 * size + SLACK
        self.arrays: dict[str, NDArray[Any]] = {name: np.empty(lines, np.int64) for name in _LINE_TEXTS}
        self.arrays |= {name: np.empty(lines, np.int64) for name in ("line_starts", "line_stops")}
        self.arrays |= {name: np.empty(messages, np.int64) for name in _MESSAGE_TEXTS}
        self.arrays |= {name: np.empty(calls, np.int64) for name in _CALLS}
        self.arrays |= {"call_orders": np.empty(calls, np.uint8)}
        self.arrays |= {"read": np.empty(lines, np.bool_), "roles": np.empty(messages, np.uint8)}
        self.arrays |= {"message_offsets": np.empty(lines + 1, np.int64)}
        self.arrays |= {"call_offsets": np.empty(messages + 1, np.int64)}
        self.arrays |= {"rare": np.empty((rare, 4), np.int64), "weights": np.empty(messages, _WEIGHT)}
        self.arrays |= {"text": np.empty(text, np.uint8), "json": np.empty(2 * size, np.uint8)}
        self.arrays |= {"unused": np.empty((size // SMALLEST_FIELD + 1, 3), np.int64)}
        addresses = (self.arrays[name].ctypes.data for name in _ARRAYS)
        unused = len(self.arrays["unused"])
        self.struct = _Columns(lines, messages, calls, rare, messages, text, 2 * size, unused, *addresses)

    def scanned(self, data: Bytes) -> Scanned:
        """The parts of the arrays that were written."""
        arrays, counts = self.arrays, self.struct
        lines, messages, calls = int(counts.lines), int(counts.messages), int(counts.calls)
        text, json = arrays["text"][: counts.text_bytes], arrays["json"][: counts.json_bytes]

        def texts(name: str, count: int, buffer: Bytes = text) -> OptionalTexts:
            return OptionalTexts(buffer, arrays[f"{name}_starts"][:count], arrays[f"{name}_lengths"][:count])

        contents, reasoning = texts("contents", messages), texts("reasoning", messages)
        rare = arrays["rare"][: counts.rares]
        seldom: dict[str, Any] = {
            column: _rare_texts(rare, MessageField[name.upper()], messages, text)
            for name, column in (*TEXT_FIELDS.items(), *((name, name) for name in NUMBER_FIELDS))
        }
        return Scanned(
            line_starts=arrays["line_starts"][:lines],
            line_stops=arrays["line_stops"][:lines],
            read=arrays["read"][:lines],
            offsets=arrays["message_offsets"][: lines + 1],
            ids=texts("ids", lines),
            sources=texts("sources", lines),
            tools=texts("tools", lines, data),
            listed=texts("listed", lines, json),
            options=texts("options", lines, json),
            unused=arrays["unused"][: counts.unused_count],
            messages=replace(
                MessageColumns.plain(arrays["roles"][:messages], contents.texts),
                has_content=contents.present,
                reasoning=reasoning.texts,
                has_reasoning=reasoning.present,
                **seldom,
                weights=sparse_weights(messages, dict(arrays["weights"][: counts.weight_count].tolist())),
                structured=_rare_texts(rare, _STRUCTURED, messages, json),
                call_offsets=arrays["call_offsets"][: messages + 1],
                call_names=texts("call_names", calls).texts,
                call_arguments=texts("call_arguments", calls).texts,
                call_ids=texts("call_ids", calls),
                call_orders=arrays["call_orders"][:calls],
            ),
        )


def _rare_texts(rare: Ints, field: int, count: int, text: Bytes) -> OptionalTexts:
    chosen = rare[rare[:, 1] == field] if len(rare) else rare
    return OptionalTexts.sparse(count, chosen[:, 0], Texts(text, chosen[:, 2], chosen[:, 3]))


def scan_lines(data: bytes | memoryview, start: int, stop: int, names: ShapeNames, lines: int | None = None) -> Scanned:
    """The lines in `data[start:stop]`, cut at line feeds alone; the last may lack its own.

    Nothing outside of the range is looked at. `lines` is how many there are, for who has counted them.
    """
    if not 0 <= start <= stop <= len(data):
        raise IndexError(f"no range of {len(data)} bytes: {start} to {stop}")
    whole = np.frombuffer(data, dtype=np.uint8)
    lines = count_lines(data, start, stop) if lines is None else lines
    room = _Room(lines, stop - start, names)
    if call("chatmill_scan", whole, start, stop, names.struct, room.struct) != lines:
        raise RuntimeError(f"{lines} lines were counted and {room.struct.lines} or more scanned: the data changed")
    return room.scanned(whole)


def scan_texts(data: Bytes, offsets: Ints, names: ShapeNames) -> Scanned:
    """One record from each text between two of the offsets into the data."""
    (offsets,), count = int64s(offsets), len(offsets) - 1
    room = _Room(count, int(offsets[-1] - offsets[0]), names)
    if call("chatmill_scan_texts", data, len(data), offsets, count, names.struct, room.struct) != count:
        raise IndexError(f"offsets that do not rise from 0 to {len(data)}")
    return room.scanned(data)


def count_lines(data: bytes | memoryview, start: int, stop: int) -> int:
    """How many lines there are in `data[start:stop]`; the last may lack its line feed."""
    return call("chatmill_count_lines", np.frombuffer(data, dtype=np.uint8), start, stop)
