"""Finds the token at which a byte of a text lies."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.library import call, int64s

Ints = NDArray[np.int64]


def token_points(
    ids: NDArray[np.int32],
    sizes: NDArray[np.int32],
    offsets: Ints,
    which: Ints,
    bytes_: Ints,
) -> Ints:
    """For each pair: the first token of text `which[i]`, counted among all, with at least `bytes_[i]` bytes before it.

    The tokens of a text are those between two offsets; `sizes` has the bytes of every id. If there is no such token,
    the point is the end of the text.
    """
    ids, sizes = np.ascontiguousarray(ids, dtype=np.int32), np.ascontiguousarray(sizes, dtype=np.int32)
    offsets, which, bytes_ = int64s(offsets, which, bytes_)
    points = np.empty(len(which), dtype=np.int64)
    texts = (ids, len(ids), sizes, len(sizes), offsets, len(offsets) - 1)
    if call("chatmill_points", *texts, which, bytes_, len(which), points) != len(which):
        raise IndexError("a text or an id lies outside its array")
    return points
