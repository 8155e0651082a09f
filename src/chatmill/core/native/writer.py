"""Writes the documents of conversations as stretches of items, in compiled code."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.library import call, call_allocating, memory, struct
from chatmill.core.native.replayer import FoundAnswers, Renderings, Replayer, known_conversation

Ints = NDArray[np.int64]
NOT_THERE = -1
"""In place of marks where a longer rendering does not have an answer."""
NO_STOP = -1
"""In place of the segment of a stop."""
NEVER = -2
"""In place of a stretch or of marks where only Python can write on."""
MAX_MARK = (1 << 12) - 1
ENDING = 1 << 30
"""In the context of an output that begins with what ends the answer before it, where that is trained."""


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
    ends_with_end: bool


Marks = tuple[int, ...]
"""Pairs of an output, counted from where P(i) and A(i) part, and a number for what is trained of it."""


class Marked(NamedTuple):
    """An answer in A(i)."""

    end: int
    """The output that it ends in, counted as in marks."""
    marks: Marks
    cut: Marks
    """The marks where a document ends with the answer."""
    voice: int
    """What it is where it has no marks, in place of one; 0 if only Python knows. One more before an end, if the next
    segment begins with what ends an answer; and two more where it is trained in the form that F has it in."""
    stop: int
    """The segment of a stop that is added where a document ends with the answer, and that it ends in; or `NO_STOP`."""


AskedAnswer = Callable[[int], Marked | int | None]
"""Says what is known of an answer by its key, or NEVER; None where more than the key decides it."""
AskedHeld = Callable[[int, int, tuple[int, int]], Marks | int | None]
"""The same of an answer in the rendering of a later one, -1 for F: its marks there, NOT_THERE or NEVER."""


class Written(NamedTuple):
    """The documents of a conversation."""

    sizes: tuple[int, ...]
    """How many entries each has."""
    entries: Ints
    """Stretches and the messages that they count from."""
    changed: int
    """Answers that F does not have."""
    shows_tools: bool
    stops: int
    """Documents that a stop was added to."""
    untrained: int
    """Answers that F does not have after their own prompt, where there is nothing but F."""


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
        self._entries, self._sizes = struct(None), struct(None)

    @property
    def size(self) -> int:
        """How many answers are known."""
        return call("chatmill_writer_size", self._handle)

    def write(
        self,
        replayer: Replayer,
        replayed: tuple[Renderings, FoundAnswers],
        roles: NDArray[np.uint8],
        callbacks: tuple[AskedAnswer, AskedHeld],
        *,
        has_whole: bool,
        in_one: bool,
    ) -> Written | None:
        """Write all documents of a conversation; None if Python must write them.

        `has_whole`: F is one of them whether or not it trains an answer. `in_one`: it is the only one.
        """
        out, (renderings, answers) = self._found, replayed
        conversation = known_conversation(renderings, answers, roles)
        arguments = (self._handle, replayer.handle, conversation, has_whole, in_one, self._entries, self._sizes, out)
        while (ended := call("chatmill_write", *arguments)) != _Ended.WRITTEN:
            if ended == _Ended.NOT_HERE:
                return None
            if ended in (_Ended.NEW_SEGMENT, _Ended.NEW_MOVE):
                self._learn(ended == _Ended.NEW_SEGMENT)
            elif not self._learn_answer(answers, callbacks, is_held=ended == _Ended.NEW_HELD):
                return None
        documents, count, changed, tools, stops, untrained = out[:6].tolist()
        sizes = memory(int(self._sizes[0]), documents, np.int64).tolist()
        entries = memory(int(self._entries[0]), 2 * count, np.int64).reshape(-1, 2)
        return Written(tuple(sizes), entries, changed, bool(tools), stops, untrained)

    def _learn_answer(self, answers: FoundAnswers, callbacks: tuple[AskedAnswer, AskedHeld], *, is_held: bool) -> bool:
        """Store what a callback knows of an answer; return whether it knows anything."""
        number, longer, *keys = self._found[:4].tolist()
        if is_held:
            marks = callbacks[1](number, longer, (keys[0], keys[1]))
            if marks is not None:
                self._keep("held", *keys, marks if isinstance(marks, int) else self._marks(marks))
            return marks is not None
        answer = callbacks[0](number)
        if isinstance(answer, Marked):
            columns = (answer.end, self._marks(answer.marks), self._marks(answer.cut), answer.voice, answer.stop)
            self._keep("answer", answers.row(number).key, *columns)
        elif answer is not None:
            self._keep("answer", answers.row(number).key, 0, answer, answer, 0, NO_STOP)
        return answer is not None

    def _marks(self, pairs: Marks) -> int:
        return self._keep("marks", np.array(pairs, dtype=np.int64), len(pairs) // 2)

    def _learn(self, is_segment: bool) -> None:
        output = Asked(*self._found.tolist())
        if is_segment:
            segment = self._describe(output.segment)
            listed = np.array(segment.owners, dtype=np.int64)
            self._keep("segment", output.segment, listed, len(listed), *segment[1:])
        else:
            stretch, state = self._move(output)
            by = self._at(output) - output.before
            self._keep("move", output.segment, output.context, output.state, by, stretch, state)

    def _keep(self, function: str, *arguments: object) -> int:
        return call_allocating(f"chatmill_writer_{function}", self._handle, *arguments)

    def _at(self, output: Asked) -> int:
        """Return the message that an output counts from, as `chatmill_write` finds it."""
        if output.segment < 0:
            return output.before
        is_owned = output.base >= 0 or bool(self._describe(output.segment).owners)
        return output.base if is_owned else max(output.seen, 0)
