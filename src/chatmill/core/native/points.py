"""Finds the token at which a byte of a text lies."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.library import library

Ints = NDArray[np.int64]


def token_points(
    ids: NDArray[np.int32],
    sizes: NDArray[np.int32],
    offsets: Ints,
    which: Ints,
    bytes_: Ints,
) -> Ints:
    """For each pair: the first token of text `which[i]`, counted among all, with at least `bytes_[i]` bytes before it.

    The tokens of a text are those between two offsets; `sizes` has the bytes of every id. Where there is no such token,
    the point is the end of the text.
    """
    ids, sizes = np.ascontiguousarray(ids, dtype=np.int32), np.ascontiguousarray(sizes, dtype=np.int32)
    offsets, which, bytes_ = (np.ascontiguousarray(column, dtype=np.int64) for column in (offsets, which, bytes_))
    points = np.empty(len(which), dtype=np.int64)
    found = library().chatmill_points(
        *(ids.ctypes.data, len(ids), sizes.ctypes.data, len(sizes), offsets.ctypes.data, len(offsets) - 1),
        *(which.ctypes.data, bytes_.ctypes.data, len(which), points.ctypes.data),
    )
    if found != len(which):
        raise IndexError("a text or an id lies outside its array")
    return points
