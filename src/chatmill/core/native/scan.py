"""Lines of JSONL chats as columns, read by compiled code: every line is read exactly, or declined."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.library import library

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Flags = NDArray[np.bool_]

SMALLEST_MESSAGE = len(b'{"role":"tool","content":""}')
SMALLEST_CALL = len(b'{"function":{"name":"","arguments":""}}')


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scanned:
    """L lines with M messages in all; a text is a start in `text` and a length in bytes, -1 where there is none.

    A line that was declined (`read` is false) has no messages and no texts.
    """

    text: Bytes
    """All texts, as UTF-8 without escapes."""
    line_starts: Ints
    """Where each line begins in the data that was scanned."""
    line_stops: Ints
    """Where it ends, behind its line feed."""
    read: Flags
    message_offsets: Ints
    """L + 1 offsets into the messages."""
    id_starts: Ints
    id_lengths: Ints
    source_starts: Ints
    """Equal sources mostly have one start."""
    source_lengths: Ints
    tools_starts: Ints
    """In the data, not in `text`: the tools as they are written there, a list."""
    tools_lengths: Ints
    listed: Bytes
    """Tool definitions on lines of their own (see `core.tools.listed_tools`), of all records."""
    listed_starts: Ints
    listed_lengths: Ints
    """-1 where a record has no tools, or has some that Python must decode."""
    roles: Bytes
    """`RoleCode` of each message."""
    content_starts: Ints
    content_lengths: Ints
    reasoning_starts: Ints
    reasoning_lengths: Ints
    named: Flags
    """Whether a message has a name or the id of a call, and neither null nor empty."""
    call_offsets: Ints
    """M + 1 offsets into the calls."""
    name_starts: Ints
    name_lengths: Ints
    argument_starts: Ints
    argument_lengths: Ints


_PER_LINE = ("id_starts", "id_lengths", "source_starts", "source_lengths", "tools_starts", "tools_lengths")
_LISTED = ("listed_starts", "listed_lengths", "listed")
_PER_MESSAGE = ("content_starts", "content_lengths", "reasoning_starts", "reasoning_lengths")
_PER_CALL = ("name_starts", "name_lengths", "argument_starts", "argument_lengths")
_ARRAYS = (
    *("line_starts", "line_stops", "read", "message_offsets", *_PER_LINE),
    *("roles", *_PER_MESSAGE, "named", "call_offsets", *_PER_CALL, "text", *_LISTED),
)
_CAPACITIES = ("line_capacity", "message_capacity", "call_capacity")
_COUNTS = ("listed_capacity", "lines", "messages", "calls", "text_bytes", "listed_bytes")


class _Columns(ctypes.Structure):
    """The struct `columns` of columns.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _CAPACITIES),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
        *((name, ctypes.c_int64) for name in _COUNTS),
    )


def scan_lines(data: bytes | memoryview, start: int, stop: int) -> Scanned | None:
    """The lines in `data[start:stop]`, cut at line feeds alone; the last may lack its own. None without the library.

    Nothing outside of the range is looked at.
    """
    compiled = library()
    if compiled is None:
        return None
    if not 0 <= start <= stop <= len(data):
        raise IndexError(f"no range of {len(data)} bytes: {start} to {stop}")
    whole = np.frombuffer(data, dtype=np.uint8)
    address = whole.ctypes.data
    lines = compiled.chatmill_count_lines(address, start, stop)
    messages, calls = (stop - start) // SMALLEST_MESSAGE, (stop - start) // SMALLEST_CALL
    arrays: dict[str, NDArray[Any]] = {name: np.empty(lines, dtype=np.int64) for name in _PER_LINE}
    arrays |= {name: np.empty(messages, dtype=np.int64) for name in _PER_MESSAGE}
    arrays |= {name: np.empty(calls, dtype=np.int64) for name in _PER_CALL}
    arrays["line_starts"], arrays["line_stops"] = np.empty((2, lines), dtype=np.int64)
    arrays["read"] = np.empty(lines, dtype=np.bool_)
    arrays["message_offsets"] = np.empty(lines + 1, dtype=np.int64)
    arrays["roles"], arrays["named"] = np.empty(messages, dtype=np.uint8), np.empty(messages, dtype=np.bool_)
    arrays["call_offsets"] = np.empty(messages + 1, dtype=np.int64)
    arrays["text"] = np.empty(stop - start, dtype=np.uint8)
    arrays["listed_starts"], arrays["listed_lengths"] = np.empty((2, lines), dtype=np.int64)
    arrays["listed"] = np.empty(2 * (stop - start), dtype=np.uint8)  # at most one space behind every byte
    addresses = (arrays[name].ctypes.data for name in _ARRAYS)
    columns = _Columns(lines, messages, calls, *addresses, len(arrays["listed"]))
    if compiled.chatmill_scan(address, start, stop, ctypes.addressof(columns)) != lines:
        raise RuntimeError(f"{lines} lines were counted and {columns.lines} or more scanned: the data changed")
    return Scanned(**_trimmed(arrays, columns))


def count_lines(data: bytes, start: int, stop: int) -> int:
    """How many lines there are in `data[start:stop]`; the last may lack its line feed."""
    compiled = library()
    if compiled is None:
        feeds = int(np.count_nonzero(np.frombuffer(data, np.uint8)[start:stop] == ord("\n")))
        return feeds + (stop > start and data[stop - 1] != ord("\n"))
    return int(compiled.chatmill_count_lines(np.frombuffer(data, dtype=np.uint8).ctypes.data, start, stop))


def _trimmed(arrays: dict[str, NDArray[Any]], columns: _Columns) -> dict[str, NDArray[Any]]:
    """The parts of the arrays that were written; the rest was never touched, and so takes no memory."""
    sizes = dict.fromkeys(arrays, int(columns.lines))
    sizes |= dict.fromkeys((*_PER_MESSAGE, "roles", "named"), int(columns.messages))
    sizes |= dict.fromkeys(_PER_CALL, int(columns.calls))
    sizes |= {"message_offsets": columns.lines + 1, "call_offsets": columns.messages + 1, "text": columns.text_bytes}
    sizes["listed"] = int(columns.listed_bytes)
    return {name: array[: sizes[name]] for name, array in arrays.items()}
