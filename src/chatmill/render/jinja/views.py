"""What a template is given in the place of its messages: views that note what a turn of a loop reads of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jinja2.utils

from chatmill.render.jinja.message_fields import refuse_all_fields
from chatmill.render.jinja.positions import COUNT, OWN, Form, Position, added, base_form
from chatmill.render.jinja.questions import Unfollowed
from chatmill.render.jinja.traced import plain_text
from chatmill.render.jinja.turn import Address, Replies, Turn


class MessageView(Mapping[str, Any]):  # noqa: PLW1641 - as plain objects, it has no hash
    """A message; what is read of another message than the turn's own is noted."""

    __slots__ = ("_values", "address", "run")

    def __init__(self, run: Replies, address: Address, values: dict[str, Any]) -> None:
        """`values` are the fields, traced."""
        self.run, self.address, self._values = run, address, values

    @classmethod
    def at(cls, run: Replies, address: Address) -> MessageView:
        """Return the view of a message, which is made once."""
        view: MessageView | None = run.views.get(address)
        if view is None:
            with run.unnoted():
                values = run.view.message(run.index(address), run, address)
            view = run.views[address] = cls(run, address, values)
        return view

    def _is_own(self) -> bool:
        turn = self.run.turn
        return turn.is_message and turn.own == self.address

    def __getitem__(self, key: Any) -> Any:
        key = plain_text(key) if isinstance(key, str) else key
        value = self._values[key] if key == "role" else self._whole()[key]
        if key == "role" and not self._is_own():
            self.run.note(("role", self.address), value)
        return value

    def __contains__(self, key: object) -> bool:
        key = plain_text(key) if isinstance(key, str) else key
        return key in (self._values if key == "role" or key == "content" else self._whole())

    def _whole(self) -> dict[str, Any]:
        if not self._is_own():
            self.run.note(("shape", self.address), self.run.shape(self.address))
        return self._values

    def __iter__(self) -> Iterator[str]:
        raise refuse_all_fields()
        yield ""  # as in `MessageFields`

    def __len__(self) -> int:
        raise refuse_all_fields()

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MessageView):
            return False if other is None else self._unlike()
        return bool(self.run.note(("equal", self.address, other.address), self.run.equal(self.address, other.address)))

    def _unlike(self) -> bool:
        raise Unfollowed("a message is compared with something else")

    def __str__(self) -> str:
        raise Unfollowed("a message is printed")

    __repr__ = __str__


class MessagesView:
    """The messages from one on, in order or reversed, without some at the end."""

    __slots__ = ("is_reversed", "left_out", "run", "start")

    def __init__(self, run: Replies, start: int = 0, left_out: int = 0, is_reversed: bool = False) -> None:
        """`start` may be a position."""
        self.run, self.start, self.left_out, self.is_reversed = run, start, left_out, is_reversed

    def _count(self) -> Position:
        return Position(self.run.count, base_form(COUNT), self.run.turn)

    def length(self) -> int:
        """Return how many there are, as a number that is not given away."""
        if type(self.start) is Position and not self.start <= self._count() - self.left_out:
            return 0
        length = self._count() - self.start - self.left_out
        if type(length) is Position and not length >= 0:
            return 0
        return int(length) if type(length) is not Position else length

    def __len__(self) -> int:
        length = self.length()
        return length.exact() if type(length) is Position else length

    def __bool__(self) -> bool:
        return self.length() > 0

    def size(self) -> int:
        """Return how many there are, for our own code."""
        return max(0, self.run.count - self.left_out - int(self.start))

    def positions(self) -> range:
        """Return their positions, in the order of the loop."""
        start, size = int(self.start), self.size()
        return range(start + size - 1, start - 1, -1) if self.is_reversed else range(start, start + size)

    def forms(self) -> tuple[Form, Form] | None:
        """Return index0 and length of a loop over them as forms of a turn; None where they take registers."""
        if type(self.start) is Position:
            return None
        length = base_form(COUNT, -self.left_out - self.start)
        index = added(base_form(COUNT, -self.left_out - 1), base_form(OWN), -1)
        return index if self.is_reversed else base_form(OWN, -self.start), length

    def __iter__(self) -> Iterator[MessageView]:
        return iter(self._all())

    def _all(self) -> list[MessageView]:
        """Return all of them, in code that no loop of ours runs: only outside of turns, and the count is given away."""
        if self.run.turn.outer is not None:
            raise Unfollowed("messages are walked over inside of a turn")
        self._count().exact()
        if type(self.start) is Position:
            self.start.exact()
        return [MessageView.at(self.run, position) for position in self.positions()]

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return self._sliced(key.start, key.stop, key.step)
        if self.is_reversed:
            return self._all()[key.exact() if type(key) is Position else key]
        if not isinstance(key, int):
            raise TypeError("list indices must be integers or slices")
        if type(key) is Position or type(self.start) is Position:
            return self._at(key)
        first = self.start + key
        if key >= 0:
            if not self._count() > first + self.left_out:
                raise IndexError("list index out of range")
            return MessageView.at(self.run, ("first", first))
        if not self._count() >= self.start + self.left_out - key:
            raise IndexError("list index out of range")
        return MessageView.at(self.run, ("last", key - self.left_out))

    def _at(self, key: int) -> MessageView:
        if not key >= 0:
            return self._all()[int(key)]
        if not key < self.length():
            raise IndexError("list index out of range")
        position = key + self.start
        turn = self.run.turn
        if type(position) is Position:
            offset = position - Position(turn.own, base_form(OWN), turn)
            if type(offset) is Position:
                offset.exact()
        return MessageView.at(self.run, int.__int__(position))

    def _sliced(self, start: Any, stop: Any, step: Any) -> Any:
        if step == -1 and start is None and stop is None:
            return MessagesView(self.run, self.start, self.left_out, not self.is_reversed)
        if step in (None, 1) and not self.is_reversed:
            first = 0 if start is None else start
            if isinstance(first, int) and first >= 0:
                if stop is None:
                    return MessagesView(self.run, self.start + first, self.left_out)
                if type(stop) is int and stop < 0:
                    return MessagesView(self.run, self.start + first, self.left_out - stop)
        exact = [border.exact() if type(border) is Position else border for border in (start, stop, step)]
        return self._all()[slice(*exact)]

    def __str__(self) -> str:
        raise Unfollowed("messages are printed")

    __repr__ = __str__


class PositionRange:
    """`range(...)` with borders that are positions."""

    left_out = 0

    def __init__(self, start: int, stop: int, step: int) -> None:
        """Take what `range` takes."""
        self.start, self.stop, self.step, self.is_reversed = start, stop, step, step < 0

    def positions(self) -> range:
        """Return the numbers."""
        return range(int.__int__(self.start), int.__int__(self.stop), self.step)

    def forms(self) -> None:
        """Return as `MessagesView.forms`."""

    def __iter__(self) -> Iterator[int]:
        exact = [border.exact() if type(border) is Position else border for border in (self.start, self.stop)]
        return iter(range(exact[0], exact[1], self.step))


class LoopView:
    """`loop` in the body of a loop over messages."""

    def __init__(
        self, turn: Turn, positions: range, number: int, forms: tuple[Form, Form], undefined: Callable[[str], Any]
    ) -> None:
        """`forms` are those of index0 and of the length."""
        self._turn, self._positions, self._number, self._forms = turn, positions, number, forms
        self._undefined = undefined

    @property
    def index0(self) -> int:
        """As Jinja has it; likewise the others."""
        index = self._forms[0]
        return Position(self._number, index, self._turn) if index[0] else self._number

    @property
    def index(self) -> int:  # noqa: D102
        return self.index0 + 1

    @property
    def length(self) -> int:  # noqa: D102
        form = self._forms[1]
        return Position(len(self._positions), form, self._turn) if form[0] else len(self._positions)

    @property
    def first(self) -> bool:  # noqa: D102
        return self.index0 == 0

    @property
    def last(self) -> bool:  # noqa: D102
        return self.index0 == self.length - 1

    @property
    def previtem(self) -> Any:  # noqa: D102
        if self.first:
            return self._undefined("there is no previous item")
        return self._item(self._positions[self._number - 1])

    @property
    def nextitem(self) -> Any:  # noqa: D102
        if self.last:
            return self._undefined("there is no next item")
        return self._item(self._positions[self._number + 1])

    def _item(self, position: int) -> Any:
        if not self._turn.is_message:
            raise Unfollowed("an item next to that of a range")
        return MessageView.at(self._turn.run, position)

    def __getattr__(self, name: str) -> Any:
        """What no published template reads is not followed: the conversation is then one turn."""
        raise Unfollowed(f"loop.{name}")


class Space(jinja2.utils.Namespace):
    """A namespace whose values are state of the run: reading one that an outer turn made is a question."""

    _number: int
    _read: Callable[[int, str], Any]
    _write: Callable[[int, str, Any], None]

    def __init__(*arguments: Any, **named: Any) -> None:
        """Take its number, and what reads and writes its values."""
        for name, argument in zip(("_number", "_read", "_write"), arguments[1:], strict=True):
            object.__setattr__(arguments[0], name, argument)

    def __getattribute__(self, name: str) -> Any:
        attribute = object.__getattribute__
        if name.startswith("_"):
            return attribute(self, name)
        return attribute(self, "_read")(attribute(self, "_number"), name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._write(self._number, name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Space) and self._number == other._number

    def __hash__(self) -> int:
        return hash(self._number)

    def __repr__(self) -> str:
        raise Unfollowed("a namespace is printed")
