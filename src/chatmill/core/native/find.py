"""Finds a mark in a buffer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.library import library

ROOM = 1024
"""Room for the first search; with more marks the search is repeated with enough room."""


def positions_of(mark: bytes, data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Where a mark begins in a buffer, in order; marks that overlap the one before are not looked for."""
    data = np.ascontiguousarray(data)
    room = ROOM
    while True:
        found = np.empty(room, dtype=np.int64)
        count = library().chatmill_find(data.ctypes.data, len(data), mark, len(mark), found.ctypes.data, room)
        if count <= room:
            return found[:count]
        room = count
