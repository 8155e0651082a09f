"""Where the prompts and answers of one conversation part, all at once.

P(i) and A(i) are looked at from the last fragment with text of a message that both begin with. What is there in both,
as it is seen from message i, is the *branch* of an answer. Its bytes are a key of what the rules found in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.library import call
from chatmill.core.native.replayer import Renderings
from chatmill.render.jinja.segments import Segments

Ints = NDArray[np.int64]
_SEEN = 3
"""Numbers of what is seen of a fragment of a branch: its segment, its distance, the class of its message."""
_BYTES_OF_PAIR = 8
_ROOM = 4
"""So many times the fragments of all renderings, branches have room for."""
_ROOM_OF_ANSWER = 16
_IS_LIKE_WHOLE, _SHOWS_RECORD = 1, 2


class AnswerBranch(NamedTuple):
    """Where the prompt of an answer and its A(i) part."""

    key: tuple[Any, ...]
    """What the rules may ask of the branch."""
    first: int
    """The first fragment of the branch."""
    shared: int
    """Fragments that A(i) has in common with F."""
    is_like_whole: bool
    """Whether A(i) has the texts of its messages in the fragments that F has them in."""


class FragmentColumns:
    """What keys take of each fragment of a template, as columns by the numbers of fragments."""

    def __init__(self, segments: Segments) -> None:
        """Read nothing yet."""
        self._segments = segments
        self._columns: NDArray[np.int32] = np.empty((0, 3), dtype=np.int32)

    def read(self) -> NDArray[np.int32]:
        """Return a line for each fragment: how many messages it has texts of, the first of these, and of the record."""
        facts = self._segments.facts
        if len(self._columns) < len(facts):
            lines: list[tuple[int, int, int]] = []
            for fact in facts:
                lines.append((len(fact.owners), fact.owners[0] if fact.owners else 0, int(fact.shows_record)))
            self._columns = np.array(lines, dtype=np.int32)
        return self._columns


class ShownMessages(NamedTuple):
    """Which fragments of F have text of each message."""

    seen: list[bytes]
    """These fragments, as they are seen from the message."""
    last_places: Ints
    """The last fragment with text of a message or of one before it; -1 where none has."""


def find_shown(renderings: Renderings, facts: NDArray[np.int32], messages: int) -> ShownMessages | None:
    """Return which fragments of F have text of each message; None if one has text of several.

    Args:
        renderings: All renderings of the conversation, F last.
        facts: What is known of fragments.
        messages: How many there are.
    """
    count = int(renderings.table[-1, 6])
    shown = np.empty((count, 2), dtype=np.int32)
    ends = np.empty(messages, dtype=np.int64)
    last_places = np.empty(messages, dtype=np.int64)
    if not call("chatmill_shown", renderings.outputs_of_all, count, facts, messages, shown, ends, last_places):
        return None
    flat = shown.tobytes()
    borders = [0, *(ends * _BYTES_OF_PAIR).tolist()]
    return ShownMessages([flat[begin:end] for begin, end in pairwise(borders)], last_places)


def seen_from(message: int, outputs: Sequence[tuple[int, int]]) -> bytes:
    """Return fragments as they are seen from a message, in the form of `ShownMessages`."""
    pairs = np.array(outputs, dtype=np.int32).reshape(-1, 2)
    pairs[:, 1] -= message
    return pairs.tobytes()


def find_branches(
    renderings: Renderings,
    answers: Ints,
    classes: NDArray[np.int32],
    facts: NDArray[np.int32],
    shown: ShownMessages | None,
    record_key: Any,
) -> dict[int, AnswerBranch]:
    """Return the branches of answers, by their messages.

    An answer is left out whose renderings are not known, leave F at the same fragment, or show several messages in one
    fragment: the rules look at its paths.

    Args:
        renderings: All renderings of the conversation, F last.
        answers: A line for each answer: its message, and the lines of P(i) and of A(i) among the renderings.
        classes: The classes of all messages.
        facts: What is known of fragments.
        shown: What F has of each message.
        record_key: What stands for tools and options, in keys of branches that show them.
    """
    outputs = renderings.outputs_of_all
    room = np.empty((_ROOM * len(outputs) + _ROOM_OF_ANSWER * len(answers), _SEEN), dtype=np.int32)
    found = np.empty((len(answers), 6), dtype=np.int64)
    last_places = None if shown is None else shown.last_places
    given = (renderings.table, outputs, facts, classes, len(classes), last_places)
    size = call("chatmill_branches", *given, answers, len(answers), room, len(room), found)
    flat = room[:size].tobytes()
    found[:, 2:5] *= 4 * _SEEN
    branches: dict[int, AnswerBranch] = {}
    for index, (first, shared, begin, middle, end, flags) in zip(answers[:, 0].tolist(), found.tolist(), strict=True):
        if begin >= 0:
            of_record = record_key if flags & _SHOWS_RECORD else None
            key = (int(classes[index]), flat[begin:middle], flat[middle:end], of_record)
            branches[index] = AnswerBranch(key, first, shared, bool(flags & _IS_LIKE_WHOLE))
    return branches
