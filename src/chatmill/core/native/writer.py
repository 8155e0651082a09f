"""Writes the outputs of renderings as stretches of items, in compiled code."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.library import library

Ints = NDArray[np.int64]
NEVER = -2
"""In place of a stretch where only Python can write on."""
MAX_MARK = (1 << 13) - 1


class _Ended(IntEnum):
    """How writing ends."""

    WRITTEN = 0
    NEW_SEGMENT = 1
    NEW_MOVE = 2
    NOT_HERE = 3


class Asked(NamedTuple):
    """An output that is new behind what comes before it."""

    segment: int
    """-1: the end."""
    base: int
    mark: int
    seen: int
    """The last message before it; -1: none."""
    state: int
    before: int
    """The message that the state counts from."""
    context: int


class Described(NamedTuple):
    """What a segment shows."""

    owners: Sequence[int]
    """Messages that its texts are from, counted from its own."""
    shows_tools: bool


class Written(NamedTuple):
    """One sequence."""

    entries: Ints
    """Stretches and the messages that they count from."""
    shows_tools: bool


class Writer:
    """All that is known of the stretches of one template."""

    def __init__(self, describe: Callable[[int], Described], move: Callable[[Asked], tuple[int, int]]) -> None:
        """`describe` tells of a segment, and `move` which stretch an output becomes, and the state behind it."""
        compiled = library()
        assert compiled is not None
        self._compiled, self._describe, self._move = compiled, describe, move
        compiled.chatmill_writer.restype = ctypes.c_void_p
        self._handle = ctypes.c_void_p(compiled.chatmill_writer())
        if not self._handle:
            raise MemoryError
        self._found = np.zeros(7, dtype=np.int64)
        self._room = np.zeros(0, dtype=np.int64)

    def __del__(self) -> None:
        """Give the memory back."""
        self._compiled.chatmill_writer_free(self._handle)

    def write(self, roles: NDArray[np.uint8], outputs: NDArray[np.int32], marks: Sequence[int]) -> Written | None:
        """The sequence of a rendering; `marks` are outputs and what is trained of them. None where Python writes it."""
        count, found = len(outputs) // 2, self._found
        size = 2 * (count + 1)
        if len(self._room) < size:
            self._room = np.zeros(2 * size, dtype=np.int64)
        marked = (ctypes.c_int64 * len(marks))(*marks)
        given = (self._handle, roles.ctypes.data, len(roles), outputs.ctypes.data, count)
        places = (marked, len(marks) // 2, self._room.ctypes.data, found.ctypes.data)
        while (ended := self._compiled.chatmill_write(*given, *places)) != _Ended.WRITTEN:
            if ended == _Ended.NOT_HERE:
                return None
            self._learn(ended == _Ended.NEW_SEGMENT)
        made, tools = found[:2].tolist()
        return Written(self._room[: 2 * made].reshape(-1, 2).copy(), bool(tools))

    def _learn(self, is_segment: bool) -> None:
        asked = Asked(*self._found.tolist())
        if is_segment:
            own = self._describe(asked.segment)
            listed = (ctypes.c_int64 * len(own.owners))(*own.owners)
            given = (asked.segment, listed, len(own.owners), own.shows_tools)
            failed = self._compiled.chatmill_writer_segment(self._handle, *given)
        else:
            stretch, state = self._move(asked)
            at = self._at(asked)
            key = (asked.segment, asked.context, asked.state, at - asked.before)
            failed = self._compiled.chatmill_writer_move(self._handle, *key, stretch, state)
        if failed < 0:
            raise MemoryError

    def _at(self, asked: Asked) -> int:
        """The message that an output counts from, as `chatmill_write` finds it."""
        if asked.segment < 0:
            return asked.before
        is_owned = asked.base >= 0 or bool(self._describe(asked.segment).owners)
        return asked.base if is_owned else max(asked.seen, 0)
