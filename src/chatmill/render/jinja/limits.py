"""Limits of what a template may do, refused before it is done."""

from __future__ import annotations

import re
from typing import Any

import jinja2

from chatmill.core.message_parser import MAX_CHARACTERS as MAX_CHARACTERS  # of any text that a template makes
from chatmill.render.jinja.traced import plain_text

MAX_BITS = 4096
"""The largest number that a template may multiply to."""
MAX_WIDTH = 100_000
"""The largest number a template may hand to an operation that pads or repeats."""


class LimitError(jinja2.TemplateError):
    """A template runs for too long, or writes too much."""


PADDING = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "batch", "indent", "round", "slice", "truncate", "wordwrap"}
)
"""Methods and filters that pad, repeat or cut by a number they are given."""
JOINING = frozenset({"join", "tojson", "list", "string"})
FORMATS = {
    "%": re.compile(r"%[^a-zA-Z%(]*(?:\d{6,}|\*)|%\([\s\S]*\d{6,}"),
    "format": re.compile(r"\{[^{}]*(?:\d{6,}|:[^{}]*\{)"),
}
"""A width of six digits and more, or one that is an argument, in a format for the operator `%` and for `format`."""
LIMITED = PADDING | JOINING | FORMATS.keys() | {"*", "**", "replace"}


def refuse_excess(name: str, values: list[Any]) -> None:
    """Refuse an operation that would make a text or a number beyond the limits; the first value is what it changes."""
    if name not in LIMITED:
        return
    size, numbers = 0, [value for value in values if isinstance(value, int)]
    if name in PADDING and any(isinstance(value, int) and abs(value) > MAX_WIDTH for value in values[1:]):
        raise LimitError(f"{name} by a number above {MAX_WIDTH:,}")
    if name == "**" and (abs(values[1]) > 64 or abs(values[0]) > 1e6):
        raise LimitError("a power of that size")
    if name == "*" and len(numbers) == 2 and sum(value.bit_length() for value in numbers) > MAX_BITS:
        raise LimitError("a number of that size")
    if name == "*" and len(numbers) == 1:
        size = numbers[0] * _characters(values)
    elif name in JOINING:
        size = _characters(values)
    elif name in FORMATS and isinstance(values[0], str):
        form = plain_text(values[0])
        if FORMATS[name].search(form):
            raise LimitError("a format string with a width of that size")
        size = (form.count("%") + form.count("{")) * _characters(values[1:])
    elif name == "replace" and all(isinstance(value, str) for value in values[:3]) and len(values) > 2:
        size = plain_text(values[0]).count(plain_text(values[1])) * str.__len__(values[2])
    if size > MAX_CHARACTERS:
        raise LimitError(f"it makes a text of more than {MAX_CHARACTERS:,} characters")


def _characters(value: Any) -> int:
    """Characters of all texts in a value, counted as often as they are in it; no further than the limit."""
    total, left = 0, [value]
    while left and total <= MAX_CHARACTERS:
        one = left.pop()
        if isinstance(one, str):
            total += str.__len__(one)
        elif isinstance(one, dict):
            left += [*dict.keys(one), *dict.values(one)]
        elif isinstance(one, list | tuple):
            total += list.__len__(one) if isinstance(one, list) else len(one)
            left += list.__iter__(one) if isinstance(one, list) else one
    return total
