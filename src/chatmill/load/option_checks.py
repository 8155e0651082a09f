"""Checks of options: each gives a value in the type of its option, or an error that says what is allowed.

The type of a field carries its check: `batch_size: Annotated[int, Number(least=1, whole=True)]`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, get_type_hints

from chatmill.errors import ConfigError
from chatmill.load.order import MAX_SEED

SPEC_FLAGS = {"true": True, "1": True, "false": False, "0": False}
"""Texts that mean a flag in the XML of the loaders."""
LOOSE_FLAGS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
    "": False,
}
"""Texts that mean one in recipes of training and in the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What all checks share; `text`: the value may be text, as XML and the environment have it."""

    optional: bool = False

    def __call__(self, name: str, value: Any, *, text: bool = False) -> Any:
        """The value; a `ConfigError` with `name` where it is not allowed."""
        if value is None and self.optional:
            return None
        try:
            return self._typed(value, text)
        except (TypeError, ValueError, OverflowError):  # the last: infinity is no whole number
            raise ConfigError(f"{name} is {value!r}; allowed: {self._allowed}") from None

    def _typed(self, value: Any, text: bool) -> Any:
        """The value in its type; a `TypeError` or `ValueError` where it is not allowed."""
        return str(value)

    @property
    def _allowed(self) -> str:
        """In words."""
        return "a text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Number(Check):
    """A number in a range."""

    least: float = 0
    most: float = math.inf
    whole: bool = False
    above: bool = False
    """`least` itself is not allowed."""

    def _typed(self, value: Any, text: bool) -> float | int:
        if isinstance(value, bool) or (isinstance(value, str) and not text):
            raise TypeError
        number = int(value) if self.whole else float(value)
        if (self.whole and not isinstance(value, str) and number != value) or not self.least <= number <= self.most:
            raise ValueError
        if self.above and number == self.least:
            raise ValueError
        return number

    @property
    def _allowed(self) -> str:
        what = "a whole number" if self.whole else "a number"
        if math.isfinite(self.most):
            return f"{what}, {self.least:.0f} to {self.most:.0f}"
        return f"{what} above {self.least:.0f}" if self.above else f"{what}, {self.least:.0f} or more"


@dataclass(frozen=True, slots=True, kw_only=True)
class OneOf(Check):
    """A member of an enumeration."""

    members: type[StrEnum]

    def _typed(self, value: Any, text: bool) -> StrEnum:
        return self.members(value)

    @property
    def _allowed(self) -> str:
        return ", ".join(self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag(Check):
    """True or false."""

    words: Mapping[str, bool] = field(default_factory=lambda: SPEC_FLAGS)
    """Texts that mean one."""

    def _typed(self, value: Any, text: bool) -> bool:
        if isinstance(value, bool):
            return value
        word = str(value).strip().lower()
        if not text or word not in self.words:
            raise ValueError
        return self.words[word]

    @property
    def _allowed(self) -> str:
        return "true, false" if self.words is SPEC_FLAGS else ", ".join(filter(None, self.words))


Count = Annotated[int, Number(least=1, whole=True)]
OptionalCount = Annotated[int | None, Number(least=1, whole=True, optional=True)]
Seed = Annotated[int, Number(most=MAX_SEED, whole=True)]
TokenId = Annotated[int | None, Number(most=2**32 - 1, whole=True, optional=True)]
OptionalText = Annotated[str | None, Check(optional=True)]
LooseFlag = Annotated[bool, Flag(words=LOOSE_FLAGS)]


def checks_of(options: type) -> dict[str, Check]:
    """The checks that the types of a class's fields carry, by name."""
    hints = get_type_hints(options, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


def as_flag(name: str, value: Any) -> bool:
    """A flag, or text that means one (an empty text is false)."""
    return bool(Flag(words=LOOSE_FLAGS)(name, value, text=True))
