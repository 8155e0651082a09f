"""Records of chats as columns, read by compiled code: every record is read exactly, or declined.

The records are lines of JSONL or a column of JSON texts, and a shape says what their fields are called.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import RoleCode
from chatmill.core.messages import TEXT_FIELDS, MessageColumns, sparse_weights
from chatmill.core.native.library import call, int64s, struct
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
MAX_TURNS = 8
"""Messages that are fields of a record, as in records.h."""
MAX_JOINED = 4
"""Fields of one of them."""


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
    ANSWER = 9
    """A list of messages, one message, or a text that the assistant says."""
    QUESTION = 10
    """A list of messages, or a text that the user says, unless it is empty. Under such names there may be neither."""
    ONLY_NULL = 11
    """With anything but null in it the record is declined."""
    REPEATED = 12
    """A list of messages; unless it is written like the answer, or empty, the record is declined."""
    SCORE = 16
    """A number about the answers. The second such name has 17, and so on, up to 16 of them."""
    FINISH_REASON = 32 + 13
    """From here on fields of the one call that a record is; its prompt may also be that of the calls of a list."""
    TOKEN_IDS = 32 + 14
    PROMPT_TOKEN_IDS = 32 + 15
    LOGPROBS = 32 + 16
    TURN = 64
    """A text that is a message. The first field of the second one has 68, and its second field, which is joined to the
    first with a line feed unless it is empty, 69. Names of roles stand for the roles of these messages, in order."""


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
    PASSED = 17
    """A field that is passed over, whatever is in it."""
    ONLY_NULL = 18
    """With anything but null in it the record is declined."""
    EMPTY = 19
    """With anything in it the record is declined; else it is like a field without a name here."""


_STRUCTURED = MessageField.EMPTY + 1


class ShapeNames:
    """What a shape calls the fields of its records and messages, and the roles."""

    def __init__(
        self, record: Mapping[str, int], message: Mapping[str, MessageField], roles: Mapping[str, RoleCode]
    ) -> None:
        """More names than there is room for are a `ValueError`."""
        if max(len(record), len(message), len(roles)) > MAX_NAMES:
            raise ValueError(f"more than {MAX_NAMES} names of a kind")
        names = [f'{name}"'.encode() for name in (*record, *message, *roles)]
        turns = [len('"":""') + len(name) for name, meaning in record.items() if meaning >= RecordField.TURN]
        listed = len('{"":"","":""}') + sum(sorted(map(len, message))[:2]) + min(map(len, roles))
        self.smallest_message = min(turns, default=listed)
        """Bytes that one in a list has at least. Room is made for as many as there can be: too much costs time."""
        self._text = np.frombuffer(b"".join(names), dtype=np.uint8)
        self._lengths = np.array([len(name) for name in names], dtype=np.int64)
        self._meanings = np.array([*record.values(), *message.values(), *roles.values()], dtype=np.uint8)
        counts = (len(record), len(message), len(roles))
        self.struct = struct(*counts, self._text, self._lengths, self._meanings)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scanned:
    """R records with their messages; one that was declined (`read` is false) has no messages and no texts."""

    line_starts: Ints
    """Where the line of each record begins in the data that was scanned."""
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
    extras: NDArray[np.void]
    """Fields of messages that mean nothing here, in order (`EXTRA`)."""
    scores: NDArray[np.void]
    """Numbers of records (`SCORE`)."""


def _texts(unit: str, *names: str) -> list[tuple[str, str, Any]]:
    """Return the two arrays of each column of texts."""
    return [(f"{name}_{part}", unit, np.int64) for name in names for part in ("starts", "lengths")]


_WEIGHT = np.dtype([("message", np.int64), ("value", np.float64)])
EXTRA = np.dtype(
    [(name, np.int64) for name in ("message", "start", "length", "value", "value_length", "holds", "in_part")]
)
"""The message, where its name and its value are in the data, whether there is something in it, and whether it is of a
part of the content."""
SCORE = np.dtype([("record", np.int64), ("which", np.int64), ("value", np.float64)])
"""The record, and which of its scores it is: 0 for `RecordField.SCORE`."""
_ARRAYS: tuple[tuple[str, str, Any], ...] = (
    ("line_starts", "line", np.int64),
    ("line_stops", "line", np.int64),
    ("read", "line", np.bool_),
    ("offsets", "line", np.int64),
    *_texts("line", "ids", "sources", "tools", "listed", "options"),
    ("roles", "message", np.uint8),
    *_texts("message", "contents", "reasoning"),
    ("call_offsets", "message", np.int64),
    *_texts("call", "call_names", "call_arguments", "call_ids"),
    ("call_orders", "call", np.uint8),
    ("rare", "rare", np.dtype((np.int64, 4))),
    ("weights", "weight", _WEIGHT),
    ("text", "text", np.uint8),
    ("json", "json", np.uint8),
    ("unused", "unused", np.dtype((np.int64, 3))),
    ("extras", "extra", EXTRA),
    ("scores", "score", SCORE),
)
"""The arrays of the struct `columns` in json.h: what each has entries for, and their type."""


_AS_THEY_ARE = ("line_starts", "line_stops", "read", "offsets", "unused", "extras", "scores")


def _scan(
    function: str, data: Bytes, arguments: Sequence[Any], lines: int, size: int, names: ShapeNames
) -> Scanned | None:
    """Scan records of `size` bytes in all; None if they are not as many as `lines`.

    Arrays have room for all that so many bytes can hold; what is never written to takes no memory.
    """
    messages = size // names.smallest_message + lines + 1
    room = {"line": lines, "message": messages, "call": size // SMALLEST_CALL + 1, "rare": size // RARE + 16}
    room |= {"weight": messages, "text": 2 * size + SLACK, "json": 2 * size, "unused": size // SMALLEST_FIELD + 1}
    room |= {"extra": size // SMALLEST_FIELD + 1, "score": size // SMALLEST_FIELD + 1}
    arrays = {name: np.empty(room[unit] + 1, dtype) for name, unit, dtype in _ARRAYS}  # offsets are one more
    columns = struct(*room.values(), *arrays.values(), *(0 for _ in room))
    if call(function, data, *arguments, names.struct, columns) != lines:
        return None
    counts = dict(zip(room, columns[-len(room) :].tolist(), strict=True))
    cut = {name: arrays[name][: counts[unit] + name.endswith("offsets")] for name, unit, _ in _ARRAYS}
    text, json, rare, messages = cut["text"], cut["json"], cut["rare"], counts["message"]

    def texts(name: str, buffer: Bytes = text) -> OptionalTexts:
        return OptionalTexts(buffer, cut[f"{name}_starts"], cut[f"{name}_lengths"])

    contents, reasoning = texts("contents"), texts("reasoning")
    seldom: dict[str, Any] = {
        column: _rare_texts(rare, MessageField[name.upper()], messages, text)
        for name, column in (*TEXT_FIELDS.items(), *((name, name) for name in NUMBER_FIELDS))
    }
    return Scanned(
        **{name: cut[name] for name in _AS_THEY_ARE},
        ids=texts("ids"),
        sources=texts("sources"),
        tools=texts("tools", data),
        listed=texts("listed", json),
        options=texts("options", json),
        messages=replace(
            MessageColumns.plain(cut["roles"], contents.texts),
            has_content=contents.present,
            reasoning=reasoning.texts,
            has_reasoning=reasoning.present,
            **seldom,
            weights=sparse_weights(messages, dict(cut["weights"].tolist())),
            structured=_rare_texts(rare, _STRUCTURED, messages, json),
            call_offsets=cut["call_offsets"],
            call_names=texts("call_names").texts,
            call_arguments=texts("call_arguments").texts,
            call_ids=texts("call_ids"),
            call_orders=cut["call_orders"],
        ),
    )


def _rare_texts(rare: Ints, field: int, count: int, text: Bytes) -> OptionalTexts:
    chosen = rare[rare[:, 1] == field] if len(rare) else rare
    return OptionalTexts.sparse(count, chosen[:, 0], Texts(text, chosen[:, 2], chosen[:, 3]))


def scan_lines(data: bytes | memoryview, start: int, stop: int, names: ShapeNames, lines: int | None = None) -> Scanned:
    """Scan the lines in `data[start:stop]`, cut at line feeds alone; the last may lack its own.

    Nothing outside the range is read. `lines` is their number, if the caller has counted them.
    """
    _check_range(data, start, stop)
    whole = np.frombuffer(data, dtype=np.uint8)
    lines = count_lines(data, start, stop) if lines is None else max(lines, 0)
    scanned = _scan("chatmill_scan", whole, (start, stop), lines, stop - start, names)
    if scanned is None:
        raise RuntimeError(f"{lines} lines were counted and others scanned: the data changed")
    return scanned


def scan_texts(data: Bytes, offsets: Ints, names: ShapeNames) -> Scanned:
    """Scan one record from each text between two offsets into the data."""
    (offsets,), count = int64s(offsets), len(offsets) - 1
    if count < 0 or offsets[0] < 0 or offsets[-1] > len(data) or (offsets[1:] < offsets[:-1]).any():
        raise IndexError(f"offsets that do not rise from 0 to {len(data)}")
    size = int(offsets[-1] - offsets[0])
    scanned = _scan("chatmill_scan_texts", data, (len(data), offsets, count), count, size, names)
    if scanned is None:
        raise IndexError(f"offsets that do not rise from 0 to {len(data)}")
    return scanned


def count_lines(data: bytes | memoryview, start: int, stop: int) -> int:
    """Count the lines in `data[start:stop]`; the last may lack its line feed."""
    _check_range(data, start, stop)
    return call("chatmill_count_lines", np.frombuffer(data, dtype=np.uint8), start, stop)


class _Scratch(threading.local):
    """Memory for one call, of each thread: making it takes as long as reading a short record."""

    def __init__(self) -> None:
        self.array = np.empty(1 << 16, dtype=np.uint8)


_SCRATCH = _Scratch()


def is_exact_json(data: bytes) -> bool:
    """Return whether nothing of a JSON value can be lost: no key stands twice, and float64 holds every number.

    False where that is not sure, and where it is no JSON.
    """
    line = data.strip().replace(b"\n", b" ")  # no string of JSON has a line feed in it
    room = _SCRATCH.array
    if len(line) >= len(room):
        room = np.empty(len(line) + 1, dtype=np.uint8)
    return bool(call("chatmill_is_exact", line, len(line), room))


def _check_range(data: bytes | memoryview, start: int, stop: int) -> None:
    if not 0 <= start <= stop <= len(data):
        raise IndexError(f"no range of {len(data)} bytes: {start} to {stop}")
