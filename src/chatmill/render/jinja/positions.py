"""Whole numbers that remember how they follow from positions: comparing them is a question, not a value.

A *form* is a linear sum: ((base, factor), ...), constant. The bases are the position of the turn's own message, the
number of messages, and the turn's registers: numbers that were handed to it or read from a namespace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from chatmill.render.jinja.expressions import COMPARISONS, SYMBOLS
from chatmill.render.jinja.questions import Unfollowed
from chatmill.render.jinja.traced import Measure, do_others
from chatmill.render.jinja.turn import Turn

Form = tuple[tuple[tuple[int, int], ...], int]

OWN, COUNT = -1, -2
"""Bases: the position of the turn's own message, and the number of messages. Registers count from 0."""


def base_form(base: int, constant: int = 0) -> Form:
    """Return the form of one base."""
    return ((base, 1),), constant


def constant_form(value: int) -> Form:
    """Return the form of a plain number."""
    return (), value


def added(form: Form, other: Form, sign: int = 1) -> Form:
    """Return the sum of two forms, or their difference."""
    if not other[0]:
        return form[0], form[1] + sign * other[1]
    factors = dict(form[0])
    for base, factor in other[0]:
        factors[base] = factors.get(base, 0) + sign * factor
    return tuple(sorted(pair for pair in factors.items() if pair[1])), form[1] + sign * other[1]


class Position(Measure):
    """A whole number with a form. Everything but sums and comparisons gives its value away, as a question."""

    form: Form
    turn: Turn

    def __new__(cls, value: int, form: Form, turn: Turn) -> Position:
        """Make a number whose registers are those of `turn`."""
        position = int.__new__(cls, value)
        position.form, position.turn = form, turn
        return position

    def _asked(self, question: tuple[Any, ...], reply: Any) -> Any:
        run = self.turn.run
        if run.turn is not self.turn and any(base != COUNT for base, _ in self.form[0]):
            raise Unfollowed("a number of another turn")
        return run.note(question, reply)

    def exact(self) -> int:
        """Give the value away."""
        self._asked(("position", self.form), int(self))
        return int.__int__(self)

    def _note_value(self) -> None:
        self.exact()

    __int__ = int.__int__

    def _compared(self, name: str, other: Any) -> Any:
        symbol = SYMBOLS[name]
        value: Any = getattr(int, name)(self, other)
        if value is NotImplemented:
            self.exact()
            return value
        if type(other) is Position:
            other._same_turn(self)
            terms, constant = added(self.form, other.form, -1)
            if terms:
                self._asked(("compare", (terms, 0), symbol, -constant), value)
        elif type(other) in (int, bool):
            self._asked(("compare", (self.form[0], 0), symbol, int(other) - self.form[1]), value)
        else:  # another traced number: its own operator notes it
            return bool(COMPARISONS[symbol](self.exact(), int(other)))
        return value

    def _same_turn(self, other: Position) -> None:
        if other.turn is not self.turn and any(base != COUNT for base, _ in self.form[0]):
            raise Unfollowed("numbers of two turns")

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return self != 0

    def _sum(self, other: Any, sign: int) -> Any:
        if type(other) is Position:
            other._same_turn(self)
            form = added(self.form, other.form, sign)
        elif type(other) in (int, bool):
            form = added(self.form, constant_form(int(other)), sign)
        else:
            return NotImplemented
        value = int.__int__(self) + sign * int.__int__(other)
        return Position(value, form, self.turn) if form[0] else value

    def __add__(self, other: Any) -> Any:
        total = self._sum(other, 1)
        return self.exact() + other if total is NotImplemented else total

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        difference = self._sum(other, -1)
        return self.exact() - other if difference is NotImplemented else difference

    def __rsub__(self, other: Any) -> Any:
        if type(other) is not int:
            return other - self.exact()
        return Position(other, constant_form(other), self.turn)._sum(self, -1)

    def __mod__(self, other: Any) -> Any:
        if type(other) is int and other > 0:
            return self._asked(("remainder", self.form, other), int.__mod__(self, other))
        return self.exact() % other

    def _exactly(self, name: str, *arguments: Any) -> Any:
        value = getattr(self.exact(), name)
        return value(*arguments) if callable(value) else value


do_others(Position, int, Position._compared, SYMBOLS)
do_others(Position, int, Position._exactly)


def handed(numbers: Sequence[int], turn: Turn) -> Iterator[Position]:
    """Put numbers into registers of a turn, and return them as it works with them."""
    first = len(turn.registers)
    turn.registers += numbers
    return iter([Position(number, base_form(first + place), turn) for place, number in enumerate(numbers)])


def value_of(form: Form, own: int, count: int, registers: list[int]) -> int:
    """Return the value of a form in a turn."""
    total = form[1]
    for base, factor in form[0]:
        total += factor * (own if base == OWN else count if base == COUNT else registers[base])
    return total
