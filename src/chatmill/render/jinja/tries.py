"""Decision tries: what turns asked, in order, with the replies, and at the end of each way what they wrote.

A turn is a deterministic program of what it reads. After the same replies it asks the same next question; a run that
asks another one has read something that was not noted (`UnnotedError`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from chatmill.errors import ChatmillError
from chatmill.render.jinja.expressions import Expression, Question, ask, root
from chatmill.render.jinja.questions import OF_MESSAGES, POSITIONAL
from chatmill.render.jinja.turn import Turn

Output = tuple[int, int]
"""A segment, and the position of the message that its paths count from."""
Part = tuple[str | None, Expression | None]
SEEN = POSITIONAL | OF_MESSAGES
"""Questions that the shape of a conversation answers, and events."""
FAR = 1 << 20
"""Added to the messages of questions, which count from a turn's own, so that none is negative."""
REFUSED = ("refused",)
"""The reply of a loop in which the template refuses the conversation."""


class UnnotedError(ChatmillError):
    """A turn asks something else than one that was given the same replies."""


class SegmentFacts:
    """What a turn writes, up to the next loop inside it; paths count from the turn's own message."""

    __slots__ = ("is_counted", "is_counted_back", "owners", "parts", "shows_record", "shows_tools")

    def __init__(self, parts: tuple[Part, ...]) -> None:
        """Look whose texts its parts are."""
        self.parts = parts
        firsts = [root(e)[0] for _, e in parts if e is not None]
        counted = [first[0] for first in firsts if type(first) is tuple]
        self.is_counted, self.is_counted_back = bool(counted), "last" in counted
        """Whether it names messages from either end, and from the last: where they are depends on the conversation."""
        self.shows_tools = "tools" in firsts
        self.shows_record = any(type(first) is str for first in firsts)
        """Whether it has text of tools or options."""
        self.owners: tuple[int, ...] = tuple(sorted({first for first in firsts if type(first) is int}))
        """Messages that its texts are from, counted from the turn's own."""


class Leaf(NamedTuple):
    """The end of a way: what the turn wrote."""

    written: tuple[int, ...]
    """Numbers of segments; ~n stands for what the n-th loop inside the turn wrote."""
    is_refused: bool = False
    breaks: bool = False
    """The loop ends after this turn."""
    is_keyed: bool = True
    """Whether what it asked of texts is part of every record's key."""


class Node:
    """A question, and the ways after its replies."""

    __slots__ = ("ask", "children", "number", "question")

    def __init__(self, question: Question) -> None:
        """Begin without replies."""
        self.question, self.ask = question, compiled(question)
        self.children: dict[Any, Node | Leaf] = {}
        self.number = -1
        """In compiled code."""


class Table(dict[Any, "Node | Leaf"]):
    """The first nodes, by what is known of a turn before it asks."""

    __slots__ = ("is_root", "number")

    def __init__(self, number: int, *, is_root: bool) -> None:
        """`number` is that in compiled code, or -1."""
        self.number, self.is_root = number, is_root


def compiled(question: Question) -> Callable[[Turn], Any]:
    """Return a function that answers a question about texts or messages for a turn."""
    kind = question[0]
    if kind in OF_MESSAGES:
        return _of_message(question)
    if kind == "equal":
        return lambda turn: turn.run.equal(_at(question[1], turn.own), _at(question[2], turn.own))
    return lambda turn: ask(question, turn.field)


def _at(address: Any, own: int) -> Any:
    return address + own if type(address) is int else address


def _of_message(question: Question) -> Callable[[Turn], Any]:
    kind, address = question
    return lambda turn: getattr(turn.run, kind)(_at(address, turn.own))
