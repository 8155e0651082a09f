"""Decision tries: what turns asked, in order, with the replies, and at the end of each way what they wrote.

A turn is a deterministic program of what it reads. After the same replies it asks the same next question; a run that
asks another one has read something that was not noted (`UnnotedError`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from chatmill.errors import ChatmillError
from chatmill.render.jinja.expressions import Expression, Question, ask
from chatmill.render.jinja.positions import COMPARED, COUNT, OWN, Form, value_of

if TYPE_CHECKING:
    from chatmill.render.jinja.turn_run import Turn

Output = tuple[int, int]
"""A segment, and the position of the message that its paths count from."""
Part = tuple[str | None, Expression | None]
REFUSED = ("refused",)
"""The reply of a loop in which the template refuses the conversation."""


class UnnotedError(ChatmillError):
    """A turn asks something else than one that was given the same replies."""


class Segment(NamedTuple):
    """What a turn writes, up to the next loop inside it; paths count from the turn's own message."""

    number: int
    parts: tuple[Part, ...]


class Leaf(NamedTuple):
    """The end of a way: what the turn wrote."""

    written: tuple[int, ...]
    """Numbers of segments; ~n stands for what the n-th loop inside the turn wrote."""
    is_refused: bool = False
    breaks: bool = False
    """The loop ends behind this turn."""


class Node:
    """A question, and the ways behind its replies."""

    __slots__ = ("ask", "children", "question")

    def __init__(self, question: Question) -> None:
        """No replies are known."""
        self.question, self.ask = question, compiled(question)
        self.children: Table = {}


Table = dict[Any, "Node | Leaf"]


class Tries:
    """All that is remembered of one template under fixed options."""

    def __init__(self) -> None:
        """Nothing is remembered."""
        self.shapes: dict[Any, int] = {}
        self.tables: dict[Any, Table] = {}
        self.segments: list[Segment] = []
        self._numbers: dict[tuple[Part, ...], int] = {}
        self.size = 0
        """Nodes and leaves."""

    def table(self, key: Any) -> Table:
        """Return the tries of a loop, by the shape of the turn's message."""
        found = self.tables.get(key)
        if found is None:
            found = self.tables[key] = {}
        return found

    def segment(self, parts: tuple[Part, ...]) -> int:
        """Return the number of a segment."""
        number = self._numbers.get(parts)
        if number is None:
            number = self._numbers[parts] = len(self.segments)
            self.segments.append(Segment(number, parts))
        return number

    def learn(self, table: Table, key: Any, trace: list[tuple[Question, Any]], leaf: Leaf) -> None:
        """Add a way; it must agree with those that are there."""
        self.size += 1
        children: Table = table
        reply = key
        for question, said in trace:
            node = children.get(reply)
            if node is None:
                node = children[reply] = Node(question)
                self.size += 1
            elif not isinstance(node, Node) or node.question != question:
                raise UnnotedError(f"a turn asks {question} where it asked {getattr(node, 'question', 'nothing')}")
            children, reply = node.children, said
        if isinstance(children.get(reply), Node):
            raise UnnotedError(f"a turn ends where it asked {children[reply].question} before")  # type: ignore[union-attr]
        children[reply] = leaf


def compiled(question: Question) -> Callable[[Turn], Any]:
    """Return a function that answers a question for a turn."""
    what = question[0]
    if what == "compare":
        return _comparison(question[1], COMPARED[question[2]], question[3])
    if what == "remainder":
        return lambda turn: value_of(question[1], turn.own, turn.run.count, turn.registers) % question[2]
    if what == "position":
        return lambda turn: value_of(question[1], turn.own, turn.run.count, turn.registers)
    if what == "state":
        return lambda turn: turn.run.state(turn, question[1], question[2])
    if what == "loop":
        return lambda turn: turn.run.loop(turn, *question[1:])
    if what == "!set":
        return lambda turn: turn.run.set_by(turn, *question[1:])
    if what == "!make":
        return lambda turn: turn.run.make_by(turn, question[1])
    if what in ("role", "given", "calls", "silent", "shape"):
        return _of_message(question)
    if what == "equal":
        return lambda turn: turn.run.equal(_at(question[1], turn.own), _at(question[2], turn.own))
    fast = _of_content(question)
    return fast or (lambda turn: ask(question, turn.field))


def _at(address: Any, own: int) -> Any:
    return address + own if type(address) is int else address


def _of_message(question: Question) -> Callable[[Turn], Any]:
    what, address, *more = question
    name = "is_silent" if what == "silent" else str(what)
    if type(address) is int:
        return lambda turn: getattr(turn.run, name)(address + turn.own, *more)
    return lambda turn: getattr(turn.run, name)(address, *more)


def _comparison(form: Form, compare: Callable[[int, int], bool], bound: int) -> Callable[[Turn], bool]:
    terms = dict(form[0])
    bound -= form[1]
    if form[0] == ((OWN, 1),):
        return lambda turn: compare(turn.own, bound)
    if form[0] == ((COUNT, 1),):
        return lambda turn: compare(turn.run.count, bound)
    if terms == {OWN: 1, COUNT: -1}:
        return lambda turn: compare(turn.own - turn.run.count, bound)
    registers = [base for base in terms if base >= 0]
    if len(registers) == 1 and terms == {OWN: 1, registers[0]: -1}:
        (register,) = registers
        return lambda turn: compare(turn.own - turn.registers[register], bound)
    return lambda turn: compare(value_of((form[0], 0), turn.own, turn.run.count, turn.registers), bound)


def _of_content(question: Question) -> Callable[[Turn], Any] | None:
    """Return the quick way to what is asked most: something of the turn's own content."""
    if question[1] != ("field", (0, "content")):
        return None
    what = question[0]
    if what == "filled":
        return lambda turn: bool(turn.run.messages[turn.own].content)
    if what == "contains":
        part = question[2]
        return lambda turn: part in turn.run.messages[turn.own].content
    if what == "method":
        method, arguments = getattr(str, question[2]), question[3]
        return lambda turn: method(turn.run.messages[turn.own].content, *arguments)
    return None
