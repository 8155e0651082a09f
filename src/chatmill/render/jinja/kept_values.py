"""Values that outlive a turn: what a namespace holds, and what a loop's body is handed.

A *recipe* says how a turn makes a value from its own position, so that another turn makes its own. A `Kept` value is a
recipe with the turn that made it and the numbers it had then. Kinds of recipes, by their first entry:

    ("position", form)             a number that follows from positions
    ("plain", type name, value)    a constant
    ("float", digits)              a constant; digits tell 0.0 from -0.0
    ("text", parts)                a text: pairs of a literal and an expression
    ("message", address)           a message of the conversation
    ("messages", start, left out at the end, is reversed)      the start is a form
    ("range", start, stop, step)                               start and stop are forms
    ("space", number)              a namespace
    ("value", type name, path)     an object, list or number of the record
    ("list", is a tuple, values)   a list of such values
    ("dict", keys and values)      an object of such values: each key is followed by its value
    ("nothing",)                   an undefined name
    ("macro", code)                a macro of the template, by the place where it is defined; what it reads is observed
    ("global", name)               a function that the environment gives to every template
    ("method", name, value)        a method of such a value
"""

from __future__ import annotations

from math import isnan
from typing import Any, NamedTuple

from jinja2.runtime import Macro, Undefined

from chatmill.render.jinja.expressions import Expression
from chatmill.render.jinja.limits import measured
from chatmill.render.jinja.positions import Form, Position, constant_form, value_of
from chatmill.render.jinja.questions import HOLE, Unfollowed, holds_hole, shifted, shifted_address, shifted_path
from chatmill.render.jinja.traced import Traced, plain_text
from chatmill.render.jinja.traced_values import TracedDict, TracedFloat, TracedInt, TracedList
from chatmill.render.jinja.turn import Turn
from chatmill.render.jinja.views import MessagesView, MessageView, PositionRange, Space

Recipe = tuple[Any, ...]
MOST_KEPT = 100_000
"""Values inside of one that a turn can make again; a list that holds a list twice has them twice."""
_PLAIN = (str, bool, int, type(None))
_RECORD_VALUES = (TracedDict, TracedList, TracedInt, TracedFloat)


class Kept(NamedTuple):
    """A value for one conversation, without anything traced in it: it is what state holds."""

    recipe: Recipe
    own: int
    """The position of the turn that made it."""
    numbers: tuple[int, ...]
    """The values of its `forms_of`."""


ABSENT = Kept(("absent",), 0, ())


def recipe_of(value: Any, turn: Turn) -> Recipe:
    """Say how a turn makes a value; `Unfollowed` where that cannot be said."""
    if type(value) in (list, tuple, dict):
        items = measured((value,)).items
        if items > MOST_KEPT:
            raise Unfollowed("a value with that many values in it outlives a turn")
        turn.run.count_kept(items)
    return _recipe_of(value, turn)


def _recipe_of(value: Any, turn: Turn) -> Recipe:
    kind = type(value)
    if kind is Position:
        if value.turn is not turn and any(base >= -1 for base, _ in value.form[0]):
            raise Unfollowed("a number of another turn")
        return ("position", value.form)
    if kind in _PLAIN:
        return ("plain", kind.__name__, value)
    if kind is float:
        if isnan(value):
            raise Unfollowed("a number that is equal to nothing, but to itself in a list, outlives a turn")
        return ("float", value.hex())
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
        return ("range", _border(value.start, turn), _border(value.stop, turn), value.step)
    if kind is Space:
        return ("space", value._number)
    if kind in _RECORD_VALUES:
        return ("value", kind.__name__, shifted_path(value._path, -turn.own))
    if kind in (list, tuple):
        return ("list", kind is tuple, tuple(_shared_recipe_of(item, turn) for item in value))
    if kind is dict:
        return ("dict", _entries(value, turn))
    if isinstance(value, Undefined):
        return ("nothing",)
    if callable(value):
        return _recipe_of_callable(value, turn)
    raise Unfollowed(f"a value of type {kind.__name__} outlives a turn")


def _entries(value: dict[Any, Any], turn: Turn) -> tuple[Recipe, ...]:
    """Return the recipes of the keys and values of an object, each key before its value."""
    entries: list[Recipe] = []
    for key, item in value.items():
        if type(key) is Traced and any(e is not None and e[0] != "const" for _, e in key.pieces()):
            raise Unfollowed("a text of the record is the key of an object that outlives its turn")
        entries += [_shared_recipe_of(key, turn), _shared_recipe_of(item, turn)]
    return tuple(entries)


def _shared_recipe_of(value: Any, turn: Turn) -> Recipe:
    """Return the recipe of a value inside of others: a list that grows turn by turn has the same ones in each."""
    recipe = _recipe_of(value, turn)
    shared: Recipe = turn.run.recipes.setdefault(recipe, recipe)
    return shared


def _recipe_of_callable(value: Any, turn: Turn) -> Recipe:
    """Say how a turn makes a function: what it calls is told apart by more than its name."""
    name = turn.run.global_names.get(id(value))
    if name is not None:
        return ("global", name)
    if isinstance(value, Macro):
        function = value._func
        if function.__qualname__ != "root.<locals>.macro":
            raise Unfollowed("a macro that another one has made outlives its turn")
        if turn.run.macros.setdefault(function.__code__, value) is not value:
            raise Unfollowed("a macro that is defined again and again outlives its turn")
        return ("macro", function.__code__)
    owner = getattr(value, "__self__", None)
    if owner is None or getattr(owner, value.__name__, None) != value:
        raise Unfollowed(f"a function of type {type(value).__name__} outlives a turn")
    return ("method", value.__name__, _recipe_of(owner, turn))


def _border(value: int, turn: Turn) -> Form:
    form: Form = _recipe_of(value, turn)[1] if type(value) is Position else constant_form(value)
    return form


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
    numbers = (value_of(form, turn.own, turn.run.count, turn.registers) for form in forms_of(recipe))
    return Kept(recipe, turn.own, tuple(numbers))


_NESTED = frozenset({"list", "dict", "method"})
"""Recipes that are made of others."""


def _inner(recipe: Recipe) -> tuple[Recipe, ...]:
    """Return the recipes that a nested one is made of."""
    if recipe[0] == "method":
        return (recipe[2],)
    inner: tuple[Recipe, ...] = recipe[-1]
    return inner


def spaces_of(recipe: Recipe) -> list[int]:
    """Return the numbers of the namespaces in a value."""
    if recipe[0] in _NESTED:
        return [number for item in _inner(recipe) for number in spaces_of(item)]
    return [recipe[1]] if recipe[0] == "space" else []


def forms_of(recipe: Recipe) -> list[Form]:
    """Return the numbers of a value that may differ between turns: they go into registers, in this order."""
    kind = recipe[0]
    if kind in _NESTED:
        return [form for item in _inner(recipe) for form in forms_of(item)]
    borders = {"position": recipe[1:2], "messages": recipe[1:2], "range": recipe[1:3]}.get(kind, ())
    return [form for form in borders if form[0]]


def seen(recipe: Recipe, by: int) -> Recipe:
    """Return what a value looks like to a turn so many messages before the one that made it, apart from its numbers."""
    kind = recipe[0]
    if kind in ("position", "messages", "range"):
        return tuple(None if type(entry) is tuple and entry[0] else entry for entry in recipe)
    if kind == "text":
        return (kind, tuple((literal, e and shifted(e, by)) for literal, e in recipe[1]))
    if kind == "message":
        return (kind, shifted_address(recipe[1], by))
    if kind == "value":
        return (kind, recipe[1], shifted_path(recipe[2], by))
    if kind == "list":
        return (kind, recipe[1], tuple(seen(item, by) for item in recipe[2]))
    if kind == "dict":
        return (kind, tuple(seen(item, by) for item in recipe[1]))
    if kind == "method":
        return (kind, recipe[1], seen(recipe[2], by))
    return recipe


def moves(recipe: Recipe) -> bool:
    """Return whether what a value looks like depends on the turn that looks."""
    if recipe[0] == "text":
        return any(e is not None for _, e in recipe[1])
    if recipe[0] in _NESTED:
        return any(map(moves, _inner(recipe)))
    return recipe[0] == "value" or (recipe[0] == "message" and type(recipe[1]) is int)
