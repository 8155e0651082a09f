"""Texts from the bodies of JSON strings, by compiled code: each is read exactly, or declined."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.library import library
from chatmill.core.texts import Texts

Ints = NDArray[np.int64]

SLACK = 32
"""Bytes that the compiled code may write behind the last text."""


def unescaped(data: bytes, starts: Ints, stops: Ints) -> tuple[Texts, NDArray[np.bool_]] | None:
    """The texts of JSON strings, given behind their opening and at their closing quotes; None without the library.

    Also which of them are such strings: the others (with another quote, a bad escape, broken UTF-8, a lone surrogate,
    an escaped NUL; or one of other letters than ASCII, within three bytes of the end of the data) are empty.
    """
    compiled = library()
    if compiled is None:
        return None
    begins, ends = (np.ascontiguousarray(places, dtype=np.int64) for places in (starts, stops))
    if len(begins) != len(ends):
        raise ValueError(f"{len(begins)} beginnings and {len(ends)} ends")
    text = np.empty(int(np.maximum(ends - begins, 0).sum()) + SLACK, dtype=np.uint8)
    text_starts, lengths = np.empty((2, len(begins)), dtype=np.int64)
    addresses = (array.ctypes.data for array in (text, text_starts, lengths))
    whole = np.frombuffer(data, dtype=np.uint8)
    used = compiled.chatmill_unescape(
        whole.ctypes.data, len(whole), begins.ctypes.data, ends.ctypes.data, len(begins), *addresses
    )
    return Texts(text[:used], text_starts, np.maximum(lengths, 0)), lengths >= 0
