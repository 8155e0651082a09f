"""One rendering, as turns: what each turn asks is remembered, so that another one with its replies need not be run.

Turns run on values that note what is asked of them. What they asked, in order, with the replies, becomes a way through
a decision trie (`tries`); what they wrote is its leaf. State that outlives a turn (namespaces) is changed by events on
that way. Compiled code goes the ways that are known (`replay`). If one is new, the template runs, and of the loops
around everything only the turns that are new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from jinja2.runtime import Macro, Undefined
from jinja2.utils import missing

from chatmill.core.native.replayer import KnownTurns
from chatmill.render.jinja.counting import CountingSandbox
from chatmill.render.jinja.expressions import Expression, Question, evaluate
from chatmill.render.jinja.kept_values import (
    ABSENT,
    Kept,
    Recipe,
    forms_of,
    kept,
    moves,
    parts_of,
    recipe_of,
    seen,
    spaces_of,
)
from chatmill.render.jinja.limits import LimitError
from chatmill.render.jinja.loops import HANDED
from chatmill.render.jinja.positions import OWN, Form, Position, added, base_form, handed
from chatmill.render.jinja.questions import HOLE, Unfollowed, shifted, shifted_address, shifted_path
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.replay import LoopBody, Replay
from chatmill.render.jinja.sandbox import FAILURES
from chatmill.render.jinja.traced import joined, made_of
from chatmill.render.jinja.traced_values import wrapped
from chatmill.render.jinja.tries import REFUSED, Leaf, Output, Part, Table
from chatmill.render.jinja.turn import ROOT, Replies, Turn
from chatmill.render.jinja.views import LoopView, MessagesView, MessageView, PositionRange, Space

Body = Callable[..., str]


class NeedsRootError(Exception):
    """A turn cannot be run without what comes before its loop."""


class Handed(NamedTuple):
    """What the body of a loop is handed under one name."""

    argument: int
    """Its index among the arguments of the body."""
    variable: str
    """The variable around the loop that it is the value of, as `outside_reads` names it."""
    value: Any
    """What it is outside of the body."""


class TurnRun(Replies):
    """One rendering of the first messages of a conversation."""

    def __init__(self, view: RecordView, count: int, tries: Replay, environment: CountingSandbox) -> None:
        """Nothing has run yet."""
        super().__init__(view, count, tries.shapes)
        self.tries, self.undefined, self._environment = tries, environment.undefined, environment
        self.global_values = environment.globals
        self.global_names = {id(value): name for name, value in environment.globals.items()}
        self.called: LoopBody | None = None
        """The body whose turns run without the root."""

    def count_kept(self, items: int) -> None:
        """Count a value with so many in it that outlives a turn."""
        self._environment.budget.step(items)

    # ---- state

    def read(self, number: int, name: str) -> Any:
        """Return a value of a namespace to the template."""
        turn, key = self.turn, (number, name)
        if key not in turn.live:
            value = self.spaces[number].get(name, ABSENT)
            if value.recipe[0] in ("list", "dict"):
                self.count_kept(len(value.recipe[-1]))
            turn.trace.append((("state", number, name), seen(value.recipe, value.own - turn.own)))
            if value is ABSENT:
                raise AttributeError(name)
            turn.live[key] = self._revived(value.recipe, value.own, handed(value.numbers, turn))
        return turn.live[key]

    def write(self, number: int, name: str, value: Any) -> None:
        """Set a value of a namespace for the template."""
        turn = self.turn
        recipe = recipe_of(value, turn)
        if number < turn.mark and any(space >= turn.mark for space in spaces_of(recipe)):
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

    def _revived(self, recipe: Recipe, own: int, numbers: Iterator[Position]) -> Any:
        """Return what the template works with, of a value that the turn at `own` made."""
        kind = recipe[0]
        if kind == "plain":
            return recipe[2]
        if kind == "float":
            return float.fromhex(recipe[1])
        if kind == "position":
            return next(numbers)
        if kind == "text":
            return joined(self._part(literal, e and shifted(e, own)) for literal, e in recipe[1])
        if kind == "message":
            return MessageView.at(self, shifted_address(recipe[1], own))
        if kind == "messages":
            return MessagesView(self, _border(recipe[1], numbers), *recipe[2:])
        if kind == "range":
            return PositionRange(_border(recipe[1], numbers), _border(recipe[2], numbers), recipe[3])
        if kind == "space":
            return Space(recipe[1], self.read, self.write)
        if kind == "value":
            path = shifted_path(recipe[2], own)
            with self.unnoted():  # its type was noted when it was first read
                return wrapped(self.field(path), path, self)
        if kind == "list":
            values = [self._revived(item, own, numbers) for item in recipe[2]]
            return tuple(values) if recipe[1] else values
        if kind == "dict":
            entries = [self._revived(item, own, numbers) for item in recipe[1]]
            return dict(zip(entries[::2], entries[1::2], strict=True))
        if kind == "method":
            return getattr(self._revived(recipe[2], own, numbers), recipe[1])
        if kind == "nothing":
            return self.undefined()
        if self.called is not None:
            return self._called_with(recipe)
        raise Unfollowed(f"a {kind} in a namespace")

    def _called_with(self, recipe: Recipe) -> Any:
        """Return a function of the template, or one that every template is given."""
        assert self.called is not None
        if recipe[0] == "macro" and recipe[1] in self.called.macros:
            return self.called.macros[recipe[1]]
        if recipe[0] == "global":
            return self.global_values[recipe[1]]
        raise NeedsRootError

    def _part(self, literal: str | None, expression: Expression | None) -> str:
        if expression is None:
            return literal or ""
        return made_of(evaluate(expression, self.field) if literal is None else literal, expression, self)

    # ---- loops

    def run_loop(
        self, site: int, names: tuple[tuple[str, str], ...], iterable: Any, values: tuple[Any, ...], body: Body
    ) -> str:
        """Run a loop over messages for the template; its body is handed values of some names, each a variable."""
        outer = self.turn
        question = ("loop", site, recipe_of(iterable, outer), tuple(recipe_of(value, outer) for value in values))
        loop = Loop(self, site, iterable, [kept(recipe, outer) for recipe in question[3]])
        loop.hand(names, values)
        if outer.outer is None and self.tries.bodies.get(site, self) is not None:
            macros = {value._func.__code__: value for value in values if isinstance(value, Macro)}
            self.tries.bodies[site] = LoopBody(names, body, macros)
        outer.holes.append([])
        hole = len(outer.holes) - 1
        try:
            self._run_turns(loop, body, values, question)
        except (*FAILURES, Unfollowed):
            outer.trace.append((question, REFUSED))
            raise
        outer.trace.append((question, ()))
        outer.live.clear()  # the loop may have changed what namespaces hold: it is read again
        return made_of("", (HOLE, hole), self)

    def _run_turns(self, loop: Loop, body: Body, values: tuple[Any, ...], question: Question) -> None:
        """Run the turns of a loop; of the root's loops those that are new, and one after each.

        `values` are what the loop's body is handed.
        """
        outer = self.turn
        written = outer.holes[-1]
        before = [*outer.trace, (question, ())]
        number = 0
        is_new = False
        is_asked = outer.outer is None
        while number < len(loop.positions):
            is_skipping = is_asked and not is_new
            turns = self.tries.known_turns(self, self.key, before, len(outer.holes) - 1) if is_skipping else None
            if turns is not None and turns.turns > number:
                number = turns.turns
                written[:] = turns.outputs
                self._enter_state(turns)
                if turns.is_over:
                    break
            turn, outputs, is_new = self._run_turn(loop, body, values, number)
            written += outputs
            if turn.breaks:
                break
            number += 1
            is_asked = is_asked and (is_new or not is_skipping)  # else compiled code does not know what is known

    def _enter_state(self, turns: KnownTurns) -> None:
        """Have namespaces hold what known turns leave in them."""
        self.spaces[:] = self.tries.state_after(turns)
        self.view.is_keyed = self.view.is_keyed and turns.is_keyed

    def _run_turn(
        self, loop: Loop, body: Body, values: tuple[Any, ...], number: int
    ) -> tuple[Turn, list[Output], bool]:
        """Run one turn of a loop; return it, what it wrote, and whether it was new."""
        outer = self.turn
        own = loop.positions[number]
        size = self.tries.size
        spaces = len(self.spaces)
        turn = self.turn = Turn(self, own, outer, loop.is_message)
        turn.loop = loop

        def write() -> str:
            turn.arguments = arguments = [
                value if not held.numbers else self._revived(held.recipe, held.own, handed(held.numbers, turn))
                for value, held in zip(values, loop.arguments, strict=True)
            ]
            view = LoopView(turn, loop.positions, number, loop.forms_in(turn), self.undefined)
            item = MessageView.at(self, turn.own) if loop.is_message else Position(turn.own, base_form(OWN), turn)
            return body(item, view, *arguments)

        try:
            outputs = self._learned(loop.table(own), self.shapes[own] if loop.is_message else 0, turn, write)
        finally:
            self.turn = outer
        del self.spaces[spaces:]
        return turn, outputs, self.tries.size > size

    # ---- turns without the root

    def learn_new_turns(self, key: Any) -> None:
        """Run turns that are new in loops of the root, but not the root; `NeedsRootError` where that cannot be.

        If the root itself goes a new way, it runs afterwards.
        """
        self.key = key
        while (turns := self.tries.turns_before_unknown(self, key)) is not None:
            size = self.tries.size
            self._call_turns(turns)
            if self.tries.size == size:  # compiled code cannot know them
                raise NeedsRootError

    def _call_turns(self, turns: KnownTurns) -> None:
        """Run the turns of a loop after known ones, as long as they are new."""
        _, site, iterable, recipes = self.tries.loop_questions[turns.loop]
        body = self.tries.bodies.get(site)
        if body is None:
            raise NeedsRootError
        self.called = body
        self.turn = Turn(self, ROOT, None, False)
        self._enter_state(turns)
        numbers = iter(turns.given)
        arguments = [Kept(recipe, ROOT, tuple(islice(numbers, len(forms_of(recipe))))) for recipe in recipes]
        values = tuple([self._revived(one.recipe, ROOT, handed(one.numbers, self.turn)) for one in arguments])
        forms = iterable[1:2] if iterable[0] == "messages" else iterable[1:3]
        borders = [border for form, border in zip(forms, turns.borders, strict=False) if form[0]]
        loop = Loop(self, site, self._revived(iterable, ROOT, handed(borders, self.turn)), arguments)
        loop.hand(body.names, values)
        number = turns.turns
        is_new = True
        try:
            while is_new and number < len(loop.positions):
                turn, _, is_new = self._run_turn(loop, body.write, values, number)
                if turn.breaks:
                    break
                number += 1
        except NeedsRootError:
            self.tries.bodies[site] = None
            raise

    def outside(self, name: str, value: Any, variable: str) -> Any:
        """Return what a macro reads of a variable around it, as the turn that runs was handed it.

        A macro of an earlier run has that run's values around it: the variable alone says which one the turn has.
        """
        turn = self.turn
        if turn.loop is None:
            return value
        if not self._is_handed(turn, name, value, variable):
            raise Unfollowed(f"a macro reads {name!r}, which the loop around it was not handed")
        passed = turn.loop.handed[name]
        return passed.value if isinstance(passed.value, Undefined) else turn.arguments[passed.argument]

    def _is_handed(self, turn: Turn, name: str, value: Any, variable: str) -> bool:
        """Return whether a turn was handed the value of a variable under a name."""
        if turn.loop is None or name not in turn.loop.handed:
            return False
        passed = turn.loop.handed[name]
        if passed.variable == HANDED:
            return turn.outer is not None and self._is_handed(turn.outer, name, value, variable)
        if passed.variable != variable:
            return False
        if self.called is not None:
            return True
        if isinstance(passed.value, Undefined):
            return value is missing or isinstance(value, Undefined)
        return value is passed.value

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
        turn = self.turn = Turn(self, ROOT, None, False)
        self.key = key
        try:
            return self._learned(self.tries.table("root"), key, turn, code)
        finally:
            vars(self).clear()  # cycles (the turn's, those of Jinja's macros) must not hold a batch of conversations


class Loop:
    """One loop over messages or positions: what all of its turns share."""

    def __init__(self, run: TurnRun, site: int, iterable: MessagesView | PositionRange, arguments: list[Kept]) -> None:
        """`arguments` are what the body is handed."""
        self.positions, self.arguments, self._run = iterable.positions(), arguments, run
        self.is_message, self._forms = isinstance(iterable, MessagesView), iterable.forms()
        self.handed: dict[str, Handed] = {}
        """What the body is handed, by name."""
        is_moving = self._forms is None
        tag = (iterable.is_reversed, iterable.left_out, None if is_moving else iterable.start)
        self._is_reversed = iterable.is_reversed
        self._key = (site, self.is_message, tag, len(run.spaces))
        self._moves = any(moves(argument.recipe) for argument in arguments)
        self._table = None if self._moves else self._table_at(0)

        if isinstance(iterable, PositionRange) and abs(iterable.step) != 1:
            raise Unfollowed("a range with a step")

    def hand(self, names: tuple[tuple[str, str], ...], values: tuple[Any, ...]) -> None:
        """Say what the body is handed: under each name the value of a variable."""
        for index, ((name, variable), value) in enumerate(zip(names, values, strict=True)):
            self.handed[name] = Handed(index, variable, value)

    def forms_in(self, turn: Turn) -> tuple[Form, Form]:
        """Return what index0 and the length are to a turn that was handed the arguments."""
        if self._forms is not None:
            return self._forms
        first, length = handed((self.positions[0] if self.positions else 0, len(self.positions)), turn)
        own = base_form(OWN)
        index = added(first.form, own, -1) if self._is_reversed else added(own, first.form, -1)
        return index, length.form

    def table(self, own: int) -> Table:
        """Return the tries of a turn; what the body is handed may look different from each."""
        return self._table_at(own) if self._table is None else self._table

    def _table_at(self, own: int) -> Table:
        looks = tuple(seen(argument.recipe, argument.own - own) for argument in self.arguments)
        return self._run.tries.table((*self._key, looks))


def _border(form: Form, numbers: Iterator[Position]) -> int:
    return next(numbers) if form[0] else form[1]
