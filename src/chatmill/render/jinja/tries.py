"""Decision tries: what turns asked, in order, with the replies, and at the end of each way what they wrote.

A turn is a deterministic program of what it reads. After the same replies it asks the same next question; a run that
asks another one has read something that was not noted (`UnnotedError`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from chatmill.errors import ChatmillError
from chatmill.render.jinja.expressions import Expression, Question, ask
from chatmill.render.jinja.kept_values import OF_MESSAGES, POSITIONAL, shifted_question
from chatmill.render.jinja.positions import COMPARED, COUNT, OWN, Form, value_of

if TYPE_CHECKING:
    from chatmill.render.jinja.replay import Replay
    from chatmill.render.jinja.turn_run import Turn

Output = tuple[int, int]
"""A segment, and the position of the message that its paths count from."""
Part = tuple[str | None, Expression | None]
SEEN = POSITIONAL | OF_MESSAGES
"""Questions that the shape of a conversation answers, and events."""
FAR = 1 << 20
"""Added to the messages of questions, which count from a turn's own, so that none is negative."""
MAX_FOUND = 100_000
"""Of what was found by the classes of messages; beyond, it is looked for again."""
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
    is_keyed: bool = True
    """Whether what it asked of texts is part of every record's key."""


class Look(NamedTuple):
    """The end of a way of something else than a turn: what was found."""

    found: Any
    is_keyed: bool = True


AnyLeaf = TypeVar("AnyLeaf", Leaf, Look)


class Node:
    """A question, and the ways behind its replies."""

    __slots__ = ("ask", "children", "number", "question")

    def __init__(self, question: Question) -> None:
        """No replies are known."""
        self.question, self.ask = question, compiled(question)
        self.children: dict[Any, Node | Leaf | Look] = {}
        self.number = -1
        """In compiled code."""


class Table(dict[Any, "Node | Leaf | Look"]):
    """The first nodes, by what is known of a turn before it asks."""

    __slots__ = ("is_root", "number")

    def __init__(self, number: int, *, is_root: bool) -> None:
        """`number` is that in compiled code, or -1."""
        self.number, self.is_root = number, is_root


class Tries:
    """All that is remembered of one template under fixed options."""

    def __init__(self, is_keyed: Callable[[list[Question]], bool]) -> None:
        """Nothing is remembered; `is_keyed` says whether questions about texts are part of every record's key."""
        self.is_keyed = is_keyed
        self.shapes: dict[Any, int] = {}
        self.tables: dict[Any, Table] = {}
        self.segments: list[Segment] = []
        self._numbers: dict[tuple[Part, ...], int] = {}
        self.size = 0
        """Nodes, leaves and segments."""
        self._by_classes: dict[Any, Look] = {}
        self._version = -1
        self.replay: Replay | None = None
        """The same in compiled code."""

    def table(self, key: Any) -> Table:
        """Return the tries of a loop, by the shape of the turn's message."""
        found = self.tables.get(key)
        if found is None:
            is_replayed = self.replay is not None and key not in ("looks", "whole")
            number = self.replay.table() if self.replay is not None and is_replayed else -1
            found = self.tables[key] = Table(number, is_root=key == "root")
        return found

    def by_classes(self, version: int) -> dict[Any, Look]:
        """Return what was found of messages whose classes say all that was asked; `version` is that of the classes."""
        if version != self._version or len(self._by_classes) > MAX_FOUND:
            self._by_classes, self._version = {}, version
        return self._by_classes

    def segment(self, parts: tuple[Part, ...]) -> int:
        """Return the number of a segment."""
        number = self._numbers.get(parts)
        if number is None:
            number = self._numbers[parts] = len(self.segments)
            self.size += 1
            self.segments.append(Segment(number, parts))
        return number

    def learn(self, table: Table, key: Any, trace: list[tuple[Question, Any]], leaf: AnyLeaf) -> AnyLeaf:
        """Add a way, and return its leaf; it must agree with those that are there."""
        self.size += 1
        texts = [shifted_question(question, FAR) for question, _ in trace if question[0] not in SEEN]
        if texts and not self.is_keyed(texts):
            leaf = leaf._replace(is_keyed=False)
        parent: Table | Node = table
        children: dict[Any, Node | Leaf | Look] = table
        reply = key
        for question, said in trace:
            node = children.get(reply)
            if node is None:
                node = children[reply] = self._node(question, parent, reply)
            elif not isinstance(node, Node) or node.question != question:
                raise UnnotedError(f"a turn asks {question} where it asked {getattr(node, 'question', 'nothing')}")
            parent, children, reply = node, node.children, said
        if isinstance(children.get(reply), Node):
            raise UnnotedError(f"a turn ends where it asked {children[reply].question} before")  # type: ignore[union-attr]
        children[reply] = leaf
        if self.replay is not None and isinstance(leaf, Leaf):
            self.replay.link(parent, reply, leaf)
        return leaf

    def _node(self, question: Question, parent: Table | Node, reply: Any) -> Node:
        node = Node(question)
        self.size += 1
        if self.replay is not None and parent.number >= 0:
            node.number = self.replay.node(question)
            self.replay.link(parent, reply, node)
        return node


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
    if what in OF_MESSAGES:
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
