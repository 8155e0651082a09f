"""Expressions: what a template made of a record's fields, as values that can be evaluated for another record.

An expression is a nested tuple, so that it is hashable and cheap. Its first entry says what it is:

    ("field", path)                    a text of the record; the path says which
    ("const", text, path)              a text that is fixed in every record of the shape, but belongs to a field
    ("apply", name, arguments, inner)  a string operation on another expression
    ("json", options, path)            a JSON value of the record, written as JSON
    ("text", path)                     a number, an object or a list of the record, written as Python writes it

A *question* is what a template asked about an expression, again a tuple: ("contains", expression, "</think>"). `Notes`
are the questions of one run, with their replies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from chatmill.render.jinja.control_names import NO_CONTROLS, ControlNames

Path = tuple[Any, ...]
KEY, VALUE = "key", "value"
"""The n-th key of an object and its value, in a path: `(KEY, n)`, `(VALUE, n)`."""
Expression = tuple[Any, ...]
Question = tuple[Any, ...]
Fields = Callable[[Path], Any]
"""Gives the value of a record at a path."""

APPLIED: Mapping[str, Callable[..., str]] = {
    **{name: getattr(str, name) for name in dir(str)},
    "part": lambda text, method, arguments, named, index: _split(text, method, arguments, named)[index],
    "between": lambda text, old, count, index: text.split(old, count)[index],
    "cut": lambda text, start, stop, step: text[start:stop:step],
    "json_string": lambda text, ascii_only: json.dumps(text, ensure_ascii=ascii_only)[1:-1],
}
"""String operations; those in expressions give one text for one text, whatever it holds.

What `between` gives is what a template leaves of a text that it replaces something in; what it writes there is not part
of the expression.
"""


def _split(text: str, method: str, arguments: tuple[Any, ...], named: tuple[tuple[str, Any], ...]) -> Sequence[str]:
    parts: Sequence[str] = getattr(str, method)(text, *arguments, **dict(named))
    return parts


def root(expression: Expression) -> Path:
    """Return the path of the field an expression is made of."""
    while expression[0] == "apply":
        expression = expression[3]
    path: Path = expression[-1]
    return path


def evaluate(expression: Expression, fields: Fields) -> str:
    """Return the text of an expression for a record."""
    operation = expression[0]
    if operation == "field":
        text: str = fields(expression[1])
        return text
    if operation == "apply":
        return APPLIED[expression[1]](evaluate(expression[3], fields), *expression[2])
    if operation == "const":
        constant: str = expression[1]
        return constant
    if operation == "json":
        return json.dumps(fields(expression[2]), **dict(expression[1]))
    return str(fields(expression[1]))


def ask(question: Question, fields: Fields) -> Any:
    """Return the reply to a question for a record; `...` where the record has nothing at that path."""
    try:
        return _ASKED[question[0]](fields, *question[1:])
    except (LookupError, TypeError, AttributeError, ValueError):
        return ...


def kind_of_value(value: object) -> str:
    """Return the JSON type of a value; true, false and null are types of their own."""
    if value is None or value is True or value is False:
        return str(value)
    return type(value).__name__


def written_value(value: object) -> str:
    """Return a JSON value as a text that no other value has: 1, 1.0 and true are equal, and are written otherwise."""
    return repr(value)


def _compared(fields: Fields, expression: Expression, symbol: str, bound: int) -> bool:
    return COMPARISONS[symbol](len(evaluate(expression, fields)), bound)


SYMBOLS = {"__eq__": "==", "__lt__": "<", "__le__": "<=", "__gt__": ">", "__ge__": ">="}
COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {sign: getattr(int, name) for name, sign in SYMBOLS.items()}

_ASKED: Mapping[str, Callable[..., Any]] = {
    "exact": lambda fields, e: evaluate(e, fields),
    "filled": lambda fields, e: bool(evaluate(e, fields)),
    "contains": lambda fields, e, part: part in evaluate(e, fields),
    "equals": lambda fields, e, other: evaluate(e, fields) == other,
    "same": lambda fields, e, other: evaluate(e, fields) == evaluate(other, fields),
    "method": lambda fields, e, name, arguments: getattr(str, name)(evaluate(e, fields), *arguments),
    "parts": lambda fields, e, *how: len(_split(evaluate(e, fields), *how)),
    "length": _compared,
    "characters": lambda fields, e: len(evaluate(e, fields)),
    "type": lambda fields, path: kind_of_value(fields(path)),
    "has": lambda fields, path, key: key in fields(path),
    "size": lambda fields, path: len(fields(path)),
    "has_arguments": lambda fields, path: fields(path) not in ({}, "", "{}"),
    "value": lambda fields, path: written_value(fields(path)),
}


class Notes:
    """What one run of a template asked, in order."""

    controls = NO_CONTROLS
    """The control tokens of the vocabulary that the template writes for."""

    def __init__(self, controls: ControlNames = NO_CONTROLS) -> None:
        """Nothing asked yet."""
        self.replies: dict[Question, Any] = {}
        self.controls = controls

    def note(self, question: Question, reply: Any) -> Any:
        """Keep a reply, and give it back."""
        self.replies.setdefault(question, reply)
        return reply

    def filled(self, expression: Expression | None, reply: bool) -> bool:
        """Keep whether a text is filled, and give it back; JSON always is, and a JSON string is if its text is."""
        while expression is not None and expression[:2] == ("apply", "json_string"):
            expression = expression[3]
        if expression is not None and expression[0] not in ("const", "json"):
            self.note(("filled", expression), reply)
        return reply

    def add(self, replies: Mapping[Question, Any]) -> None:
        """Keep the replies of another run; those that are known stay."""
        for question, reply in replies.items():
            self.replies.setdefault(question, reply)


TOOLS = -1
"""The owner of tool definitions and of a record's options, which belong to no message: their paths begin with words."""


@lru_cache(maxsize=1 << 16)
def owner_of(expression: Expression) -> int:
    """Return the message that a text is from, or `TOOLS`."""
    path = root(expression)
    return TOOLS if isinstance(path[0], str) else int(path[0])
