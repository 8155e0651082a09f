"""For how many messages a reply stays what it is: turns of shorter and longer conversations are shared by it."""

from __future__ import annotations

from typing import Any

from chatmill.render.jinja.expressions import Question
from chatmill.render.jinja.kept_values import OF_MESSAGES, paths_of
from chatmill.render.jinja.positions import COUNT, Form, value_of

FOREVER = 1 << 60
Counts = tuple[int, int]
"""The fewest and the most messages for which a reply holds."""
ALWAYS: Counts = (0, FOREVER)


def counts_of(question: Question, reply: Any, own: int, count: int, registers: list[int]) -> Counts:
    """Return for how many messages a turn at `own` gives the same reply, everything else being equal."""
    what = question[0]
    if what == "compare":
        return _of_comparison(question[1], question[2], question[3], bool(reply), own, count, registers)
    if what in ("remainder", "position"):
        return (count, count) if _has_count(question[1]) else ALWAYS
    if what in OF_MESSAGES:
        return _of_address(question[1], reply is ..., own, count)
    if what == "equal":
        pairs = [_of_address(one, reply is ..., own, count) for one in question[1:3]]
        return max(pairs[0][0], pairs[1][0]), min(pairs[0][1], pairs[1][1])
    low, high = ALWAYS
    for path in paths_of(question):
        bounds = _of_address(path[0], reply is ..., own, count) if not isinstance(path[0], str) else ALWAYS
        low, high = max(low, bounds[0]), min(high, bounds[1])
    return low, high


def reads_count(recipe: tuple[Any, ...]) -> bool:
    """Whether a kept value depends on the number of messages."""
    if recipe[0] == "position":
        return _has_count(recipe[1])
    if recipe[0] in ("messages", "range"):
        return any(_has_count(form) for form in recipe[1:3] if isinstance(form, tuple))
    if recipe[0] == "list":
        return any(map(reads_count, recipe[2]))
    return False


def _has_count(form: Form) -> bool:
    return any(base == COUNT for base, _ in form[0])


def _of_address(address: Any, is_missing: bool, own: int, count: int) -> Counts:
    """Return for how many messages there is a message, or is none."""
    if isinstance(address, int):
        place = own + address
    elif address[0] == "first":
        place = address[1]
    else:
        return count, count
    return (0, place) if is_missing else (place + 1, FOREVER)


def _of_comparison(
    form: Form, symbol: str, bound: int, reply: bool, own: int, count: int, registers: list[int]
) -> Counts:
    factor = dict(form[0]).get(COUNT, 0)
    if factor == 0:
        return ALWAYS
    if abs(factor) != 1:
        return count, count
    border = (bound - (value_of(form, own, count, registers) - factor * count)) * factor  # count `symbol` border
    if factor < 0:
        symbol = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}.get(symbol, symbol)
    if symbol == "==":
        if reply:
            return border, border
        return (border + 1, FOREVER) if count > border else (0, border - 1)
    below = border - 1 if symbol in ("<", ">=") else border
    is_below = reply if symbol in ("<", "<=") else not reply
    return (0, below) if is_below else (below + 1, FOREVER)
