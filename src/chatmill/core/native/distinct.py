"""Gives equal texts the same number."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.library import library

Ints = NDArray[np.int64]
OUTSIDE = "a text lies outside of its buffer"


def distinct(data: NDArray[np.uint8], starts: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """For each text `data[start : start + length]` its number, and for each number the first text that has it.

    Equal texts have one number, and numbers follow the order of first appearance.
    """
    data = np.ascontiguousarray(data)
    count, begins, sizes = len(starts), *(np.ascontiguousarray(a, dtype=np.int64) for a in (starts, lengths))
    which, firsts = np.empty((2, count), dtype=np.int64)
    table = np.full(1 << (2 * count).bit_length(), -1, dtype=np.int64)
    addresses = (array.ctypes.data for array in (which, firsts, table))
    found = library().chatmill_distinct(
        data.ctypes.data, len(data), begins.ctypes.data, sizes.ctypes.data, count, *addresses, len(table)
    )
    if found < 0:
        raise IndexError(OUTSIDE)
    return which, firsts[:found]
