"""Questions about many texts in one buffer: in compiled code where it is there, else by Python, with the same result.

A text is a range of a buffer, `data[start : start + length]`, and valid UTF-8. One outside of the buffer is an
`IndexError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    compiled = library()
    if compiled is None or not data.flags.c_contiguous:
        return np.array([not text.isascii() for text in _each(data, starts, lengths)], dtype=np.bool_)
    found = np.empty(len(starts), dtype=np.bool_)
    _ask(compiled.chatmill_not_ascii, data, starts, lengths, found.ctypes.data)
    return found


def characters(data: Bytes, starts: Ints, lengths: Ints) -> Ints:
    """How many characters (code points) each text has."""
    compiled = library()
    if compiled is None or not data.flags.c_contiguous:
        return np.array([len(text.decode()) for text in _each(data, starts, lengths)], dtype=np.int64)
    counts = np.empty(len(starts), dtype=np.int64)
    _ask(compiled.chatmill_characters, data, starts, lengths, counts.ctypes.data)
    return counts


def trimmed(data: Bytes, starts: Ints, lengths: Ints, byte: int | None, sides: int) -> tuple[Ints, Ints]:
    """Starts and lengths of the texts without an ASCII character at their sides, or (None) without white space.

    White space is what `str.strip` takes it for.
    """
    compiled = library()
    if compiled is None or not data.flags.c_contiguous:
        return _trimmed_by_python(data, starts, lengths, None if byte is None else chr(byte), sides)
    trims, wide = (_IS_SPACE, _WIDE_SPACES) if byte is None else ((np.arange(256) == byte).view(np.uint8), b"")
    begins, sizes = np.empty((2, len(starts)), dtype=np.int64)
    rules = (trims.ctypes.data, wide, len(wide), sides)
    _ask(compiled.chatmill_trim, data, starts, lengths, *rules, begins.ctypes.data, sizes.ctypes.data)
    return begins, sizes


def _ask(function: Callable[..., int], data: Bytes, starts: Ints, lengths: Ints, *more: Any) -> None:
    """Have a compiled function look at every text; `more` are its other arguments."""
    if len(starts) != len(lengths):
        raise ValueError(f"{len(starts)} starts and {len(lengths)} lengths")
    begins, sizes = (np.ascontiguousarray(numbers, dtype=np.int64) for numbers in (starts, lengths))
    if function(data.ctypes.data, len(data), begins.ctypes.data, sizes.ctypes.data, len(begins), *more) < 0:
        raise IndexError(OUTSIDE)


def _trimmed_by_python(
    data: Bytes, starts: Ints, lengths: Ints, character: str | None, sides: int
) -> tuple[Ints, Ints]:
    heads, sizes = [], []
    for raw in _each(data, starts, lengths):
        text = raw.decode()
        begun = text.lstrip(character) if sides & AT_BEGIN else text
        ended = begun.rstrip(character) if sides & AT_END else begun
        heads.append(len(raw) - len(begun.encode()))
        sizes.append(len(ended.encode()))
    return starts + np.array(heads, dtype=np.int64), np.array(sizes, dtype=np.int64)


def _each(data: Bytes, starts: Ints, lengths: Ints) -> Iterator[bytes]:
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        if start < 0 or length < 0 or start + length > len(data):
            raise IndexError(OUTSIDE)
        yield data[start : start + length].tobytes()
