"""Walks the tries of a template in compiled code: which segments it writes for the first messages of a conversation."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.library import call, call_allocating, memory, struct
from chatmill.errors import ChatmillError

Asked = Callable[[int, int, int, int], int]
"""What is asked, and up to three numbers that say about what; the reply is a number, not negative."""
MAX_NAMES = 32
"""Of values in namespaces."""
MAX_NUMBERS = 6
"""In one value."""
MAX_SPACES = 32
"""Namespaces."""
MAX_REGISTERS = 64
"""Numbers that a loop hands to its iterations."""
NO_LOOP = -1
FIRST_UNKNOWN = -2
"""In place of a loop of the root: the first one in which an iteration is new."""
TOO_LONG = -2
_FAR = 1 << 31


class TooLongError(ChatmillError):
    """The renderings of a conversation are too long together, or take too many turns of loops inside of loops."""


class By(IntEnum):
    """What replies are kept by."""

    NUMBER = 0
    """The number of a message in one conversation."""
    CLASS = 1
    """The class of a message."""
    RECORD = 2
    """The tools and options of a record."""


class Does(IntEnum):
    """What a node does."""

    OF_MESSAGE = 0
    COMPARES = 1
    REMAINDER = 2
    POSITION = 3
    STATE = 4
    LOOP = 5
    SETS = 6
    MAKES = 7
    ASKED = 8


class Address(IntEnum):
    """What the message of a node is counted from."""

    OWN = 0
    FIRST = 1
    LAST = 2
    RECORD = 3


class Ask(IntEnum):
    """What a caller is asked."""

    MESSAGE = 0
    """The reply of a message (b) to the question of a column (a)."""
    STATE = 1
    """What the value of a recipe (a) looks like to a turn so many messages (b) before the one that made it."""
    TABLE = 2
    """The tries of a loop (a), with so many namespaces (b), for a turn so many messages (c) before the outer one."""
    OTHER = 3
    """The reply to a question (a) for a turn (b) of a rendering of so many messages (c)."""
    PLACED = 4
    """The segment (a) for a turn (b) of a rendering of so many messages (c)."""
    PROBED = 5
    """As `OTHER`, where the last message is a probe: its number is in the upper half of (a)."""


class Ended(IntEnum):
    """How a rendering ends."""

    KNOWN = 0
    UNKNOWN = 1
    """Something is new: the template must run."""
    REFUSED = 2
    FAILED = 3


@dataclass(eq=False)
class Renderings:
    """Renderings of the first messages of one conversation."""

    table: NDArray[np.int64]
    """As in replay.h."""
    outputs_of_all: NDArray[np.int32]
    is_keyed: bool
    """Whether all leaves are keyed."""

    @cached_property
    def _rows(self) -> list[list[int]]:
        rows: list[list[int]] = self.table[:, 4:].tolist()
        return rows

    @cached_property
    def whole(self) -> list[tuple[int, int]]:
        """The segments of the last of them, and the messages that they count from."""
        _, first, stop, _ = self._rows[-1]
        return self._pairs(first, stop)

    def ended(self, number: int) -> int:
        """Return how one of them ended."""
        return self._rows[number][0]

    @property
    def are_known(self) -> bool:
        """Whether nothing is new in any of them, and none is refused but for those with a probe."""
        ended = self.table[:, 4]
        return not (ended.any() and ended[(self.table[:, 3] < 0) | (ended != Ended.REFUSED)].any())

    @property
    def first_unknown(self) -> int | None:
        """The first of them in which something is new, or None."""
        (unknown,) = np.nonzero(self.table[:, 4] == Ended.UNKNOWN)
        return int(unknown[0]) if len(unknown) else None

    def leaves_whole(self, number: int) -> tuple[int, list[tuple[int, int]]]:
        """Return how many segments one of them has in common with the last one, and those that follow in it."""
        _, first, stop, same = self._rows[number]
        return same, self._pairs(first + same, stop)

    def outputs(self, number: int) -> list[tuple[int, int]]:
        """Return the segments of one of them."""
        same, following = self.leaves_whole(number)
        return [*self.whole[:same], *following]

    def _pairs(self, first: int, stop: int) -> list[tuple[int, int]]:
        if first == stop:
            return []
        flat = self._flat[2 * first : 2 * stop].tolist()
        return list(zip(flat[::2], flat[1::2], strict=True))

    @cached_property
    def _flat(self) -> memoryview:
        return self.outputs_of_all.data


class StateValue(NamedTuple):
    """A value in a namespace."""

    space: int
    name: int
    recipe: int
    own: int
    """The message of the turn that made it."""
    numbers: list[int]


class KnownTurns(NamedTuple):
    """The first turns of a loop of the root, in which nothing is new."""

    turns: int
    is_over: bool
    """Whether the loop ends after them."""
    is_keyed: bool
    outputs: list[tuple[int, int]]
    spaces: int
    """How many namespaces there are after them."""
    state: list[StateValue]
    loop: int
    """The id of the loop."""
    borders: tuple[int, int]
    """Where it starts, and where a range stops."""
    given: list[int]
    """The numbers that it hands to its iterations."""


_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int64, *(ctypes.c_int64,) * 4)


class Replayer:
    """The tries of one template."""

    def __init__(self, ask: Asked, absent: int, missing: int) -> None:
        """`absent` and `missing` are the replies of a value that is not there, and of a message that is not."""
        self._ask = ask
        self._error: BaseException | None = None
        self._callback = _CALLBACK(self._asked)
        self.handle = call("chatmill_replayer", self._callback, absent, missing)
        if not self.handle:
            raise MemoryError
        weakref.finalize(self, call, "chatmill_replayer_free", self.handle)
        self._outputs = struct(None)

    def _asked(self, question: int, a: int, b: int, c: int) -> int:
        try:
            return self._ask(question, a, b, c)
        except BaseException as error:
            self._error = error
            return -1

    def form(self, terms: Sequence[tuple[int, int]], constant: int) -> int:
        """Add a sum of bases with factors and return its number."""
        pairs = [number for term in terms for number in term]
        return self._kept("add_form", *_numbers(pairs, len(terms)), constant)

    def recipe(self, forms: Sequence[int], *, moves: bool, reply: int) -> int:
        """Add a way to make a value."""
        return self._kept("add_recipe", *_numbers(forms), moves, reply)

    def loop(self, shape: Sequence[int], recipes: Sequence[int]) -> int:
        """Add a loop: `shape` as in replay.h."""
        return self._kept("add_loop", _numbers(shape)[0], *_numbers(recipes))

    def node(self, does: Does, a: int = 0, b: int = 0, c: int = 0) -> int:
        """Add a node."""
        if not all(-_FAR <= number < _FAR for number in (a, b, c)):
            raise OverflowError
        return self._kept("add_node", does, a, b, c)

    def numbers(self, numbers: Sequence[int]) -> int:
        """Add numbers that a node points to."""
        return self._kept("add_numbers", *_numbers(numbers))

    def leaf(self, written: Sequence[int], *, is_refused: bool, breaks: bool, is_keyed: bool) -> int:
        """Add a leaf."""
        return self._kept("add_leaf", *_numbers(written), is_refused, breaks, is_keyed)

    def column(self, by: By) -> int:
        """Add a question whose replies are kept."""
        return self._kept("add_column", by)

    def link(self, parent: int, reply: int, child: int) -> None:
        """Have a reply lead from one node to another, or to ~leaf."""
        self._kept("link", parent, reply, child)

    def place(self, segment: int, *, by_count: bool) -> None:
        """Have a segment be asked for wherever it is written."""
        self._kept("place", segment, by_count)

    def other_conversation(self) -> None:
        """Forget the replies of messages by their numbers: it is another conversation that is asked now."""
        call("chatmill_other_conversation", self.handle)

    def forget_classes(self) -> None:
        """Forget all replies of messages: their classes are others now."""
        call("chatmill_forget_classes", self.handle)

    def _kept(self, function: str, *arguments: Any) -> int:
        return call_allocating(f"chatmill_{function}", self.handle, *arguments)

    def replay(self, record: int, classes: NDArray[np.int32], messages: int, requests: NDArray[np.int64]) -> Renderings:
        """Renderings of the first messages, each by the root's table, a reply, the number of messages, and a probe.

        `record` is a number for tools and options: what is known of them holds as long as it stays the same.
        `classes` are those of the messages, and of the probes after them. A probe is the last message of a rendering,
        in place of that of the conversation; -1 for none.
        """
        table = np.zeros((len(requests), 8), dtype=np.int64)
        table[:, :4] = requests
        shared = (self.handle, record, classes, messages)
        is_keyed = call("chatmill_replay", *shared, table, len(table), self._outputs)
        self._raise()
        if is_keyed == TOO_LONG:
            raise TooLongError
        flat = memory(int(self._outputs[0]), 2 * int(table[:, 6].max(initial=0)), np.int32)
        return Renderings(table, flat, bool(is_keyed))

    def turns(
        self, record: int, classes: NDArray[np.int32], messages: int, request: Sequence[int], loop: int
    ) -> KnownTurns | None:
        """Return the turns that are known of a loop of the root; None where what comes before it is not known.

        A request is the root's table, a reply, and the number of messages. The loop may be `FIRST_UNKNOWN`.
        """
        one, outputs = _numbers([*request, -1, 0, 0, 0, 0])[0], struct(None)
        found = np.zeros(9 + MAX_REGISTERS, dtype=np.int64)
        given = (self.handle, record, classes, messages, one)
        if loop == FIRST_UNKNOWN:
            call("chatmill_replay_turns", *given, loop, _FAR, found, outputs)
            self._raise()
            loop = int(found[4])
            if loop < 0:
                return None
        count = call("chatmill_replay_turns", *given, loop, _FAR, found, outputs)
        if count >= 0 and not found[0]:  # again, without the turn that is new: it has left something behind
            count = call("chatmill_replay_turns", *given, loop, count, found, outputs)
        self._raise()
        if count < 0:
            return None
        is_over, is_keyed, first, size, _, number, start, stop, given_count = found[:9].tolist()
        flat = memory(int(outputs[0]) + 8 * first, 2 * size, np.int32).tolist()
        rows, spaces = np.empty((MAX_SPACES * MAX_NAMES, 4 + MAX_NUMBERS), dtype=np.int64), np.zeros(1, dtype=np.int64)
        listed = rows[: call("chatmill_state", self.handle, rows, spaces)].tolist()
        state = [StateValue(row[0], row[1], row[2], row[3], row[4:]) for row in listed]
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        handed = found[9 : 9 + given_count].tolist()
        flags = bool(is_over), bool(is_keyed)
        return KnownTurns(count, *flags, pairs, int(spaces[0]), state, number, (start, stop), handed)

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _numbers(numbers: Sequence[int], count: int | None = None) -> tuple[Any, int]:
    return np.array(numbers, dtype=np.int64), len(numbers) if count is None else count
