"""Limits of one rendering: the steps it may take, and how much it may make. Work is counted before it is done.

A step is about a microsecond at worst. What is made is counted in bytes, as if all of it were kept: text of ASCII
characters counts one byte each, other text two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jinja2
from jinja2.utils import Namespace

from chatmill.core.message_parser import MAX_CHARACTERS as MAX_CHARACTERS  # of any text that a template makes
from chatmill.render.jinja.traced import Traced

MAX_MADE = 2 * MAX_CHARACTERS
"""Bytes of all that a template makes in one rendering."""
MESSAGE_BYTES = 16 << 10
"""Bytes that each message of the conversation adds to that: what its texts weigh beside their characters."""
MESSAGE_STEPS = 2_000
"""Steps that each message of the conversation adds to those of a rendering."""
MAX_BITS = 4096
"""The largest number that a template may compute."""
MAX_WIDTH = 100_000
"""The largest number a template may hand to an operation that pads, repeats or cuts."""
MAX_ITEMS = 1_000_000
"""Items of a value that is written, compared or hashed as a whole, counted as often as they are in it."""
MAX_DEPTH = 500
"""Levels of lists in lists of such a value: Python hashes and writes them by calling itself."""
MAX_SOURCE = 1 << 20
"""Characters of a template. The longest published one has 20,000."""
MAX_TOKENS = 20_000
"""Names, signs and texts of a template. The longest published one has 4,100."""

TEXT_BYTES, ITEM_BYTES, MADE_ITEM_BYTES, ATOM_BYTES = 56, 8, 64, 16
"""What a text takes beside its characters, a place in a list, a place with a value made for it, and an origin."""


SCALARS = frozenset({int, float, bool, type(None)})
OTHERS: tuple[Any, ...] = (tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))
"""Types of values with others inside, beside lists and objects."""
COUNTED = frozenset({str, list, tuple, dict, range})


class LimitError(jinja2.TemplateError):
    """A template runs for too long, or makes too much."""


class Budget:
    """What one rendering may still do."""

    __slots__ = ("made_left", "steps", "steps_left")

    def __init__(self, steps: int, made: int) -> None:
        """Both are what is allowed in all."""
        self.steps, self.steps_left, self.made_left = steps, steps, made

    @property
    def steps_taken(self) -> int:
        """How many steps were counted."""
        return self.steps - self.steps_left

    def step(self, count: int) -> None:
        """Count steps, before they are taken."""
        self.steps_left -= count
        if self.steps_left < 0:
            self.refuse()

    def make(self, size: int) -> None:
        """Count bytes of something that is made and may be kept."""
        self.made_left -= size
        if self.made_left < 0:
            self.refuse()

    def refuse_above(self, size: int) -> None:
        """Refuse what would be made, if it is more than is left."""
        if size > self.made_left:
            self.made_left = -1
            self.refuse()

    def refuse(self) -> None:
        """Say which of the two is used up."""
        if self.steps_left < 0:
            raise LimitError(f"it takes more than {self.steps:,} steps for one conversation")
        raise LimitError(f"it makes texts and lists of more than {MAX_MADE:,} bytes")


class Measured(NamedTuple):
    """How much there is in values, with all that is inside them."""

    characters: int = 0
    items: int = 0
    """Values that are inside others."""
    depth: int = 0
    """Levels of values inside values."""
    is_wide: bool = False
    """Whether there are other characters than ASCII."""

    @property
    def size(self) -> int:
        """Bytes of the characters in one text."""
        return self.characters * (1 + self.is_wide)

    @property
    def written(self) -> int:
        """Bytes that the values are written in at most, as Python writes lists: a character may become ten."""
        return 10 * self.size + 32 * self.items


def text_size(text: str) -> int:
    """Return the bytes that the characters of a text count for, with its origins."""
    size = str.__len__(text)
    if not str.isascii(text):
        size *= 2
    return size + ATOM_BYTES * len(text._atoms) if type(text) is Traced else size


def refuse_length(characters: int) -> None:
    """Refuse a text of more characters than any may have."""
    if characters > MAX_CHARACTERS:
        raise LimitError(f"it makes a text of more than {MAX_CHARACTERS:,} characters")


def measured(values: Iterable[Any], budget: Budget | None = None) -> Measured:
    """Return how much is in values, level by level; a value that is there twice counts twice.

    It looks no further than the steps of a budget go.
    """
    most = MAX_ITEMS if budget is None else min(MAX_ITEMS, budget.steps_left)
    characters, items, depth, is_wide = 0, 0, 0, False
    level = list(values)
    while level:
        inner: list[Any] = []
        for value in level:
            if isinstance(value, str):
                characters += str.__len__(value)
                is_wide = is_wide or not str.isascii(value)
            elif type(value) not in SCALARS:
                inner += _inside(value)
                if len(inner) > most:
                    break
        items += len(inner)
        depth += bool(inner)
        level = inner
        if items > most:
            raise LimitError(f"it uses a list with more than {most:,} values in it")
        if depth > MAX_DEPTH:
            raise LimitError(f"it uses lists inside lists, more than {MAX_DEPTH} levels of them")
    return Measured(characters, items, depth, is_wide)


def values_inside(value: Any) -> Iterator[Any]:
    """Yield a value and all that is in it, as often as it is."""
    level = [value]
    while level:
        inner: list[Any] = []
        for one in level:
            yield one
            if type(one) not in SCALARS and not isinstance(one, str):
                inner += _inside(one)
        level = inner


def _inside(value: Any) -> Iterable[Any]:
    """Return the values inside of one; nothing is asked of traced ones."""
    if isinstance(value, dict):
        return [*dict.keys(value), *dict.values(value)]
    if isinstance(value, list):
        return list.__iter__(value)
    if isinstance(value, OTHERS):
        inside: Iterable[Any] = value
        return inside
    if isinstance(value, Namespace):
        try:
            held: dict[str, Any] = object.__getattribute__(value, "_Namespace__attrs")
        except AttributeError:  # one of a `TurnRun`, which is not written
            return ()
        return held.values()
    return ()


def length_of(value: Any) -> int:
    """Return how many items are directly in a value; nothing is asked of traced ones."""
    if type(value) in COUNTED:
        return len(value)
    if isinstance(value, str):
        return str.__len__(value)
    if isinstance(value, list):
        return list.__len__(value)
    if isinstance(value, dict):
        return dict.__len__(value)
    if isinstance(value, tuple):
        return tuple.__len__(value)
    return len(value) if isinstance(value, OTHERS) else 0


def plain_numbers(values: Iterable[Any]) -> list[int]:
    """Return the whole numbers among values; nothing is asked of traced ones."""
    return [int.__int__(value) for value in values if isinstance(value, int)]
