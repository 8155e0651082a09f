"""Writes the sequences of conversations as stretches of items, in compiled code."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.library import call, memory, struct
from chatmill.core.native.replayer import FoundAnswers, Renderings, Replayer, known_conversation

Ints = NDArray[np.int64]
NOT_THERE = -1
"""In place of marks where a longer rendering does not have an answer."""
NEVER = -2
"""In place of a stretch or of marks where only Python can write on."""
MAX_MARK = (1 << 13) - 1


class _Ended(IntEnum):
    """How writing ends."""

    WRITTEN = 0
    NEW_SEGMENT = 1
    NEW_MOVE = 2
    NEW_ANSWER = 3
    NEW_HELD = 4
    NOT_HERE = 5


class Asked(NamedTuple):
    """An output that is new after what comes before it."""

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
    begins_with_end: bool
    """Whether its text begins with what ends an answer."""


Marks = tuple[int, ...]
"""Pairs of an output, counted from where P(i) and A(i) part, and a number for what is trained of it."""


class Marked(NamedTuple):
    """An answer in A(i)."""

    end: int
    """The output that it ends in, counted as in marks."""
    marks: Marks
    cut: Marks
    """The marks where a sequence ends with the answer."""
    voice: int
    """What it is where it has no marks, in place of one; 0 if only Python knows. One more before an end, if the next
    segment begins with what ends an answer; two more where it is trained in the form that F has it in."""


AskedAnswer = Callable[[int], Marked | int | None]
"""Says what is known of an answer by its key, or NEVER; None where more than the key decides it."""
AskedHeld = Callable[[int, int, tuple[int, int]], Marks | int | None]
"""The same of an answer in the rendering of a later one, -1 for F: its marks there, NOT_THERE or NEVER."""


class Written(NamedTuple):
    """The sequences of a conversation."""

    sizes: tuple[int, ...]
    """How many entries each has."""
    entries: Ints
    """Stretches and the messages that they count from."""
    changed: int
    """Answers that F does not have."""
    shows_tools: bool


class Writer:
    """All that is known of the stretches of one template."""

    def __init__(self, describe: Callable[[int], Described], move: Callable[[Asked], tuple[int, int]]) -> None:
        """`describe` tells of a segment, and `move` which stretch an output becomes, and the state after it."""
        self._describe, self._move = describe, move
        self._handle = call("chatmill_writer")
        if not self._handle:
            raise MemoryError
        weakref.finalize(self, call, "chatmill_writer_free", self._handle)
        self._found = np.zeros(7, dtype=np.int64)

    @property
    def size(self) -> int:
        """How many answers are known."""
        return call("chatmill_writer_size", self._handle)

    def write(
        self,
        replayer: Replayer,
        known: tuple[Renderings, FoundAnswers],
        roles: NDArray[np.uint8],
        asked: tuple[AskedAnswer, AskedHeld],
        *,
        has_whole: bool,
        in_one: bool,
    ) -> Written | None:
        """All sequences of a conversation; None where Python writes them.

        `has_whole`: F is one of them whether or not it trains an answer. `in_one`: nothing else is.
        """
        found, (renderings, answers) = self._found, known
        conversation = known_conversation(renderings, answers, roles)
        entries, sizes = struct(None), struct(None)
        given = (self._handle, replayer.handle, conversation, has_whole, in_one, entries, sizes, found)
        while (ended := call("chatmill_write", *given)) != _Ended.WRITTEN:
            if ended == _Ended.NOT_HERE:
                return None
            if ended in (_Ended.NEW_SEGMENT, _Ended.NEW_MOVE):
                self._learn(ended == _Ended.NEW_SEGMENT)
            elif not self._learn_answer(answers, asked, is_held=ended == _Ended.NEW_HELD):
                return None
        sequences, count, changed, tools = found[:4].tolist()
        listed = memory(int(sizes[0]), sequences, np.int64).tolist()
        return Written(tuple(listed), memory(int(entries[0]), 2 * count, np.int64).reshape(-1, 2), changed, bool(tools))

    def _learn_answer(self, found: FoundAnswers, asked: tuple[AskedAnswer, AskedHeld], *, is_held: bool) -> bool:
        """Keep what is said of an answer; whether anything is."""
        number, longer, *keys = self._found[:4].tolist()
        if is_held:
            held = asked[1](number, longer, (keys[0], keys[1]))
            if held is not None:
                self._keep("held", *keys, held if isinstance(held, int) else self._marks(held))
            return held is not None
        own = asked[0](number)
        if isinstance(own, Marked):
            told = (own.end, self._marks(own.marks), self._marks(own.cut), own.voice)
            self._keep("answer", found.rows[number].key, *told)
        elif own is not None:
            self._keep("answer", found.rows[number].key, 0, own, own, 0)
        return own is not None

    def _marks(self, pairs: Marks) -> int:
        return self._keep("marks", np.array(pairs, dtype=np.int64), len(pairs) // 2)

    def _learn(self, is_segment: bool) -> None:
        asked = Asked(*self._found.tolist())
        if is_segment:
            own = self._describe(asked.segment)
            listed = np.array(own.owners, dtype=np.int64)
            self._keep("segment", asked.segment, listed, len(own.owners), own.shows_tools, own.begins_with_end)
        else:
            stretch, state = self._move(asked)
            by = self._at(asked) - asked.before
            self._keep("move", asked.segment, asked.context, asked.state, by, stretch, state)

    def _keep(self, what: str, *given: object) -> int:
        number = call(f"chatmill_writer_{what}", self._handle, *given)
        if number < 0:
            raise MemoryError
        return number

    def _at(self, asked: Asked) -> int:
        """The message that an output counts from, as `chatmill_write` finds it."""
        if asked.segment < 0:
            return asked.before
        is_owned = asked.base >= 0 or bool(self._describe(asked.segment).owners)
        return asked.base if is_owned else max(asked.seen, 0)
