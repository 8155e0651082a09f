"""Text that a template calls safe: what is added to it is escaped as HTML, as Jinja does, and its origin is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from markupsafe import Markup, escape

from chatmill.render.jinja.traced import ORDERED, escaping, lost, note_exact, plain_text
from chatmill.render.jinja.traced_values import text_of


class SafeText(Markup):
    """What the filter `safe` gives while a template is traced; it remembers what it was made of."""

    _sources: tuple[object, ...]
    _origin: str | None
    """The text that was called safe, while nothing was done to it."""

    @classmethod
    def of(cls, text: str, *sources: object, origin: str | None = None) -> SafeText:
        """A safe text, made of these values."""
        made = cls(plain_text(text))
        made._sources = tuple(kept for one in sources for kept in (one._sources if isinstance(one, cls) else (one,)))
        made._origin = origin
        return made

    def __str__(self) -> str:
        return lost(plain_text(self), *self._sources) if self._origin is None else self._origin

    def __repr__(self) -> str:
        note_exact(self._sources)
        escaping(self)
        return f"Markup({str.__repr__(self)})"

    def __format__(self, spec: str) -> str:
        note_exact(self._sources)
        escaping(self)
        return str.__format__(self, spec)

    def __getitem__(self, key: Any) -> SafeText:
        note_exact(self)
        return SafeText.of(plain_text(self)[key], self)

    def __iter__(self) -> Iterator[Any]:
        return (lost(character, *self._sources) for character in plain_text(self))  # as a safe text's are: not safe

    def __eq__(self, other: object) -> bool:
        note_exact([self._sources, other])
        return str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        note_exact(self._sources)
        return str.__hash__(self)

    def __bool__(self) -> bool:
        note_exact(self._sources)
        return self != ""

    def __contains__(self, part: object) -> bool:
        note_exact([self._sources, part])
        return isinstance(part, str) and plain_text(part) in plain_text(self)

    @classmethod
    def added(cls, left: str, right: str) -> SafeText:
        """Two texts, at least one of them safe, one behind the other: the other one is escaped."""
        return cls.of(unmarked(left) + unmarked(right), left, right)


def _ordering(name: str) -> Callable[[SafeText, Any], Any]:
    def ordered(self: SafeText, other: Any) -> Any:
        note_exact([self, other])
        return getattr(str, name)(self, other)

    return ordered


for _name in ORDERED:
    setattr(SafeText, _name, _ordering(_name))


def safe(value: Any) -> Any:
    """The filter `safe`."""
    if isinstance(value, SafeText):
        return value
    text = text_of(value)
    return SafeText.of(text, value, origin=text)


def escaped(value: Any) -> Any:
    """The filter `escape`."""
    return value if isinstance(value, SafeText) else SafeText.of(escape(unmarked(value)), value)


def unmarked(value: Any) -> Any:
    """A text without its sources, a safe one still safe; other values as they are."""
    if isinstance(value, Markup):
        return Markup(plain_text(value))
    return plain_text(value) if isinstance(value, str) else value


def method_of(text: str, name: str) -> Any:
    """A method of the same text without its sources, for operations that are not followed."""
    return getattr(unmarked(text), name)


def made_of_safe(result: Any, sources: list[Any]) -> Any:
    """What an operation made of safe texts: safe or not, its origin is lost."""
    kept = [one._sources if isinstance(one, SafeText) else one for one in sources]
    if isinstance(result, Markup):
        return SafeText.of(result, *kept)
    if isinstance(result, str):
        return lost(result, *kept)
    note_exact(kept)
    if isinstance(result, list | tuple):
        return type(result)(made_of_safe(one, sources) for one in result)
    return result
