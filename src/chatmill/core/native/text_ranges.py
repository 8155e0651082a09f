"""Questions about many texts in one buffer.

A text is a range of a buffer, `data[start : start + length]`, and valid UTF-8. One outside of the buffer is an
`IndexError`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.library import call, int64s

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

OUTSIDE = "a text lies outside of its buffer"
ROOM = 1024
"""Room for marks in the first search; it is repeated if there are more."""
AT_BEGIN, AT_END = 1, 2
"""Sides of texts that are trimmed."""
_SPACES = [chr(point).encode() for point in range(0x3001) if chr(point).isspace()]
_IS_SPACE = np.array([bytes([byte]) in _SPACES for byte in range(256)], dtype=np.uint8)
_WIDE_SPACES = b"".join(bytes([len(space)]) + space for space in _SPACES if len(space) > 1)


def not_ascii(data: Bytes, starts: Ints, lengths: Ints) -> NDArray[np.bool_]:
    """Flag texts that are not ASCII."""
    flags = np.empty(len(starts), dtype=np.bool_)
    _ask("chatmill_not_ascii", data, starts, lengths, flags)
    return flags


def other_characters(data: Bytes, starts: Ints, lengths: Ints, ranges: Ints) -> NDArray[np.bool_]:
    """Flag texts with a character that is not ASCII and in none of some ranges of code points.

    Args:
        data: The buffer.
        starts: Where each text begins.
        lengths: Its bytes.
        ranges: The first and the last code point of each range, one row a range, in order.
    """
    flags = np.empty(len(starts), dtype=np.bool_)
    (bounds,) = int64s(ranges.ravel())
    _ask("chatmill_other_characters", data, starts, lengths, bounds, len(bounds) // 2, flags)
    return flags


def characters(data: Bytes, starts: Ints, lengths: Ints) -> Ints:
    """Count the characters (code points) of each text."""
    counts = np.empty(len(starts), dtype=np.int64)
    _ask("chatmill_characters", data, starts, lengths, counts)
    return counts


def trimmed(data: Bytes, starts: Ints, lengths: Ints, byte: int | None, sides: int) -> tuple[Ints, Ints]:
    """Starts and lengths of the texts without an ASCII character at their sides, or (None) without white space.

    White space is what `str.strip` takes it for.
    """
    trims, wide = (_IS_SPACE, _WIDE_SPACES) if byte is None else ((np.arange(256) == byte).view(np.uint8), b"")
    begins, sizes = np.empty((2, len(starts)), dtype=np.int64)
    _ask("chatmill_trim", data, starts, lengths, trims, wide, len(wide), sides, begins, sizes)
    return begins, sizes


def distinct(data: Bytes, starts: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """Number the distinct texts; return each text's number, and the first text with each number.

    Numbers follow the order of first appearance.
    """
    which, firsts = np.empty((2, len(starts)), dtype=np.int64)
    table = np.full(1 << (2 * len(starts)).bit_length(), -1, dtype=np.int64)
    count = _ask("chatmill_distinct", data, starts, lengths, which, firsts, table, len(table))
    return which, firsts[:count]


def _ask(name: str, data: Bytes, starts: Ints, lengths: Ints, *more: Any) -> int:
    """Call a compiled function on all texts; `more` are its other arguments."""
    if len(starts) != len(lengths):
        raise ValueError(f"{len(starts)} starts and {len(lengths)} lengths")
    data = np.ascontiguousarray(data)
    result = call(name, data, len(data), *int64s(starts, lengths), len(starts), *more)
    if result < 0:
        raise IndexError(OUTSIDE)
    return result


def positions_of(mark: bytes, data: Bytes) -> Ints:
    """Find where a mark begins in a buffer, in order, without overlaps."""
    if not mark:
        raise ValueError("an empty mark is everywhere")
    data = np.ascontiguousarray(data)
    room = ROOM
    while True:
        positions = np.empty(room, dtype=np.int64)
        count = call("chatmill_find", data, len(data), mark, len(mark), positions, room)
        if count <= room:
            return positions[:count]
        room = count
