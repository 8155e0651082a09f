"""Puts texts together of parts, and keeps equal ones once.

Many pieces of a batch are equal: system prompts and tools, which records share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.gather import OUTSIDE, contiguous
from chatmill.core.native.library import library

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


class Pieces(NamedTuple):
    """The pieces that differ from each other, and where the parts are in them."""

    data: Bytes
    """All pieces, one behind the other, in the order in which they are met."""
    offsets: Ints
    """Where each begins, and where the last one ends."""
    not_ascii: NDArray[np.bool_]
    """Of each piece."""
    numbers: Ints
    """For each part the number of its piece."""
    before: Ints
    """For each part the bytes of its piece that come before it."""


def joined_pieces(
    buffers: Sequence[Bytes], which: Bytes, starts: Ints, lengths: Ints, opens: NDArray[np.bool_]
) -> Pieces:
    """Part `i` is `buffers[which[i]][starts[i] : starts[i] + lengths[i]]`, and begins a new piece where `opens[i]`.

    The first part begins one in any case. A part outside its buffer is an `IndexError`.
    """
    parts = len(which)
    if not len(starts) == len(lengths) == len(opens) == parts:
        raise ValueError(f"{parts} buffers of parts, {len(starts)} starts, {len(lengths)} lengths, {len(opens)} flags")
    buffers = contiguous(buffers)
    which, opened = np.ascontiguousarray(which, dtype=np.uint8), np.ascontiguousarray(opens, dtype=np.bool_)
    begins, sizes = (np.ascontiguousarray(numbers, dtype=np.int64) for numbers in (starts, lengths))
    addresses = np.array([buffer.ctypes.data for buffer in buffers], dtype=np.uintp)
    rooms = np.array([len(buffer) for buffer in buffers], dtype=np.int64)
    out = np.empty(max(int(sizes.sum()), 0), dtype=np.uint8)
    most = int(np.count_nonzero(opened[1:])) + bool(parts)
    numbers, before = np.empty((2, parts), dtype=np.int64)
    offsets, highs = np.empty(most + 1, dtype=np.int64), np.empty(most, dtype=np.bool_)
    table = np.full(1 << (2 * most).bit_length(), -1, dtype=np.int64)
    given = (array.ctypes.data for array in (which, begins, sizes, opened))
    made = (array.ctypes.data for array in (numbers, before, offsets, highs, table))
    found = library().chatmill_pieces(
        addresses.ctypes.data,
        rooms.ctypes.data,
        len(buffers),
        *given,
        parts,
        out.ctypes.data,
        len(out),
        *made,
        len(table),
    )
    if found < 0:
        raise IndexError(OUTSIDE)
    return Pieces(out[: offsets[found]], offsets[: found + 1], highs[:found], numbers, before)
