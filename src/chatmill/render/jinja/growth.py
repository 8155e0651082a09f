"""How much operations make at most of what they are given, in bytes: known from sizes, before anything is made."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from chatmill.render.jinja.limits import (
    ITEM_BYTES,
    MADE_ITEM_BYTES,
    MAX_BITS,
    MAX_WIDTH,
    TEXT_BYTES,
    LimitError,
    Measured,
    length_of,
    measured,
    plain_numbers,
    text_size,
)
from chatmill.render.jinja.traced import Traced, plain_text


class Taken(NamedTuple):
    """What an operation is given."""

    first: Any
    """The value that it changes."""
    rest: tuple[Any, ...]
    """Its arguments, also those given by name."""
    whole: Measured
    """How much is in all of them; of lists what is in them only where the operation looks inside."""
    length: int
    """Items that are directly in the first value."""

    @property
    def size(self) -> int:
        """Bytes of the text that is worked on: lists are written first."""
        return self.whole.written if self.whole.items else self.whole.size

    @property
    def text(self) -> str:
        """The first value, if it is a text."""
        return plain_text(self.first) if isinstance(self.first, str) else ""

    @property
    def numbers(self) -> list[int]:
        """Whole numbers among the arguments, without their signs."""
        return [abs(number) for number in plain_numbers(self.rest)]

    @property
    def longest(self) -> int:
        """Characters of the longest text among the arguments."""
        return max((str.__len__(value) for value in self.rest if isinstance(value, str)), default=0)

    @property
    def width(self) -> int:
        """Bytes of a character: of text among which one is not ASCII, two."""
        return 1 + self.whole.is_wide


Bound = Callable[[Taken], int]


def nothing(_: Taken) -> int:
    """Nothing is made, or something of a size that does not depend on what is given."""
    return 0


def times(factor: int) -> Bound:
    """Return a bound for a text of so many times the size."""
    return lambda taken: factor * taken.size


def items(size: int) -> Bound:
    """Return a bound for a list of the items of the first value."""
    return lambda taken: size * taken.length


def width_of(taken: Taken, default: int = 0) -> int:
    """Return the largest number among the arguments, which is refused where it is too large."""
    width = max(taken.numbers, default=default)
    if width > MAX_WIDTH:
        raise LimitError(f"it pads, cuts or repeats by a number above {MAX_WIDTH:,}")
    return width


def padded(taken: Taken) -> int:
    """Bound `center` and its like."""
    return 2 * (taken.size + width_of(taken, 80) * taken.width)


def tabs(taken: Taken) -> int:
    """Bound `expandtabs`."""
    return taken.size + taken.text.count("\t") * width_of(taken, 8) * taken.width


def _lines(text: str) -> int:
    return 1 + sum(map(text.count, LINE_ENDS))


LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
SPACES = " \t\x1f\xa0\u1680\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B))) + LINE_ENDS


def indented(taken: Taken) -> int:
    """Bound `indent`: the width may be a text."""
    lines = _lines(taken.text) + 1
    return 2 * taken.size + lines * (TEXT_BYTES + ITEM_BYTES + max(width_of(taken, 4), taken.longest) * taken.width)


def wrapped(taken: Taken) -> int:
    """Bound `wordwrap`: every character may be a line."""
    width_of(taken)
    lines = str.__len__(taken.text) + 1
    return 2 * taken.size + lines * (MADE_ITEM_BYTES + taken.longest * taken.width)


def split(taken: Taken) -> int:
    """Bound the methods that take a text apart."""
    separator = next((value for value in taken.rest if isinstance(value, str)), None)
    parts = taken.text.count(plain_text(separator)) if separator else sum(map(taken.text.count, SPACES))
    limits = [number for number in plain_numbers(taken.rest) if number >= 0]
    return taken.size + MADE_ITEM_BYTES * (min([parts, *limits]) + 1)


def lines(taken: Taken) -> int:
    """Bound `splitlines`."""
    return taken.size + MADE_ITEM_BYTES * _lines(taken.text)


def replaced(taken: Taken) -> int:
    """Bound `replace`; of a list it is not known how often it has the part."""
    texts = [value for value in taken.rest if isinstance(value, str)]
    if not isinstance(taken.first, str):
        return taken.size * (1 + taken.longest)
    count = taken.text.count(plain_text(texts[0])) if len(texts) > 1 else 0
    pieces = count * 2 * MADE_ITEM_BYTES if any(type(text) is Traced for text in texts) else 0
    return pieces + (str.__len__(taken.first) + count * str.__len__(texts[-1])) * taken.width


def joined(taken: Taken) -> int:
    """Bound the method `join` of a separator."""
    count = sum(map(length_of, taken.rest))
    return (taken.whole.characters + count * str.__len__(taken.text)) * taken.width


def translated(taken: Taken) -> int:
    """Bound `translate`: the longest value of a table stands for each character."""
    tables = [value for value in taken.rest if isinstance(value, dict)]
    longest = max((text_size(v) for table in tables for v in dict.values(table) if isinstance(v, str)), default=2)
    return MADE_ITEM_BYTES + str.__len__(taken.text) * max(longest, 2)


WIDTHS = re.compile(r"[%)][#0\- +]*(?P<width>\*|\d+)?(?:\.(?P<precision>\*|\d+))?")
"""Widths in a format for the operator `%`: numbers, or a star where an argument is one."""
CODED = re.compile(r"%[^a-zA-Z%]*[ra]|%\(")


def formatted(taken: Taken) -> int:
    """Bound the operator `%`, and the filter `format`: every number in the form may be a width."""
    form = taken.text
    if not form:
        return 0
    places, named = form.count("%"), form.count("%(")
    widths = 0
    for written in (width for pair in WIDTHS.findall(form) for width in pair if width):
        if written == "*" or len(written) > 5:
            raise LimitError("a format string with a width of that size")
        widths += int(written)
    arguments = measured(taken.rest)
    size = arguments.written if CODED.search(form) or arguments.items > length_of(taken.rest[0]) else arguments.size
    return taken.whole.size + (widths + 400 * places) * taken.width + size * (named + 1)


def as_json(taken: Taken) -> int:
    """Bound `tojson`: a character may become six; the indent may be a text."""
    indent = max(width_of(taken), taken.longest) * (taken.whole.depth + 1)
    separators = sum(map(str.__len__, filter(_is_text, _flat(taken.rest))))
    return 6 * taken.whole.size + taken.whole.items * (32 + (indent + separators) * taken.width)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _flat(values: tuple[Any, ...]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        found += value if type(value) in (list, tuple) else [value]
    return found


def printed(taken: Taken) -> int:
    """Bound `pprint`: each level is laid out further to the right."""
    return taken.size + taken.whole.items * (TEXT_BYTES + 8 * taken.whole.depth) + 20 * taken.whole.size


def linked(taken: Taken) -> int:
    """Bound `urlize`: each word may be a link, with the texts that are given."""
    words = 1 + taken.text.count(".") + taken.text.count(":") + taken.text.count("@")
    return (
        MADE_ITEM_BYTES * str.__len__(taken.text) + 10 * taken.size + words * (64 + 3 * measured(taken.rest).characters)
    )


def summed(taken: Taken) -> int:
    """Bound `sum`, which makes a list for each sum of lists."""
    return ITEM_BYTES * taken.whole.items if taken.whole.depth > 1 else 0


def as_number(taken: Taken) -> int:
    """Bound `int` and `float`: a number of another base than ten has no limit of its own in Python."""
    if str.__len__(taken.text) > MAX_BITS // 4 and taken.rest:
        raise LimitError("a number of that size")
    return taken.size


def rounded(taken: Taken) -> int:
    """Bound `round`, which computes a power of ten."""
    if max(taken.numbers, default=0) > 300:
        raise LimitError("it rounds to that many places")
    return 0


def by_number(taken: Taken) -> int:
    """Bound `batch` and `slice`, which fill up what they cut."""
    return ITEM_BYTES * (taken.length + width_of(taken))


def added(taken: Taken) -> int:
    """Bound the operators `+` and `-`."""
    numbers = plain_numbers((taken.first, *taken.rest))
    if len(numbers) == 2 and max(map(int.bit_length, numbers)) >= MAX_BITS:
        raise LimitError("a number of that size")
    return taken.whole.size + ITEM_BYTES * (taken.length + sum(map(length_of, taken.rest)))


def multiplied(taken: Taken) -> int:
    """Bound the operator `*`."""
    values = (taken.first, *taken.rest)
    numbers = plain_numbers(values)
    if len(numbers) == 2 and sum(map(int.bit_length, numbers)) > MAX_BITS:
        raise LimitError("a number of that size")
    if len(numbers) != 1:
        return 0
    size = sum(text_size(value) if isinstance(value, str) else ITEM_BYTES * length_of(value) for value in values)
    return max(numbers[0], 1) * size


def raised(taken: Taken) -> int:
    """Bound the operator `**`."""
    for value, most in ((taken.first, 1e6), (taken.rest[0], 64)):
        number = int.__int__(value) if isinstance(value, int) else value
        if isinstance(number, int | float) and abs(number) > most:
            raise LimitError("a power of that size")
    return 0
