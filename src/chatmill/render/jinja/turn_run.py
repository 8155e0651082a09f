"""One rendering, as turns: what each turn asks is remembered, so that another one with its replies need not be run.

Turns run on values that note what is asked of them. What they asked, in order, with the replies, becomes a way through
a decision trie (`tries`); what they wrote is its leaf. State that outlives a turn (namespaces) is changed by events on
that way. Compiled code goes the ways that are known (`replay`). If one is new, the template runs, but for turns that
are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from chatmill.render.jinja.expressions import Expression, Question, evaluate
from chatmill.render.jinja.kept_values import (
    ABSENT,
    Kept,
    canonical,
    kept,
    moves,
    numbers_of,
    parts_of,
    recipe_of,
)
from chatmill.render.jinja.limits import LimitError
from chatmill.render.jinja.positions import OWN, Position, added, base_form
from chatmill.render.jinja.questions import HOLE, Unfollowed
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.replay import Replay, table_key
from chatmill.render.jinja.sandbox import FAILURES
from chatmill.render.jinja.traced import joined, made_of
from chatmill.render.jinja.traced_values import wrapped
from chatmill.render.jinja.tries import REFUSED, Leaf, Output, Part, Table
from chatmill.render.jinja.turn import ROOT, Replies, Turn
from chatmill.render.jinja.views import LoopView, MessagesView, MessageView, PositionRange, Space

Body = Callable[..., str]


class TurnRun(Replies):
    """One rendering of the first messages of a conversation."""

    def __init__(self, view: RecordView, count: int, tries: Replay, undefined: Callable[..., Any]) -> None:
        """Nothing has run yet."""
        super().__init__(view, count, tries.shapes)
        self.tries, self.undefined = tries, undefined
        self.key: Any = None
        """What is known of the root before it asks."""

    # ---- state

    def read(self, number: int, name: str) -> Any:
        """Return a value of a namespace to the template."""
        live, key = self.turn.live, (number, name)
        if key not in live:
            turn, value = self.turn, self.spaces[number].get(name, ABSENT)
            first = len(turn.registers)
            turn.registers += numbers_of(value)
            turn.trace.append((("state", number, name), canonical(value, turn.own)))
            if value is ABSENT:
                raise AttributeError(name)
            live[key] = self._revived(value, iter(range(first, len(turn.registers))))
        return live[key]

    def write(self, number: int, name: str, value: Any) -> None:
        """Set a value of a namespace for the template."""
        turn = self.turn
        recipe = recipe_of(value, turn)
        if recipe[0] == "space" and recipe[1] >= turn.mark > number:
            raise Unfollowed("a namespace outlives its turn")
        turn.trace.append((("!set", number, name, recipe), None))
        self.spaces[number][name] = kept(recipe, turn)
        turn.live[number, name] = value

    def make_space(self, values: dict[str, Any]) -> Space:
        """Make a namespace for the template."""
        recipes = tuple((name, recipe_of(value, self.turn)) for name, value in values.items())
        self.turn.trace.append((("!make", recipes), None))
        number = len(self.spaces)
        self.spaces.append({name: kept(recipe, self.turn) for name, recipe in recipes})
        self.turn.live.update({(number, name): value for name, value in values.items()})
        return Space(number, self.read, self.write)

    def _revived(self, value: Kept, registers: Iterator[int]) -> Any:
        """Return the live form of a kept value; its numbers are in these registers of the running turn."""
        kind = value[0]
        if kind == "plain":
            return value[2]
        if kind == "position":
            return Position(value[1], base_form(next(registers)), self.turn)
        if kind == "text":
            return text_of_parts(value[1], self)
        if kind == "message":
            return MessageView.at(self, value[1])
        if kind == "messages" or kind == "range":
            borders = [
                Position(item, base_form(next(registers)), self.turn) if moving else item
                for item, moving in zip(value[1:], value[4], strict=False)
            ]
            rest = value[1 + len(borders) : 4]
            arguments = (*borders, *rest)
            return MessagesView(self, *arguments) if kind == "messages" else PositionRange(*arguments)
        if kind == "space":
            return Space(value[1], self.read, self.write)
        if kind == "value":
            with self.unnoted():  # its type was noted when it was first read
                return wrapped(self.field(value[1]), value[1], self)
        if kind == "list":
            values = [self._revived(item, registers) for item in value[2]]
            if isinstance(value[1], tuple):
                return dict(zip(value[1], values, strict=True))
            return tuple(values) if value[1] else values
        if kind == "nothing":
            return self.undefined()
        raise Unfollowed(f"a {kind} in a namespace")

    # ---- loops

    def run_loop(self, site: int, iterable: Any, values: tuple[Any, ...], body: Body) -> str:
        """Run a loop over messages for the template."""
        outer = self.turn
        recipe, recipes = recipe_of(iterable, outer), tuple(recipe_of(value, outer) for value in values)
        outer.holes.append([])
        hole = len(outer.holes) - 1
        loop = Loop(self, site, kept(recipe, outer), [kept(item, outer) for item in recipes], outer)
        question = ("loop", site, recipe, recipes)
        try:
            outer.holes[hole] = self._turns(loop, body, values, question)
        except (*FAILURES, Unfollowed):
            outer.trace.append((question, REFUSED))
            raise
        outer.trace.append((question, ()))
        outer.live.clear()  # the loop may have changed what namespaces hold: it is read again
        return made_of("", (HOLE, hole), self)

    def _turns(self, loop: Loop, body: Body, values: tuple[Any, ...], question: Question) -> list[Output]:
        """Run the turns of a loop; of the root's loops those that are new, and one after each."""
        written: list[Output] = []
        table, spaces, outer = loop.table, len(self.spaces), self.turn
        before = [*outer.trace, (question, ())]
        number, is_new, is_asked = 0, False, outer.outer is None
        while number < len(loop.positions):
            is_skipping = is_asked and not is_new
            turns = self.tries.known_turns(self, self.key, before, len(outer.holes) - 1) if is_skipping else None
            if turns is not None and turns.turns > number:
                number, written = turns.turns, turns.outputs
                self.spaces[:] = self.tries.state_after(turns)
                self.view.is_keyed = self.view.is_keyed and turns.is_keyed
                if turns.is_over:
                    break
            own, size = loop.positions[number], self.tries.size
            if loop.moves:
                table = loop.table_at(own)
            turn = self.turn = Turn(self, own, outer, loop.is_message, loop.registers.copy())

            def write(turn: Turn = turn, number: int = number) -> str:
                registers = iter(range(len(turn.registers)))
                pairs = zip(values, loop.arguments, strict=True)
                arguments = [self._argument(value, name, registers) for value, name in pairs]
                item = MessageView.at(self, turn.own) if loop.is_message else Position(turn.own, base_form(OWN), turn)
                return body(item, LoopView(turn, loop.positions, number, loop.forms, self.undefined), *arguments)

            try:
                written += self._learned(table, self.shapes[own] if loop.is_message else 0, turn, write)
            finally:
                self.turn = outer
            del self.spaces[spaces:]
            if turn.breaks:
                break
            number, is_new = number + 1, self.tries.size > size
            is_asked = is_asked and (is_new or not is_skipping)  # else compiled code does not know what is known
        return written

    def _learned(self, table: Table, key: Any, turn: Turn, write: Callable[[], str]) -> list[Output]:
        """Run a turn by the template's code, remember it, and return what it wrote."""
        try:
            leaf = self.leaf(write(), turn)
        except LimitError:
            raise
        except (*FAILURES, Unfollowed):
            if not self.tries.learn(table, key, turn.trace, Leaf((), is_refused=True)).is_keyed:
                self.view.is_keyed = False
            raise
        leaf = self.tries.learn(table, key, turn.trace, leaf)
        if not leaf.is_keyed:
            self.view.is_keyed = False
        outputs: list[Output] = []
        for segment in leaf.written:
            if segment >= 0:
                outputs.append((segment, turn.own))
            else:
                outputs += turn.holes[~segment]
        return outputs

    def _argument(self, live: Any, value: Kept, registers: Iterator[int]) -> Any:
        return live if value[0] in ("plain", "thing", "nothing") else self._revived(value, registers)

    def leaf(self, text: str, turn: Turn) -> Leaf:
        """Return what a turn wrote as segments."""
        written: list[int] = []
        parts: list[Part] = []
        for literal, expression in parts_of(text, turn.own):
            if expression is not None and expression[0] == HOLE:
                if parts:
                    written.append(self.tries.segments.number(tuple(parts)))
                    parts = []
                written.append(~expression[1])
            else:
                parts.append((literal, expression))
        if parts:
            written.append(self.tries.segments.number(tuple(parts)))
        return Leaf(tuple(written), breaks=turn.breaks)

    # ---- the whole of it

    def hooked(self, key: Any, code: Callable[[], str]) -> list[Output]:
        """Run the template, and remember all turns."""
        turn = self.turn = Turn(self, ROOT, None, False, [])
        self.key = key
        try:
            return self._learned(self.tries.table("root"), key, turn, code)
        finally:
            vars(self).clear()  # cycles (the turn's, those of Jinja's macros) must not hold a batch of conversations


class Loop:
    """One loop over messages or positions: what all of its turns share."""

    def __init__(self, run: TurnRun, site: int, iterable: Kept, arguments: list[Kept], outer: Turn) -> None:
        """`iterable` is a kept view of messages, or a range."""
        self.outer, self.arguments, self._run = outer, arguments, run
        self.registers = [number for argument in arguments for number in numbers_of(argument)]
        self.is_message = iterable[0] == "messages"
        if self.is_message:
            _, start, left_out, is_reversed, (is_moving,) = iterable
            view = MessagesView(run, start, left_out, is_reversed)
            self.positions, forms = view.positions(), view.forms()
        else:
            _, start, stop, step, _ = iterable
            is_moving, is_reversed, left_out = True, step < 0, 0
            self.positions = range(start, stop, step)
            if abs(step) != 1:
                raise Unfollowed("a range with a step")
        if is_moving:
            first = base_form(len(self.registers))
            own = base_form(OWN)
            forms = added(first, own, -1) if is_reversed else added(own, first, -1), base_form(len(self.registers) + 1)
            self.registers += [self.positions[0] if self.positions else 0, len(self.positions)]
        assert forms is not None
        self.forms = forms
        tag = (is_reversed, left_out, None if is_moving else start)
        self._key = (site, self.is_message, tag, len(run.spaces))
        self.moves = any(map(moves, arguments))
        self.table = self.table_at(0)

    def table_at(self, own: int) -> Table:
        """Return the tries of a turn, where what the body is handed looks different from each."""
        return self._run.tries.table(table_key(*self._key, [canonical(argument, own) for argument in self.arguments]))


def text_of_parts(parts: tuple[Part, ...], run: TurnRun) -> str:
    """Return a text with its origins, for this conversation."""
    return joined(
        literal if expression is None else made_of(_text(literal, expression, run), expression, run)
        for literal, expression in parts
    )


def _text(literal: str | None, expression: Expression, run: TurnRun) -> str:
    return literal if literal is not None else evaluate(expression, run.field)
