"""Turns, and the conversation that they ask.

A *turn* is the body of a loop over messages for one of them; the *root* is everything around the loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import CodeType
from typing import Any

from jinja2.runtime import Macro

from chatmill.core.conversation import Message
from chatmill.render.jinja.expressions import Notes, Path, Question
from chatmill.render.jinja.questions import shifted_question
from chatmill.render.jinja.record_view import RecordView

ROOT = -1
"""The position of the root, from which its paths count."""
Address = int | tuple[str, int]
"""A message: by its number, or counted from either end: ("first", 0), ("last", -1)."""


class Turn:
    """One turn of a loop, or the root: where it is, and what it has asked so far."""

    __slots__ = (
        *("arguments", "breaks", "holes", "is_message", "live", "loop", "mark", "outer", "own", "registers", "run"),
        *("seen", "trace"),
    )

    def __init__(self, run: Replies, own: int, outer: Turn | None, is_message: bool) -> None:
        """`own` is the position of the turn's message, or `ROOT`."""
        self.run, self.own, self.outer, self.is_message = run, own, outer, is_message
        self.registers: list[int] = []
        """Numbers that were handed to it or read from a namespace."""
        self.holes: list[list[tuple[int, int]]] = []
        """What the loops inside it wrote."""
        self.mark = len(run.spaces)
        self.breaks = False
        self.trace: list[tuple[Question, Any]] = []
        self.seen: set[Question] = set()
        self.live: dict[tuple[int, str], Any] = {}
        self.loop: Any = None
        """The loop that it is a turn of; None for the root."""
        self.arguments: list[Any] = []
        """What it was handed."""

    def field(self, path: Path) -> Any:
        """Return the value at a path that counts from the turn's own message."""
        return self.run.field((path[0] + self.own, *path[1:]) if type(path[0]) is int else path)


class Replies(Notes):
    """The first messages of a conversation, and what they reply to turns."""

    turn: Turn
    """The one that runs, and as long as it does."""
    global_names: Mapping[int, str] = {}
    """The names of functions that every template is given, by their identities."""

    def __init__(self, view: RecordView, count: int, shapes: dict[Any, int]) -> None:
        """`shapes` numbers those of messages."""
        self.view, self.count, self._shape_numbers = view, count, shapes
        self.spaces: list[dict[str, Any]] = []
        """Namespaces, by the `Kept` values that they hold."""
        self.views: dict[Address, Any] = {}
        """Messages that the template was given."""
        self.macros: dict[CodeType, Macro] = {}
        """Macros of the template that outlive a turn, by the place where they are defined."""
        self.recipes: dict[Any, Any] = {}
        """Recipes of values inside of others, each of which is there once."""

    def count_kept(self, items: int) -> None:
        """Count a value with so many in it that outlives a turn."""

    @cached_property
    def messages(self) -> Sequence[Message]:
        """All messages of the conversation."""
        return self.view.conversation.messages

    @cached_property
    def shapes(self) -> list[int]:
        """The number of each message's shape."""
        return self.view.shape_numbers(self._shape_numbers)

    def note(self, question: Question, reply: Any) -> Any:
        """Keep a reply of the running turn; the interface of `Notes`."""
        turn = self.turn
        question = shifted_question(question, -turn.own)
        if question not in turn.seen:
            turn.seen.add(question)
            turn.trace.append((question, reply))
        return reply

    @contextmanager
    def unnoted(self) -> Iterator[None]:
        """Note nothing that is read."""
        turn, self.turn = self.turn, Turn(self, 0, None, False)
        try:
            yield
        finally:
            self.turn = turn

    def index(self, address: Address) -> int:
        """Return the number of a message."""
        if isinstance(address, int):
            return address
        return address[1] if address[0] == "first" else self.count + address[1]

    def _there(self, address: Address) -> int | None:
        index = self.index(address)
        return index if 0 <= index < self.count else None

    def role(self, address: Address) -> Any:
        """Reply to ("role", address); likewise the other."""
        at = self._there(address)
        return ... if at is None else self.messages[at].role.value

    def shape(self, address: Address) -> Any:  # noqa: D102
        at = self._there(address)
        return ... if at is None else self.shapes[at]

    def equal(self, address: Address, other: Address) -> Any:
        """Reply to ("equal", address, address): whether two messages have the same values."""
        first, second = self._there(address), self._there(other)
        if first is None or second is None:
            return ...
        return first == second or self.view.plain_message(first) == self.view.plain_message(second)

    def field(self, path: Path) -> Any:
        """Return the value at a path."""
        return self.view.field((self.index(path[0]), *path[1:]) if type(path[0]) is tuple else path)
