"""Finds a mark in a buffer: in compiled code where it is there, else by Python, with the same result."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.library import library

ROOM = 1024
"""Room for the first search; with more marks the search is repeated with enough room."""


def positions_of(mark: bytes, data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Where a mark begins in a buffer, in order; marks that overlap the one before are not looked for."""
    compiled = library()
    if compiled is None or not data.flags.c_contiguous:
        return positions_by_python(mark, data)
    room = ROOM
    while True:
        found = np.empty(room, dtype=np.int64)
        count = compiled.chatmill_find(data.ctypes.data, len(data), mark, len(mark), found.ctypes.data, room)
        if count <= room:
            return found[:count]
        room = count


def positions_by_python(mark: bytes, data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """What `positions_of` gives, slower."""
    raw, found = data.tobytes(), []
    at = raw.find(mark)
    while at >= 0:
        found.append(at)
        at = raw.find(mark, at + len(mark))
    return np.array(found, dtype=np.int64)
