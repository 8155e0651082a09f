"""The tries of a template, in compiled code: what it writes for conversations in which nothing is new.

Messages are known by their class: messages of one class give the same reply to every question that classes are made of
(`RecordKeys`), so that each question is asked once for each class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

import numpy as np
from jinja2.runtime import Macro
from numpy.typing import NDArray

from chatmill.core.native.replayer import (
    FIRST_UNKNOWN,
    MAX_NAMES,
    MAX_NUMBERS,
    Address,
    Ask,
    By,
    Does,
    KnownTurns,
    Renderings,
    Replayer,
)
from chatmill.render.jinja.expressions import COMPARISONS, Question
from chatmill.render.jinja.kept_values import ABSENT, Kept, Recipe, forms_of, moves, seen
from chatmill.render.jinja.positions import Form
from chatmill.render.jinja.questions import OF_MESSAGES, at_own, paths_of, shifted_question
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.segments import Segments
from chatmill.render.jinja.tries import FAR, REFUSED, SEEN, Leaf, Node, Table, UnnotedError, compiled
from chatmill.render.jinja.turn import ROOT, Replies, Turn

Request = tuple[int, bool, int]
"""So many messages, with or without the generation prompt; the last is a probe by its number, or -1 for none."""
_SYMBOLS = {symbol: number for number, symbol in enumerate(COMPARISONS)}


class Classes(NamedTuple):
    """The classes of a conversation's messages."""

    numbers: NDArray[np.int32]
    version: int
    """Numbers of another version are other classes."""


class LoopBody(NamedTuple):
    """A loop's body as a macro of the template, which later iterations are called by."""

    names: tuple[tuple[str, str], ...]
    """Names that it is handed values of, each with its variable."""
    write: Callable[..., str]
    macros: dict[CodeType, Macro]
    """The template's macros among these values, made by the same run."""


class Replay:
    """All that is remembered of one template under fixed options, also in compiled code."""

    def __init__(
        self,
        is_keyed: Callable[[list[Question]], bool],
        classes: Callable[[RecordView], Classes | None],
        *,
        reads_prompt: bool,
    ) -> None:
        """Nothing is remembered; `is_keyed` says whether questions about texts are part of every record's key.

        `classes` gives those of messages. `reads_prompt`: a generation prompt may be written.
        """
        self.is_keyed, self._classes, self._reads_prompt = is_keyed, classes, reads_prompt
        self.shapes: dict[Any, int] = {}
        self.tables: dict[Any, Table] = {}
        self.segments = Segments()
        self._learned = 0
        """Nodes and leaves."""
        self._replies: dict[Any, int] = {}
        self.replayer = Replayer(self._asked, self._id(ABSENT.recipe), self._id(...))
        self._columns: list[Callable[[Turn], Any]] = [lambda turn: turn.run.shapes[turn.own]]
        self.replayer.column(By.CLASS)
        self._given: Any = None
        """Tools and options of the latest record."""
        self._record = 0
        self._conversation: Any = None
        """What the replies of messages by their numbers are of."""
        self._others: list[Callable[[Turn], Any]] = []
        self._recipes: list[Recipe] = []
        self._names: dict[str, int] = {}
        self._loops: list[tuple[Any, ...]] = []
        self.loop_questions: list[Question] = []
        """The loops, as their turns are asked for them."""
        self.bodies: dict[int, LoopBody | None] = {}
        """The bodies of the root's loops, by their sites; None for one that is run with the root alone."""
        self._column, self._form = cache(self._new_column), cache(self._new_form)
        self._recipe, self._loop = cache(self._new_recipe), cache(self._new_loop)
        self._place = cache(self._placed)
        self._version = -1
        self._turn: Turn | None = None
        """Where the rendering that runs is asked."""

    @property
    def size(self) -> int:
        """How much is remembered."""
        counted = (self.segments.facts, self.shapes, self._replies)
        return self._learned + sum(map(len, counted))

    def _id(self, reply: Any) -> int:
        """Return the number of a reply."""
        return self._replies.setdefault(reply, len(self._replies))

    # ---- what is learned

    def table(self, key: Any) -> Table:
        """Return the tries of a loop, by the shape of the turn's message."""
        table = self.tables.get(key)
        if table is None:
            table = self.tables[key] = Table(self.replayer.node(Does.ASKED, -1), is_root=key == "root")
        return table

    def _way(self, table: Table, key: Any, trace: Sequence[tuple[Question, Any]]) -> tuple[Table | Node, Any]:
        """Add a way, and return its last node and reply; it must agree with those that are there."""
        parent: Table | Node = table
        children: dict[Any, Node | Leaf] = table
        reply = key
        for question, said in trace:
            node = children.get(reply)
            if node is None:
                node = children[reply] = self._node(question, parent, reply)
            elif not isinstance(node, Node) or node.question != question:
                raise UnnotedError(f"a turn asks {question} where it asked {getattr(node, 'question', 'nothing')}")
            parent, children, reply = node, node.children, said
        return parent, reply

    def learn(self, table: Table, key: Any, trace: list[tuple[Question, Any]], leaf: Leaf) -> Leaf:
        """Add a way, and return its leaf; it must agree with those that are there."""
        parent, reply = self._way(table, key, trace)
        children = parent if isinstance(parent, Table) else parent.children
        child = children.get(reply)
        if isinstance(child, Leaf) and child[:-1] == leaf[:-1]:
            return child
        if child is not None:
            raise UnnotedError(f"a turn ends with {leaf} where it had {getattr(child, 'question', child)} before")
        self._learned += 1
        texts = [shifted_question(question, FAR) for question, _ in trace if question[0] not in SEEN]
        if not self.is_keyed(texts):
            leaf = leaf._replace(is_keyed=False)
        children[reply] = leaf
        self._link(parent, reply, leaf)
        return leaf

    def _node(self, question: Question, parent: Table | Node, reply: Any) -> Node:
        node = Node(question)
        self._learned += 1
        if parent.number >= 0:
            try:
                node.number = self.replayer.node(*self._numbers_of(question))
            except OverflowError:  # compiled code cannot answer it
                return node
            self._link(parent, reply, node)
        return node

    def _link(self, parent: Node | Table, reply: Any, child: Node | Leaf) -> None:
        """Have a reply lead to a node or a leaf."""
        if parent.number < 0:
            return
        number = ~self._leaf(child) if isinstance(child, Leaf) else child.number
        self.replayer.link(parent.number, self._encoded(parent, reply), number)

    def _encoded(self, parent: Node | Table, reply: Any) -> int:
        if not isinstance(parent, Node):
            return self._id(reply) if parent.is_root else int(reply)
        kind = parent.question[0]
        if kind in ("compare", "remainder", "position"):
            return int(reply)
        if kind == "loop":
            return int(reply == REFUSED)
        return 0 if kind in ("!set", "!make") else self._id(reply)

    def _leaf(self, leaf: Leaf) -> int:
        for segment in leaf.written:
            if segment >= 0:
                self._place(segment)
        flags = {"is_refused": leaf.is_refused, "breaks": leaf.breaks, "is_keyed": leaf.is_keyed}
        return self.replayer.leaf(leaf.written, **flags)

    def _placed(self, segment: int) -> int:
        """Have a segment that names messages from either end be placed wherever it is written."""
        facts = self.segments.facts[segment]
        if facts.is_counted:
            self.replayer.place(segment, by_count=facts.is_counted_back)
        return segment

    def _numbers_of(self, question: Question) -> tuple[Any, ...]:
        kind = question[0]
        if kind == "compare":
            return Does.COMPARES, self._form(question[1]), _SYMBOLS[question[2]], question[3]
        if kind == "remainder":
            return Does.REMAINDER, self._form(question[1]), question[2]
        if kind == "position":
            return Does.POSITION, self._form(question[1])
        if kind == "state":
            return Does.STATE, question[1], self._name(question[2])
        if kind == "loop":
            return Does.LOOP, self._loop(question)
        if kind == "!set":
            return Does.SETS, question[1], self._name(question[2]), self._recipe(question[3])
        if kind == "!make":
            pairs = [number for name, value in question[1] for number in (self._name(name), self._recipe(value))]
            return Does.MAKES, self.replayer.numbers([len(question[1]), *pairs])
        return self._asking(question)

    def _asking(self, question: Question) -> tuple[Any, ...]:
        """Return a node for a question about one message, or about the record; else one that is asked each time."""
        kind = question[0]
        is_of_message = kind in OF_MESSAGES
        addresses = {question[1]} if is_of_message or kind == "equal" else {path[0] for path in paths_of(question)}
        if all(isinstance(address, str) for address in addresses):
            return Does.OF_MESSAGE, self._column(question, By.RECORD), Address.RECORD
        if kind in ("same", "equal") or len(addresses) > 1:
            self._others.append(compiled(question))
            is_by_count = kind == "equal" or any(isinstance(address, tuple) for address in addresses)
            return Does.ASKED, len(self._others) - 1, 0 if is_by_count else self._column(question, By.NUMBER)
        (address,) = addresses
        by = By.CLASS if kind in SEEN or self.is_keyed([at_own(question, FAR)]) else By.NUMBER
        number = self._column(at_own(question), by)
        if isinstance(address, int):
            return Does.OF_MESSAGE, number, Address.OWN, address
        return Does.OF_MESSAGE, number, Address.FIRST if address[0] == "first" else Address.LAST, address[1]

    def _new_column(self, question: Question, by: By) -> int:
        number = self.replayer.column(by)
        self._columns.append(compiled(question))
        return number

    def _new_form(self, form: Form) -> int:
        return self.replayer.form(*form)

    def _name(self, name: str) -> int:
        number = self._names.setdefault(name, len(self._names))
        if number >= MAX_NAMES:
            raise OverflowError
        return number

    def _new_recipe(self, recipe: Recipe) -> int:
        forms = [self._form(form) for form in forms_of(recipe)]
        if len(forms) > MAX_NUMBERS:
            raise OverflowError
        moving = moves(recipe)
        number = self.replayer.recipe(forms, moves=moving, reply=0 if moving else self._id(seen(recipe, 0)))
        self._recipes.append(recipe)
        return number

    def _new_loop(self, question: Question) -> int:
        _, site, iterable, arguments = question
        is_message = iterable[0] == "messages"
        if is_message:
            _, start, left_out, is_reversed = iterable
            borders = self._form(start), 0
            is_moving = bool(start[0])
        else:
            _, start, stop, step = iterable
            borders = self._form(start), self._form(stop)
            is_moving, is_reversed, left_out = True, step < 0, 0
        shape = (is_message, is_moving, is_reversed, left_out, *borders, any(map(moves, arguments)))
        number = self.replayer.loop(shape, [self._recipe(argument) for argument in arguments])
        tag = (is_reversed, left_out, None if is_moving else start[1])
        self._loops.append((site, is_message, tag, arguments))
        self.loop_questions.append(question)
        return number

    # ---- what is asked

    def _asked(self, what: int, a: int, b: int, c: int) -> int:
        turn = self._turn
        assert turn is not None
        if what == Ask.MESSAGE:
            turn.own = b
            reply = self._columns[a](turn)
            return int(reply) if a == 0 else self._id(reply)
        if what == Ask.STATE:
            return self._id(seen(self._recipes[a], b))
        if what == Ask.TABLE:
            site, is_message, tag, arguments = self._loops[a]
            return self.table((site, is_message, tag, b, tuple(seen(argument, c) for argument in arguments))).number
        if what == Ask.OTHER:
            whole = turn.run.count
            turn.own, turn.run.count = b, c
            reply = self._others[a](turn)
            turn.run.count = whole  # replies of classes are of messages anywhere
            return self._id(reply)
        if what == Ask.PROBED:
            probed = turn.run.view.probed(c, a >> 32)
            own = Turn(Replies(probed, c, self.shapes), b, None, True)
            return self._id(self._others[a & 0xFFFFFFFF](own))
        return self._place(self.segments.placed(a, b, c))

    def renderings(
        self, view: RecordView, classes: Classes, requests: Sequence[Request] | NDArray[np.int64]
    ) -> Renderings:
        """Return what the template writes for some numbers of messages, with and without the generation prompt.

        `classes` are those of the view's messages, and after them of its probes.
        """
        root, has_tools = self.table("root").number, view.has_tools
        count = len(view.roles)
        self._begin(view, classes)
        keys = (self._id((False, has_tools)), self._id((self._reads_prompt, has_tools)))
        wanted = np.asarray(requests, dtype=np.int64)
        table = np.empty((len(wanted), 4), dtype=np.int64)
        table[:, 0], table[:, 1], table[:, 2:] = root, np.array(keys)[wanted[:, 1]], wanted[:, ::2]
        replayed = self.replayer.replay(self._record, classes.numbers, count, table)
        if not replayed.is_keyed:
            view.is_keyed = False
        return replayed

    def _begin(self, view: RecordView, classes: Classes) -> None:
        """Have the replies of a record at hand."""
        if classes.version != self._version:
            self.replayer.forget_classes()
            self._version = classes.version
        asked = view.identity, view.probes
        if asked != self._conversation:
            self.replayer.other_conversation()
            self._conversation = asked
        shown = view if view.probes is None else view.probes.view
        self._turn = Turn(Replies(shown, len(shown.roles), self.shapes), ROOT, None, True)
        if view.given != self._given:
            self._given = view.given
            self._record += 1

    def known_turns(
        self, run: Replies, key: Any, trace: Sequence[tuple[Question, Any]], loop: int
    ) -> KnownTurns | None:
        """Return the turns that are known of a loop of the root; `trace` is all that comes before, and the loop."""
        self._way(self.table("root"), key, trace)
        return self._turns(run, key, loop)

    def turns_before_unknown(self, run: Replies, key: Any) -> KnownTurns | None:
        """Return the turns before the first one that is new; None if no loop of the root has it."""
        return self._turns(run, key, FIRST_UNKNOWN)

    def _turns(self, run: Replies, key: Any, loop: int) -> KnownTurns | None:
        view, table = run.view, self.table("root")
        classes = self._classes(view)
        if classes is None:
            return None
        self._begin(view, classes)
        request = (table.number, self._id(key), run.count)
        return self.replayer.turns(self._record, classes.numbers, len(view.roles), request, loop)

    def state_after(self, turns: KnownTurns) -> list[dict[str, Kept]]:
        """Return what namespaces hold after known turns."""
        names, spaces = list(self._names), [dict[str, Kept]() for _ in range(turns.spaces)]
        for space, name, number, own, numbers in turns.state:
            recipe = self._recipes[number]
            spaces[space][names[name]] = Kept(recipe, own, tuple(numbers[: len(forms_of(recipe))]))
        return spaces
