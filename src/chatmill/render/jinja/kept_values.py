"""Values that outlive a turn: what a namespace holds, and what a loop's body is handed.

Such a value has three forms. *Live* is what the template works with. *Kept* is the same for one conversation, without
anything traced in it: it is what state holds. A *recipe* says how a turn makes it from its own position, so that
another turn makes its own. Kinds of kept values and recipes, by their first entry:

    ("position", number or form)   a number that follows from positions
    ("plain", type name, value)    a constant
    ("text", parts)                a text: pairs of a literal and an expression
    ("message", address)           a message of the conversation
    ("messages", start, left out at the end, is reversed)
    ("range", start, stop, step)
    ("space", number)              a namespace
    ("value", path)                an object, list or number of the record
    ("list", is a tuple, values)   a list of such values; of an object, the keys come before its values
    ("nothing",)                   an undefined name
    ("thing", name)                a macro or function: the same in every turn
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2.runtime import Macro, Undefined

from chatmill.render.jinja.expressions import Expression
from chatmill.render.jinja.positions import Form, Position, value_of
from chatmill.render.jinja.questions import HOLE, Unfollowed, holds_hole, shifted, shifted_address, shifted_path
from chatmill.render.jinja.traced import Traced, plain_text
from chatmill.render.jinja.traced_values import TracedDict, TracedFloat, TracedInt, TracedList
from chatmill.render.jinja.turn import Turn
from chatmill.render.jinja.views import MessagesView, MessageView, PositionRange, Space

Kept = tuple[Any, ...]
Recipe = tuple[Any, ...]
ABSENT: Kept = ("absent",)
_FIXED = frozenset({"plain", "space", "nothing", "thing", "absent"})
"""Kinds that are the same to every turn."""
_PLAIN = (str, bool, int, float, type(None))
_RECORD_VALUES = (TracedDict, TracedList, TracedInt, TracedFloat)


def recipe_of(value: Any, turn: Turn) -> Recipe:
    """Say how a turn makes a value; `Unfollowed` where that cannot be said."""
    kind = type(value)
    if kind is Position:
        if value.turn is not turn and any(base >= -1 for base, _ in value.form[0]):
            raise Unfollowed("a number of another turn")
        return ("position", value.form)
    if kind in _PLAIN:
        return ("plain", kind.__name__, value)
    if kind is Traced:
        parts = parts_of(value, turn.own)
        if any(e is not None and e[0] == HOLE for _, e in parts):
            raise Unfollowed("what a loop has written outlives its turn")
        return ("text", parts)
    if kind is MessageView:
        return ("message", shifted_address(value.address, -turn.own))
    if kind is MessagesView:
        return ("messages", _border(value.start, turn), value.left_out, value.is_reversed)
    if kind is PositionRange:
        return ("range", *(_border(item, turn) for item in (value.start, value.stop)), value.step)
    if kind is Space:
        return ("space", value._number)
    if kind in _RECORD_VALUES:
        return ("value", shifted_path(value._path, -turn.own))
    if kind in (list, tuple):
        return ("list", kind is tuple, tuple(recipe_of(item, turn) for item in value))
    if kind is dict:
        return ("list", tuple(value), tuple(recipe_of(item, turn) for item in value.values()))
    if isinstance(value, Undefined):
        return ("nothing",)
    if isinstance(value, Macro) or callable(value):
        return ("thing", getattr(value, "name", None) or getattr(value, "__name__", repr(value)))
    raise Unfollowed(f"a value of type {kind.__name__} outlives a turn")


def _border(value: Any, turn: Turn) -> Any:
    return recipe_of(value, turn)[1] if type(value) is Position else ((), value)


def parts_of(text: str, own: int) -> tuple[tuple[str | None, Expression | None], ...]:
    """Return the parts of a text, relative to a message: literals, and expressions over its fields."""
    if type(text) is not Traced:
        return ((plain_text(text), None),) if text else ()
    parts: list[tuple[str | None, Expression | None]] = []
    for piece, expression in text.pieces():
        if expression is None:
            if parts and parts[-1][1] is None:
                parts[-1] = ((parts[-1][0] or "") + piece, None)
            elif piece:
                parts.append((piece, None))
            continue
        if expression[0] == "apply" and holds_hole(expression):
            raise Unfollowed("what a loop has written is changed")
        parts.append((piece if expression[0] == "const" else None, shifted(expression, -own)))
    return tuple(parts)


def kept(recipe: Recipe, turn: Turn) -> Kept:
    """Make the value of a recipe in a turn."""
    return kept_with(recipe, turn.own, lambda form: value_of(form, turn.own, turn.run.count, turn.registers))


def kept_with(recipe: Recipe, own: int, number: Callable[[Form], int]) -> Kept:
    """Make the value of a recipe in the turn of a message; `number` gives its numbers, in the order of `numbers_of`."""
    kind = recipe[0]
    if kind in _FIXED:
        return recipe
    if kind == "position":
        return (kind, number(recipe[1]))
    if kind == "text":
        return (kind, tuple((literal, e and shifted(e, own)) for literal, e in recipe[1]))
    if kind == "message":
        return (kind, shifted_address(recipe[1], own))
    if kind == "messages" or kind == "range":
        borders = [number(form) for form in recipe[1 : 2 + (kind == "range")]]
        moving = tuple(bool(form[0]) for form in recipe[1 : 2 + (kind == "range")])
        return (kind, *borders, *recipe[1 + len(borders) :], moving)
    if kind == "value":
        return (kind, shifted_path(recipe[1], own))
    return (kind, recipe[1], tuple(kept_with(item, own, number) for item in recipe[2]))


def canonical(value: Kept, own: int) -> Kept:
    """Return what a kept value is to a turn, apart from its numbers."""
    kind = value[0]
    if kind in _FIXED:
        return value
    if kind == "position":
        return ("position",)
    if kind == "text":
        return (kind, tuple((literal, e and shifted(e, -own)) for literal, e in value[1]))
    if kind == "message":
        return (kind, shifted_address(value[1], -own))
    if kind == "messages":
        return (kind, None if value[4][0] else value[1], *value[2:])
    if kind == "range":
        return (kind, *(None if moves else item for item, moves in zip(value[1:3], value[4], strict=True)), *value[3:])
    if kind == "value":
        return (kind, shifted_path(value[1], -own))
    return (kind, value[1], tuple(canonical(item, own) for item in value[2]))


def numbers_of(value: Kept) -> list[int]:
    """Return the numbers that the canonical form of a kept value leaves out: they go into registers."""
    kind = value[0]
    if kind == "position":
        return [value[1]]
    if kind == "messages":
        return [value[1]] if value[4][0] else []
    if kind == "range":
        return [item for item, moving in zip(value[1:3], value[4], strict=True) if moving]
    if kind == "list":
        return [number for item in value[2] for number in numbers_of(item)]
    return []


def moves(value: Kept) -> bool:
    """Whether the canonical form depends on the turn's own position."""
    if value[0] == "text":
        return any(e is not None for _, e in value[1])
    if value[0] == "list":
        return any(map(moves, value[2]))
    return value[0] == "value" or (value[0] == "message" and type(value[1]) is int)
