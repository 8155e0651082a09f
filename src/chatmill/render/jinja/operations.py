"""The operations that a template has: what each may make of what it is given, and how many steps it takes.

Every filter, every method, and every operator that does more than arithmetic of small numbers has a row. A name without
a row is refused. Both are known before an operation works, from the sizes of what it is given alone.

A row also says what becomes of the origin of a text of the record, and whether what is made of it shows all of it.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, NamedTuple

from markupsafe import Markup

from chatmill.render.jinja.growth import (
    Bound,
    Taken,
    added,
    as_json,
    as_number,
    by_number,
    formatted,
    indented,
    items,
    joined,
    lines,
    linked,
    multiplied,
    nothing,
    padded,
    printed,
    raised,
    replaced,
    rounded,
    split,
    summed,
    tabs,
    times,
    translated,
    width_of,
    wrapped,
)
from chatmill.render.jinja.limits import MADE_ITEM_BYTES, MAX_WIDTH, SCALARS, Budget, length_of, measured

SMALL = 1_000
"""Characters of texts that are not looked at: whatever is made of them is small. It is counted afterwards."""


class OriginEffect(Enum):
    """What a filter does to the origins of texts of the record."""

    LOST = auto()
    """A text that it makes of them has none, and cannot be written: the record is refused."""
    OF_METHOD = auto()
    """It calls the method of the text, which keeps its origin (`Traced`)."""
    PASSED = auto()
    """It hands values on, or compares them by their own operators."""


class Operation(NamedTuple):
    """A row of the table."""

    growth: Bound
    """Bytes of what it makes at most, also on the way."""
    work: Bound
    """Steps that it takes."""
    looks_inside: bool = False
    """Whether it writes, compares or hashes what is in a list."""
    looks_always: bool = False
    """Whether a short text can make much: by a number that is given, or one in a format."""
    gathers: bool = False
    """Whether it takes all items of what is iterated over before it makes anything."""
    origin: OriginEffect = OriginEffect.LOST
    """What it does to origins, as a filter."""
    shows_all: bool = False
    """Whether what it makes of a text shows all of it, but for white space."""

    def passing(self) -> Operation:
        """Return the row of a filter that hands values on."""
        return self._replace(origin=OriginEffect.PASSED)

    def is_free(self) -> bool:
        """Return whether nothing is charged."""
        return self.growth is nothing and self.work is nothing


# ---- work


def per(characters: int, of_items: int = 10) -> Bound:
    """Return steps: one for so many bytes of text, and one for so many items."""
    return lambda taken: taken.size // characters + (taken.length + taken.whole.items) // of_items


def searched(taken: Taken) -> int:
    """Return the steps of a search: at worst each character of a short text is compared with each of the part."""
    size, part = str.__len__(taken.text), max((length_of(value) for value in taken.rest), default=1)
    return search_steps(size, part)


def search_steps(size: int, part: int) -> int:
    """Return the steps of a search in so many characters for so many."""
    return size * min(max(part, 1), 100 if size < 30_000 else 8) // 400


def begun(taken: Taken) -> int:
    """Return the steps of comparing a text's beginning or end with all texts that are given."""
    return taken.whole.items + taken.whole.size // 1_000


def backwards(taken: Taken) -> int:
    """Return the steps of a search from the end, or of stripping characters."""
    part = max((str.__len__(value) for value in taken.rest if isinstance(value, str)), default=1)
    return str.__len__(taken.text) * part // 200


def listed(taken: Taken) -> int:
    """Return the steps of a search in a list."""
    part = measured(taken.rest)
    return taken.length * (1 + part.items + part.size // 1_000) // 10


def iterating(taken: Taken) -> int:
    """Return the steps of asking all items the same, which is in the arguments."""
    asked = measured(taken.rest)
    count = MAX_WIDTH if hasattr(type(taken.first), "__next__") else taken.length
    return 3 * taken.length + (asked.items + asked.size // 1_000) * count


def sorting(taken: Taken) -> int:
    """Return the steps of sorting: what is compared has all it holds compared, each time at worst."""
    levels = taken.length.bit_length() + 1
    return 12 * taken.length + (taken.whole.items // 10 + taken.whole.size // 1_000) * levels


def wrapping(taken: Taken) -> int:
    """Return the steps of `wordwrap`: what is left of a word is copied for each line."""
    size = str.__len__(taken.text)
    shortest = min([number for number in taken.numbers if number > 1], default=1)
    return size + size * size // (1_000 * shortest)


def stripping_tags(taken: Taken) -> int:
    """Return the steps of `striptags`: the text is copied for each tag."""
    return taken.size // 20 + taken.size * taken.text.count("<") // 1_000


def adding_lists(taken: Taken) -> int:
    """Return the steps of `sum`: all before it is copied for each list."""
    return taken.length + (taken.length * taken.whole.items // 100 if taken.whole.depth > 1 else 0)


def printing(taken: Taken) -> int:
    """Return the steps of `pprint`, which writes what is in a list once for each level."""
    return taken.whole.size // 10 + 20 * taken.whole.items * (1 + taken.whole.depth)


def hashing(taken: Taken) -> int:
    """Return the steps of finding values by what is in them."""
    part = measured(taken.rest)
    return part.items + part.size // 1_000 + taken.length // 10


IS = (
    *("alnum", "alpha", "ascii", "decimal", "digit", "identifier", "lower", "numeric", "printable", "space"),
    *("title", "upper"),
)


# ---- the table

FREE = Operation(nothing, nothing)
"""Hands on what it is given, or makes something small of it in no time; items are counted when they are taken."""
ASKED = Operation(nothing, per(100), looks_inside=True)
SEARCH = Operation(nothing, searched)
STRIP = Operation(times(1), backwards, looks_inside=True, origin=OriginEffect.OF_METHOD, shows_all=True)
CASE = Operation(times(3), per(50), looks_inside=True, origin=OriginEffect.OF_METHOD)
CUT = Operation(lambda taken: taken.size + taken.longest * taken.width, per(500), looks_inside=True, looks_always=True)
PADDED = Operation(padded, per(500), looks_inside=True, looks_always=True)
SPLIT = Operation(split, searched)
SPLIT_FROM_END = Operation(split, backwards)
ESCAPED = Operation(times(6), per(100), looks_inside=True)
PERCENT = Operation(formatted, per(50), looks_inside=True, looks_always=True)
LISTED = Operation(items(MADE_ITEM_BYTES), per(500), gathers=True).passing()
HASHED = Operation(items(2 * MADE_ITEM_BYTES), sorting, looks_inside=True, gathers=True).passing()
BY_NUMBER = Operation(by_number, lambda taken: per(500)(taken) + width_of(taken)).passing()
GET = Operation(nothing, hashing)
REPLACE = Operation(replaced, searched, looks_inside=True, origin=OriginEffect.OF_METHOD, shows_all=True)

FILTERS = {
    **dict.fromkeys(("default", "d", "first", "last", "items", "join"), FREE.passing()),
    **dict.fromkeys(("length", "count"), FREE),
    **dict.fromkeys(("map", "select", "reject", "selectattr", "rejectattr"), Operation(nothing, iterating).passing()),
    "attr": ASKED.passing(),
    **dict.fromkeys(("abs", "filesizeformat"), ASKED),
    "trim": STRIP,
    **dict.fromkeys(("upper", "lower", "capitalize"), CASE),
    "title": Operation(times(MADE_ITEM_BYTES), per(10), looks_inside=True),
    "replace": REPLACE,
    "center": PADDED,
    "indent": Operation(indented, per(20), looks_inside=True, looks_always=True),
    "wordwrap": Operation(wrapped, wrapping, looks_inside=True, looks_always=True),
    "truncate": CUT,
    "wordcount": Operation(times(MADE_ITEM_BYTES), per(10), looks_inside=True),
    **dict.fromkeys(("string", "safe"), Operation(times(1), per(100), looks_inside=True)),
    **dict.fromkeys(("e", "escape", "forceescape"), ESCAPED),
    "striptags": Operation(times(4), stripping_tags, looks_inside=True),
    "urlencode": Operation(times(MADE_ITEM_BYTES), per(10), looks_inside=True),
    "urlize": Operation(linked, per(1), looks_inside=True),
    "xmlattr": ESCAPED,
    "format": PERCENT,
    "tojson": Operation(as_json, per(50), looks_inside=True, looks_always=True),
    "harmony_tools": Operation(times(10), per(10), looks_inside=True),
    "pprint": Operation(printed, printing, looks_inside=True),
    **dict.fromkeys(("list", "reverse"), LISTED),
    **dict.fromkeys(("sort", "unique", "groupby", "dictsort", "min", "max"), HASHED),
    **dict.fromkeys(("batch", "slice"), BY_NUMBER),
    "sum": Operation(summed, adding_lists, looks_inside=True, gathers=True).passing(),
    **dict.fromkeys(("int", "float"), Operation(as_number, per(10), looks_inside=True)),
    "round": Operation(rounded, nothing, looks_inside=True, looks_always=True),
}
"""Filters. `random` is none: what it gives nobody can compare."""

OF_TEXTS = {
    **dict.fromkeys(("strip", "lstrip", "rstrip"), STRIP),
    **dict.fromkeys(("upper", "lower", "capitalize", "title", "swapcase", "casefold"), CASE),
    **dict.fromkeys(("removeprefix", "removesuffix"), Operation(times(1), per(500), shows_all=True)),
    **dict.fromkeys(("format", "format_map"), Operation(times(1), per(500))),
    "replace": REPLACE,
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), PADDED),
    "expandtabs": Operation(tabs, per(100), looks_always=True),
    "join": Operation(joined, per(500), looks_inside=True, gathers=True),
    "translate": Operation(translated, per(10)),
    **dict.fromkeys(("split", "partition"), SPLIT),
    **dict.fromkeys(("rsplit", "rpartition"), SPLIT_FROM_END),
    "splitlines": Operation(lines, per(250)),
    **dict.fromkeys(("find", "index", "count"), SEARCH),
    **dict.fromkeys(("startswith", "endswith"), Operation(nothing, begun)),
    **dict.fromkeys(("rfind", "rindex"), Operation(nothing, backwards)),
    **dict.fromkeys((f"is{kind}" for kind in IS), ASKED),
}
"""Methods of texts."""

OF_OTHERS = {
    "index": Operation(nothing, listed),
    "count": Operation(nothing, listed),
    "copy": Operation(items(2 * MADE_ITEM_BYTES), per(500)),
    "get": GET,
    **dict.fromkeys(("items", "keys", "values"), FREE),
    **dict.fromkeys(("is_integer", "as_integer_ratio", "conjugate", "bit_length", "bit_count", "hex"), FREE),
}
"""Methods of lists, objects and numbers; those that change them are refused by Jinja."""

OPERATORS = {
    "%": PERCENT,
    "+": Operation(added, per(1_000, 100)),
    "-": Operation(added, hashing),
    "*": Operation(multiplied, per(1_000, 100), looks_always=True),
    "**": Operation(raised, nothing, looks_always=True),
}
"""Operators that are more than a comparison, or arithmetic of numbers that stay small."""


def charge(operation: Operation, first: Any, rest: tuple[Any, ...], budget: Budget) -> int:
    """Count the steps of an operation, and refuse one that would make too much; return what it makes at most."""
    if operation.is_free():
        return 0
    if not operation.looks_always and _is_small(rest if operation is GET else (first, *rest)):
        return 0
    whole = measured((first, *rest) if operation.looks_inside else _shallow(first, rest), budget)
    taken = Taken(first, rest, whole, length_of(first))
    written = 2 * whole.items if operation.looks_inside and not isinstance(first, str) else 0
    budget.step(operation.work(taken) + written)
    growth = operation.growth(taken)
    if isinstance(first, Markup) or any(isinstance(value, Markup) for value in rest):
        growth *= 6  # what is put into a safe text is escaped
    budget.refuse_above(growth)
    return growth


def _is_small(values: tuple[Any, ...]) -> bool:
    """Return whether there are short texts alone, and numbers."""
    size = 0
    for value in values:
        if isinstance(value, str):
            size += str.__len__(value)
        elif type(value) not in SCALARS:
            return False
    return size <= SMALL


def _shallow(first: Any, rest: tuple[Any, ...]) -> list[Any]:
    """Return the texts among values; of arguments of a text also what is in lists, which may be asked about."""
    if isinstance(first, str):
        return [first, *rest]
    return [value for value in rest if isinstance(value, str)]
