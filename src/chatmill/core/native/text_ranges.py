"""Questions about many texts in one buffer.

A text is a range of a buffer, `data[start : start + length]`, and valid UTF-8. One outside of the buffer is an
`IndexError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.library import library

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

OUTSIDE = "a text lies outside of its buffer"
AT_BEGIN, AT_END = 1, 2
"""Sides of texts that are trimmed."""
_SPACES = [chr(point).encode() for point in range(0x3001) if chr(point).isspace()]
_IS_SPACE = np.array([bytes([byte]) in _SPACES for byte in range(256)], dtype=np.uint8)
_WIDE_SPACES = b"".join(bytes([len(space)]) + space for space in _SPACES if len(space) > 1)


def not_ascii(data: Bytes, starts: Ints, lengths: Ints) -> NDArray[np.bool_]:
    """Which texts are not ASCII."""
    found = np.empty(len(starts), dtype=np.bool_)
    _ask(library().chatmill_not_ascii, data, starts, lengths, found.ctypes.data)
    return found


def characters(data: Bytes, starts: Ints, lengths: Ints) -> Ints:
    """How many characters (code points) each text has."""
    counts = np.empty(len(starts), dtype=np.int64)
    _ask(library().chatmill_characters, data, starts, lengths, counts.ctypes.data)
    return counts


def trimmed(data: Bytes, starts: Ints, lengths: Ints, byte: int | None, sides: int) -> tuple[Ints, Ints]:
    """Starts and lengths of the texts without an ASCII character at their sides, or (None) without white space.

    White space is what `str.strip` takes it for.
    """
    trims, wide = (_IS_SPACE, _WIDE_SPACES) if byte is None else ((np.arange(256) == byte).view(np.uint8), b"")
    begins, sizes = np.empty((2, len(starts)), dtype=np.int64)
    rules = (trims.ctypes.data, wide, len(wide), sides)
    _ask(library().chatmill_trim, data, starts, lengths, *rules, begins.ctypes.data, sizes.ctypes.data)
    return begins, sizes


def _ask(function: Callable[..., int], data: Bytes, starts: Ints, lengths: Ints, *more: Any) -> None:
    """Have a compiled function look at every text; `more` are its other arguments."""
    if len(starts) != len(lengths):
        raise ValueError(f"{len(starts)} starts and {len(lengths)} lengths")
    data = np.ascontiguousarray(data)
    begins, sizes = (np.ascontiguousarray(numbers, dtype=np.int64) for numbers in (starts, lengths))
    if function(data.ctypes.data, len(data), begins.ctypes.data, sizes.ctypes.data, len(begins), *more) < 0:
        raise IndexError(OUTSIDE)
