"""Decision tries: what turns asked, in order, with the replies, and at the end of each way what they wrote.

A turn is a deterministic program of what it reads. After the same replies it asks the same next question; a run that
asks another one has read something that was not noted (`UnnotedError`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from chatmill.errors import ChatmillError
from chatmill.render.jinja.expressions import Expression, Question, ask, root
from chatmill.render.jinja.kept_values import OF_MESSAGES, POSITIONAL, shifted_question

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
        counted = [one[0] for one in firsts if type(one) is tuple]
        self.is_counted, self.is_counted_back = bool(counted), "last" in counted
        """Whether it names messages from either end, and from the last: where they are depends on the conversation."""
        self.shows_tools = "tools" in firsts
        self.shows_record = any(type(one) is str for one in firsts)
        """Whether it has text of tools or options."""
        self.owners: tuple[int, ...] = tuple(sorted({one for one in firsts if type(one) is int}))
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


class Look(NamedTuple):
    """The end of a way of something else than a turn: what was found."""

    found: Any
    is_keyed: bool = True


AnyLeaf = TypeVar("AnyLeaf", Leaf, Look)


class Node:
    """A question, and the ways after its replies."""

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
        self.segments: list[SegmentFacts] = []
        self._numbers: dict[tuple[Part, ...], int] = {}
        self.size = 0
        """Nodes, leaves and segments."""
        self.replay: Replay | None = None
        """The same in compiled code."""

    def table(self, key: Any) -> Table:
        """Return the tries of a loop, by the shape of the turn's message."""
        found = self.tables.get(key)
        if found is None:
            number = self.replay.table() if self.replay is not None and key != "looks" else -1
            found = self.tables[key] = Table(number, is_root=key == "root")
        return found

    def segment(self, parts: tuple[Part, ...]) -> int:
        """Return the number of a segment."""
        number = self._numbers.get(parts)
        if number is None:
            number = self._numbers[parts] = len(self.segments)
            self.size += 1
            self.segments.append(SegmentFacts(parts))
        return number

    def learn(self, table: Table, key: Any, trace: list[tuple[Question, Any]], leaf: AnyLeaf) -> AnyLeaf:
        """Add a way, and return its leaf; it must agree with those that are there."""
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
        known = children.get(reply)
        if isinstance(known, type(leaf)) and known[:-1] == leaf[:-1]:
            return known
        if known is not None:
            raise UnnotedError(f"a turn ends with {leaf} where it had {getattr(known, 'question', known)} before")
        self.size += 1
        texts = [shifted_question(question, FAR) for question, _ in trace if question[0] not in SEEN]
        if texts and not self.is_keyed(texts):
            leaf = leaf._replace(is_keyed=False)
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
    """Return a function that answers a question about texts or messages for a turn."""
    what = question[0]
    if what in OF_MESSAGES:
        return _of_message(question)
    if what == "equal":
        return lambda turn: turn.run.equal(_at(question[1], turn.own), _at(question[2], turn.own))
    return lambda turn: ask(question, turn.field)


def _at(address: Any, own: int) -> Any:
    return address + own if type(address) is int else address


def _of_message(question: Question) -> Callable[[Turn], Any]:
    what, address, *more = question
    name = "is_silent" if what == "silent" else str(what)
    if type(address) is int:
        return lambda turn: getattr(turn.run, name)(address + turn.own, *more)
    return lambda turn: getattr(turn.run, name)(address, *more)
