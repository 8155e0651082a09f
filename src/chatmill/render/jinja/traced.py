"""Strings that remember where they came from, and that note what a template asks about them.

A template runs on these values instead of plain ones. Each behaves as the plain value it stands for. A `Traced` string
also knows its *atoms*: runs of characters that are fixed text of the template, or an expression over the record's
fields. Whatever lets a template decide something (`in`, `==`, emptiness) is noted in a `Notes` as a question and its
reply: another record of the same shape that gives the same replies is written in the same way. An operation that
cannot be followed notes the exact value, which is right for this record and useless for others.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from typing import Any, SupportsIndex

import jinja2

from chatmill.render.jinja.expressions import Expression, Notes, Path, written_value

Atom = tuple[int, Expression | None]
"""Characters, and the expression they come from; None for text of the template."""

_len = str.__len__
_new = str.__new__
WHOLE_OPERATIONS = frozenset(
    {"upper", "lower", "title", "capitalize", "casefold", "swapcase", "removeprefix", "removesuffix", "expandtabs"}
    | {"zfill", "center", "ljust", "rjust"}
)
"""Methods that make one text of one text."""
PER_CHARACTER = frozenset({"upper", "lower", "casefold", "swapcase"})
"""Those of them that give the same whether a text is taken whole or in pieces; final sigma aside, so ASCII only."""
TESTS = frozenset(
    {"isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable"}
    | {"isspace", "istitle", "isupper", "startswith", "endswith", "find", "rfind", "index", "rindex", "count"}
)
"""Methods that answer a question."""
STRIPS = ("strip", "lstrip", "rstrip")
ORDERED = ("__lt__", "__le__", "__gt__", "__ge__")


class OriginLost(jinja2.TemplateError):
    """A template makes a text of the record's texts in a way that cannot be followed: the record is refused."""


class RecordValue:
    """A value of a record that is no text: where it is from, and the plain value."""

    __slots__ = ()
    _path: Path
    _notes: Notes
    _raw: Any


class Measure:
    """A number that was made of a record's texts, such as a length: it says by itself what it depends on."""

    __slots__ = ()

    @property
    def _raw(self) -> Any:
        raise NotImplementedError

    def _note_value(self) -> None:
        """Note everything that the number depends on."""
        raise NotImplementedError


class Traced(str):
    """A text with its atoms; at least one of them comes from the record."""

    __slots__ = ("_atoms", "_notes")
    _atoms: tuple[Atom, ...]
    _notes: Notes

    # ---- making

    def __str__(self) -> str:
        return self

    def __reduce__(self) -> Any:
        return str, (plain_text(self),)

    def __repr__(self) -> str:
        raise OriginLost("a text of the record is written as Python code")

    def __format__(self, spec: str) -> str:
        raise OriginLost("a text of the record is put into a format")

    def as_code(self) -> str:
        """As `repr` writes it, with its origin."""
        inner = self._single()
        if inner is None:
            raise OriginLost("a text in pieces is written as Python code")
        text = str.__repr__(self)
        return _traced(text, ((_len(text), ("apply", "repr", (), inner)),), self._notes)

    # ---- joining

    def __add__(self, other: str) -> str:
        if isinstance(other, str):
            return _traced(str.__add__(self, other), self._atoms + atoms_of(other), self._notes)
        return NotImplemented

    def __radd__(self, other: str) -> str:
        if isinstance(other, str):
            return _traced(str.__add__(other, self), atoms_of(other) + self._atoms, self._notes)
        return NotImplemented

    def __mul__(self, count: SupportsIndex) -> str:
        times = max(0, count.__index__())
        return _traced(str.__mul__(self, times), self._atoms * times, self._notes) if times else ""

    __rmul__ = __mul__

    def __mod__(self, value: Any) -> str:
        raise OriginLost("the operator % of a text of the record")

    __rmod__ = __mod__

    def join(self, texts: Iterable[str]) -> str:
        """All texts, with this one between them."""
        return joined(only_texts(texts), self)

    # ---- taking apart

    def __getitem__(self, key: Any) -> str:
        inner = self._single()
        if inner is None:
            self._exact()
            return self._cut(key, str.__getitem__(self, key))
        if isinstance(key, slice):
            applied: Expression = ("apply", "cut", (key.start, key.stop, key.step), inner)
        else:
            index = operator.index(key)
            least = index if index >= 0 else -index - 1
            self._notes.note(("length", inner, ">", least), _len(self) > least)
            applied = ("apply", "at", (index,), inner)
        text = str.__getitem__(self, key)
        return _traced(text, ((_len(text), applied),), self._notes)

    def __iter__(self) -> Iterator[str]:
        self._exact()
        for index in range(_len(self)):
            yield self._cut(slice(index, index + 1), str.__getitem__(self, index))

    def _cut(self, key: Any, text: str) -> str:
        """A part of a text whose exact value was noted."""
        size = _len(self)
        if isinstance(key, slice):
            start, stop, step = key.indices(size)
            if step != 1:
                raise OriginLost("a slice with a step, of a text in pieces")
        else:
            start = key.__index__() % size
            stop = start + 1
        return _traced(text, _atoms_between(self._atoms, start, stop), self._notes)

    def _parts(self, method: str, separator: str | None, limit: int | None, parts: list[str]) -> list[str]:
        inner = self._single()
        if may_hold(separator) or inner is None:
            note_exact([self, separator])
            between = _len(separator) if separator is not None and method in ("split", "rsplit") else 0
            found, at = [], 0
            for part in parts:
                at = str.index(self, part, at)
                found.append(_traced(part, _atoms_between(self._atoms, at, at + len(part)), self._notes))
                at += len(part) + between
            return found
        self._notes.note(("parts", inner, method, separator, limit), len(parts))
        return [
            _traced(part, ((_len(part), ("apply", "part", (method, separator, limit, i), inner)),), self._notes)
            for i, part in enumerate(parts)
        ]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """As `str.split`."""
        return self._parts("split", sep, int(maxsplit), str.split(self, sep, maxsplit))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """As `str.rsplit`."""
        return self._parts("rsplit", sep, int(maxsplit), str.rsplit(self, sep, maxsplit))

    def splitlines(self, keepends: bool = False) -> list[str]:
        """As `str.splitlines`."""
        return self._parts("splitlines", None, int(keepends), str.splitlines(self, keepends))

    def partition(self, sep: str) -> tuple[str, str, str]:
        """As `str.partition`."""
        self._ask("contains", sep, sep in self)
        first, second, third = self._parts("partition", sep, None, list(str.partition(self, sep)))
        return first, second, third

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        """As `str.rpartition`."""
        self._ask("contains", sep, sep in self)
        first, second, third = self._parts("rpartition", sep, None, list(str.rpartition(self, sep)))
        return first, second, third

    # ---- changing

    def _stripped(self, method: str, chars: str | None = None) -> str:
        text: str = getattr(str, method)(self, chars)
        if _is_traced(chars):
            raise OriginLost(f"{method} by characters of the record")
        inner = self._single()
        if inner is not None:
            return _traced(text, ((_len(text), ("apply", method, (chars,), inner)),), self._notes)
        pairs = list(self.pieces())
        if method != "rstrip":
            pairs = self._strip_end("lstrip", pairs, chars)
        if method != "lstrip":
            pairs = self._strip_end("rstrip", pairs[::-1], chars)[::-1]
        return _traced(text, tuple((len(piece), expression) for piece, expression in pairs), self._notes)

    def _strip_end(
        self, method: str, pairs: list[tuple[str, Expression | None]], chars: str | None
    ) -> list[tuple[str, Expression | None]]:
        """Strip pieces from the front on, until something is left of one; later records must agree on which."""
        for number, (piece, expression) in enumerate(pairs):
            left: str = getattr(str, method)(piece, chars)
            applied = None if expression is None else ("apply", method, (chars,), expression)
            if applied is not None:
                self._notes.note(("filled", applied), bool(left))
            if left:
                return [(left, applied), *pairs[number + 1 :]]
        return []

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        """As `str.replace`."""
        text = str.replace(self, old, new, count)
        inner = self._single()
        if _is_traced(new) and old and type(old) is str:
            return joined(self.split(old, count), new)
        if _is_traced(old) or _is_traced(new) or (inner is None and (_len(old) != 1 or int(count) >= 0)):
            raise OriginLost("texts of the record replaced in a text in pieces")
        arguments = (old, new, int(count))
        atoms = []
        for piece, expression in self.pieces():
            changed = piece.replace(*arguments)
            if changed or expression is not None:  # nothing is left of a text of the template
                atoms.append((len(changed), expression and ("apply", "replace", arguments, expression)))
        return _traced(text, tuple(atoms), self._notes)

    def _whole(self, name: str, *arguments: Any) -> str:
        text: str = getattr(str, name)(self, *arguments)
        inner = self._single()
        if any(_is_traced(one) for one in arguments):
            raise OriginLost(f"{name} with a text of the record")
        if inner is not None:
            return _traced(text, ((_len(text), ("apply", name, arguments, inner)),), self._notes)
        self._exact()
        if name in PER_CHARACTER and str.isascii(self):
            atoms = tuple((size, own and ("apply", name, arguments, own)) for size, own in self._atoms)
            return _traced(text, atoms, self._notes)
        if name == "removeprefix":
            return _traced(text, _atoms_between(self._atoms, _len(self) - len(text), _len(self)), self._notes)
        if name == "removesuffix":
            return _traced(text, _atoms_between(self._atoms, 0, len(text)), self._notes)
        raise OriginLost(f"{name} of a text in pieces")

    def _unfollowed(self, name: str, *_: Any) -> Any:
        raise OriginLost(f"{name} of a text of the record")

    # ---- asking

    def __contains__(self, part: object) -> bool:
        if not isinstance(part, str):
            raise TypeError(f"'in <string>' requires string as left operand, not {type(part).__name__}")
        return bool(self._ask("contains", part, str.__contains__(self, part)))

    def __eq__(self, other: object) -> bool:
        reply = str.__eq__(self, other)
        if reply is NotImplemented:
            return NotImplemented
        if isinstance(other, Traced):
            mine, theirs = self._single(), other._single()
            if mine is not None and theirs is not None:
                return bool(self._notes.note(("same", mine, theirs), reply))
            other._exact()
            self._exact()
            return bool(reply)
        return bool(self._ask("equals", other, reply))

    def __ne__(self, other: object) -> bool:
        reply = self.__eq__(other)
        return reply if reply is NotImplemented else not reply

    def __hash__(self) -> int:
        self._exact()
        return str.__hash__(self)

    def __len__(self) -> int:
        self._exact_length()
        return _len(self)

    def __bool__(self) -> bool:
        filled = _len(self) > 0
        for _, expression in self._atoms:
            if expression is None:
                return True
        for piece, expression in self.pieces():
            self._notes.note(("filled", expression), bool(piece))
            if piece:
                return True
        return filled

    def _ordered(self, name: str, other: str) -> bool:
        note_exact([self, other])
        reply: bool = getattr(str, name)(self, other)
        return reply

    def _ask(self, what: str, argument: object, reply: Any) -> Any:
        inner = self._single()
        if inner is None or type(argument) is not str:
            note_exact([self, argument])
            return reply
        return self._notes.note((what, inner, argument), reply)

    def _tested(self, name: str, *arguments: Any) -> Any:
        inner = self._single()
        if may_hold(arguments) or inner is None or not _is_hashable(arguments):
            note_exact([self, arguments])
            return getattr(str, name)(self, *arguments)
        return self._notes.note(("method", inner, name, arguments), getattr(str, name)(self, *arguments))

    # ---- its own

    def _single(self) -> Expression | None:
        """The expression of a text that is one atom."""
        return self._atoms[0][1] if len(self._atoms) == 1 else None

    def _exact(self) -> None:
        """Note the value of everything in this text that comes from the record."""
        for piece, expression in self.pieces():
            if expression is not None and expression[0] != "const":
                self._notes.note(("exact", expression), piece)

    def _exact_length(self) -> None:
        for size, expression in self._atoms:
            if expression is not None and expression[0] != "const":
                self._notes.note(("characters", expression), size)

    def pieces(self) -> Iterator[tuple[str, Expression | None]]:
        """The text of every atom, and its expression."""
        at, plain = 0, plain_text(self)
        for size, expression in self._atoms:
            yield plain[at : at + size], expression
            at += size


def _method(name: str, way: Callable[..., Any]) -> Callable[..., Any]:
    """A method of texts, done in one of the ways above."""

    def method(self: Traced, *arguments: Any, **named: Any) -> Any:
        return way(self, name, *arguments, *named.values())  # no method of texts has more than one name

    method.__name__, method.__doc__ = name, f"As `str.{name}`."
    return method


for _names, _way in (
    (WHOLE_OPERATIONS, Traced._whole),
    (STRIPS, Traced._stripped),
    (TESTS, Traced._tested),
    (ORDERED, Traced._ordered),
    (("translate", "format", "format_map", "encode"), Traced._unfollowed),
):
    for _name in _names:
        setattr(Traced, _name, _method(_name, _way))


def plain_text(text: str) -> str:
    """The text alone, without its origin."""
    return str.__str__(text)


def _is_traced(value: object) -> bool:
    return type(value) is Traced


def _is_hashable(arguments: tuple[Any, ...]) -> bool:
    return all(isinstance(one, str | int | tuple | type(None)) for one in arguments)


def _traced(text: str, atoms: tuple[Atom, ...], notes: Notes) -> str:
    """A text with atoms; a plain string where none of them comes from the record."""
    for _, expression in atoms:
        if expression is not None:
            made = _new(Traced, text)
            made._atoms, made._notes = atoms, notes
            return made
    return text


def atoms_of(text: str) -> tuple[Atom, ...]:
    """The atoms of a text, traced or not."""
    if type(text) is Traced:
        return text._atoms
    return ((_len(text), None),) if text else ()


def _atoms_between(atoms: tuple[Atom, ...], start: int, stop: int) -> tuple[Atom, ...]:
    """The atoms of a part of a text; an atom that is cut becomes a cut of its expression."""
    found: list[Atom] = []
    at = 0
    for size, expression in atoms:
        first, last = max(start, at), min(stop, at + size)
        if first < last:
            if expression is not None and last - first < size:
                expression = ("apply", "cut", (first - at, last - at, None), expression)
            found.append((last - first, expression))
        at += size
    return tuple(found)


def field(text: str, path: Path, notes: Notes) -> str:
    """The text of a record's field."""
    return _traced(text, ((_len(text), ("field", path)),), notes)


def made_of(text: str, expression: Expression, notes: Notes) -> str:
    """A text that an expression gives."""
    return _traced(text, ((_len(text), expression),), notes)


def note_exact(value: object) -> None:
    """Note the exact value of whatever comes from the record in a value."""
    if isinstance(value, Traced):
        value._exact()
    elif isinstance(value, RecordValue):
        value._notes.note(("value", value._path), written_value(value._raw))
    elif isinstance(value, Measure):
        value._note_value()
    elif isinstance(value, dict):
        note_exact([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple | set | KeysView | ValuesView | ItemsView):
        for one in value:
            note_exact(one)


def may_hold(value: object) -> bool:
    """Whether something of the record may be in a value; of what keeps values of its own nobody knows."""
    if isinstance(value, Traced | RecordValue | Measure):
        return True
    if isinstance(value, dict):
        return any(may_hold(one) for pair in value.items() for one in pair)
    if isinstance(value, list | tuple | set | KeysView | ValuesView | ItemsView):
        return any(map(may_hold, value))
    return not isinstance(value, str | int | float | range | jinja2.Undefined | type(None))


def only_texts(texts: Iterable[Any]) -> list[str]:
    """What `str.join` takes: texts, and nothing else."""
    listed = list(texts)
    for number, text in enumerate(listed):
        if not isinstance(text, str):
            raise TypeError(f"sequence item {number}: expected str instance, {type(text).__name__} found")
    return listed


def joined(texts: Iterable[Any], separator: str = "") -> str:
    """Texts one after another, with a separator between them, and all their atoms."""
    pieces: list[str] = []
    atoms: list[Atom] = []
    notes = separator._notes if type(separator) is Traced else None
    between = atoms_of(separator)
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            text = str(text)
        if number and separator:
            pieces.append(separator)
            atoms.extend(between)
        pieces.append(text)
        if type(text) is Traced:
            atoms.extend(text._atoms)
            notes = text._notes
        elif text:
            atoms.append((_len(text), None))
    whole = "".join(pieces)
    return whole if notes is None else _traced(whole, tuple(atoms), notes)
