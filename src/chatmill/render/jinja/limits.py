"""Limits of what a template may do, refused before it is done."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import jinja2

from chatmill.render.jinja.traced import plain_text

MAX_CHARACTERS = 64 << 20
"""Characters of any text that a template makes."""
MAX_BITS = 4096
"""The largest number that a template may multiply to."""
MAX_WIDTH = 100_000
"""The largest number a template may hand to an operation that pads or repeats."""


class LimitError(jinja2.TemplateError):
    """A template runs for too long, or writes too much."""


def _has_text(*values: Any) -> bool:
    return any(isinstance(one, str | list | tuple) for one in values)


def refuse_wide(numbers: Iterable[Any]) -> None:
    """Refuse a number that an operation would pad or repeat by."""
    for number in numbers:
        if isinstance(number, int) and abs(number) > MAX_WIDTH:
            raise LimitError(f"an operation with the number {number}, above {MAX_WIDTH:,}")


WIDE = {
    "%": re.compile(r"%[^a-zA-Z%(]*(?:\d{6,}|\*)|%\([\s\S]*\d{6,}"),
    "{": re.compile(r"\{[^{}]*(?:\d{6,}|:[^{}]*\{)"),
}
"""A width of six digits and more, or one that is an argument, in a format for the operator `%` and for `format`."""


def refuse_wide_format(form: Any, mark: str) -> None:
    """Refuse a format that would pad by a large number; `mark` begins its places."""
    if isinstance(form, str) and WIDE[mark].search(plain_text(form)):
        raise LimitError("a format string with a width of that size")


def refuse_product(left: Any, right: Any) -> None:
    """Refuse a product beyond the limits of numbers and texts."""
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_BITS:
            raise LimitError("a number of that size")
    elif _has_text(left, right):
        numbers = [one for one in (left, right) if isinstance(one, int)]
        refuse_wide(numbers)
        if any(one * _characters([left, right]) > MAX_CHARACTERS for one in numbers):
            raise LimitError(f"it makes a text of more than {MAX_CHARACTERS:,} characters")


def refuse_growth(name: str, values: list[Any]) -> None:
    """Refuse an operation that would make a text beyond the limit of texts that are within it."""
    if name in ("join", "tojson", "list", "string"):
        size = _characters(values)
    elif name in ("format", "format_map") and isinstance(values[0], str):
        fields = str.count(values[0], "%") + str.count(values[0], "{")
        size = fields * _characters(values[1:])
    elif name == "replace":
        texts = [one for one in values if isinstance(one, str)][:3]
        if len(texts) < 3:
            return
        size = (str.count(plain_text(texts[0]), plain_text(texts[1]))) * str.__len__(texts[2])
    else:
        return
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
