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
from itertools import repeat
from typing import Any

import jinja2

from chatmill.render.jinja.expressions import Expression, Notes, Path, written_value

Atom = tuple[int, Expression | None]
"""Characters, and the expression they come from; None for text of the template."""

_len = str.__len__
_new = str.__new__
SCALARS = (bool, int, float, type(None), type(NotImplemented))


class OriginLost(jinja2.TemplateError):
    """A template makes a text of the record's texts in a way that cannot be followed: the record is refused."""


class Noting:
    """What comes from a record: the plain value, and how to note that it matters exactly."""

    __slots__ = ()
    _raw: Any

    def _note_value(self) -> None:
        """Note everything that the value depends on."""
        raise NotImplementedError


class RecordValue(Noting):
    """A value of a record that is no text: where it is from, and the plain value."""

    __slots__ = ()
    _path: Path
    _notes: Notes

    def _note_value(self) -> None:
        self._notes.note(("value", self._path), written_value(self._raw))


class Measure(Noting, int):
    """A number that was made of a record's texts, such as a length: it says by itself what it depends on."""

    @property
    def _raw(self) -> int:
        return int.__int__(self)


class Traced(Noting, str):
    """A text with its atoms; at least one of them comes from the record.

    What is not here is done by `_followed`.
    """

    __slots__ = ("_atoms", "_notes")
    _atoms: tuple[Atom, ...]
    _notes: Notes

    def __str__(self) -> str:
        return self

    def __reduce__(self) -> Any:
        return str, (plain_text(self),)

    # ---- joining

    def __add__(self, other: str) -> str:
        if isinstance(other, str):
            return of_atoms(str.__add__(self, other), self._atoms + atoms_of(other), self._notes)
        return NotImplemented

    def __radd__(self, other: str) -> str:
        if isinstance(other, str):
            return of_atoms(str.__add__(other, self), atoms_of(other) + self._atoms, self._notes)
        return NotImplemented

    # ---- taking apart

    def __getitem__(self, key: Any) -> str:
        inner = self._single()
        if inner is None:
            self._note_value()
            start, stop, step = _borders(key, _len(self))
            if step != 1:
                raise OriginLost("a slice with a step, of a text in pieces")
            return of_atoms(str.__getitem__(self, key), _atoms_between(self._atoms, start, stop), self._notes)
        part = key if isinstance(key, slice) else slice(key, operator.index(key) + 1 or None)
        applied: Expression = ("apply", "cut", (part.start, part.stop, part.step), inner)
        if part is not key:
            self._notes.filled(applied, str.__getitem__(self, part) != "")
        return made_of(str.__getitem__(self, key), applied, self._notes)

    def __iter__(self) -> Iterator[str]:
        self._note_value()
        for index in range(_len(self)):
            yield self[index : index + 1]

    def _parts(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Return what a method gives that takes a text apart."""
        parts = getattr(str, method)(self, *arguments, **named)
        inner, how = self._single(), (method, arguments, tuple(named.items()))
        if inner is not None and not may_hold(how):
            self._notes.note(("parts", inner, *how), len(parts))
            expressions = [("apply", "part", (*how, number), inner) for number in range(len(parts))]
            return type(parts)(map(made_of, parts, expressions, repeat(self._notes)))
        note_exact([self, how])
        separator = arguments[0] if arguments else named.get("sep")
        between = _len(separator) if isinstance(separator, str) and method in ("split", "rsplit") else 0
        texts, at = [], 0
        for part in parts:
            at = str.index(self, part, at)
            texts.append(of_atoms(part, _atoms_between(self._atoms, at, at + len(part)), self._notes))
            at += len(part) + between
        return type(parts)(texts)

    # ---- changing

    def _stripped(self, method: str, chars: str | None = None) -> str:
        text: str = getattr(str, method)(self, chars)
        if may_hold(chars):
            raise OriginLost(f"{method} by characters of the record")
        inner = self._single()
        if inner is not None:
            return made_of(text, ("apply", method, (chars,), inner), self._notes)
        pairs = list(self.pieces())
        if method != "rstrip":
            pairs = self._strip_end("lstrip", pairs, chars)
        if method != "lstrip":
            pairs = self._strip_end("rstrip", pairs[::-1], chars)[::-1]
        return of_atoms(text, tuple((len(piece), expression) for piece, expression in pairs), self._notes)

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

    def _followed(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Return what any method gives: a text is an expression, all else is the reply to a question."""
        result = getattr(str, name)(self, *arguments, **named)
        inner = self._single()
        is_fixed = not named and not may_hold(arguments) and all(isinstance(argument, _ASKED) for argument in arguments)
        if inner is None or not is_fixed:
            note_exact([self, arguments, named])
        elif type(result) is not str and result is not NotImplemented:
            self._notes.note(("method", inner, name, arguments), result)
        if type(result) is str and is_fixed:
            pieces = [
                (getattr(piece, name)(*arguments), expression and ("apply", name, arguments, expression))
                for piece, expression in self.pieces()
            ]
            if "".join(piece for piece, _ in pieces) == result:  # of a text in pieces, whose values are noted
                atoms = [(len(piece), expression) for piece, expression in pieces if piece or expression is not None]
                return of_atoms(result, tuple(atoms), self._notes)
        if type(result) in SCALARS:
            return result
        raise OriginLost(f"{name} of a text of the record")

    def replace(self, old: Any, new: Any, count: Any = -1) -> Any:
        """Do as `str.replace`; what may be (part of) a control token stays text of the template.

        Then each number of pieces is a case of its own, so anything else is part of the expression.
        """
        if type(old) is not str or type(new) is not str or not self._notes.controls.may_be_made_of(new):
            return self._followed("replace", old, new, count)
        if not old:
            raise OriginLost(f"{new!r} between all characters of a text of the record")
        inner = self._single()
        if inner is None:
            self._note_value()
            pieces = [of_atoms(text, ((len(text), expression),), self._notes) for text, expression in self.pieces()]
            text = joined(piece.replace(old, new) for piece in pieces)
            if count != -1 or text != str.replace(self, old, new):
                raise OriginLost(f"{new!r} in place of some text that is in pieces")
            return text
        texts = str.split(self, old, count)
        self._notes.note(("parts", inner, "split", (old, count), ()), len(texts))
        expressions = [("apply", "between", (old, count, number), inner) for number in range(len(texts))]
        return joined(map(made_of, texts, expressions, repeat(self._notes)), new)

    def join(self, texts: Iterable[Any]) -> Any:
        """Do as `str.join`: the texts are the template's, or have an origin of their own."""
        texts = list(texts)
        return joined(texts, self) if all(isinstance(text, str) for text in texts) else self._followed("join", texts)

    def _filled_up(self, name: str, *arguments: Any) -> Any:
        """Return a method that puts characters next to a text; none of them may be part of a control token."""
        given = [plain_text(argument) for argument in arguments if isinstance(argument, str)]
        if any(map(self._notes.controls.may_be_made_of, given or [_FILLING.get(name, " ")])):
            raise OriginLost(f"{name} of a text of the record, by what may be part of a control token")
        return self._followed(name, *arguments)

    def _unfollowed(self, name: str, *_: Any, **__: Any) -> Any:
        raise OriginLost(f"{name} of a text of the record")

    # ---- asking

    def __contains__(self, part: object) -> bool:
        return bool(self._ask("contains", part, str.__contains__(self, part)))  # type: ignore[operator]

    def __eq__(self, other: object) -> bool:
        reply = str.__eq__(self, other)
        if reply is NotImplemented:
            return NotImplemented
        if type(other) is Traced:
            mine, theirs = self._single(), other._single()
            if mine is not None and theirs is not None:
                return bool(self._notes.note(("same", mine, theirs), reply))
        return bool(self._ask("equals", other, reply))

    def __ne__(self, other: object) -> bool:
        reply = self.__eq__(other)
        return reply if reply is NotImplemented else not reply

    def __hash__(self) -> int:
        self._note_value()
        return str.__hash__(self)

    def __len__(self) -> int:
        self._exact_length()
        return _len(self)

    def __bool__(self) -> bool:
        if any(expression is None for _, expression in self._atoms):
            return True
        return any(self._notes.filled(expression, bool(piece)) for piece, expression in self.pieces())

    def _ask(self, kind: str, argument: object, reply: Any) -> Any:
        inner = self._single()
        if inner is None or type(argument) is not str:
            note_exact([self, argument])
            return reply
        return self._notes.note((kind, inner, argument), reply)

    # ---- its own

    def _single(self) -> Expression | None:
        """Return the expression of a text that is one atom."""
        return self._atoms[0][1] if len(self._atoms) == 1 else None

    @property
    def _raw(self) -> str:
        return plain_text(self)

    def _note_value(self) -> None:
        for piece, expression in self.pieces():
            if expression is not None and expression[0] != "const":
                self._notes.note(("exact", expression), piece)

    def _exact_length(self) -> None:
        for size, expression in self._atoms:
            if expression is not None and expression[0] != "const":
                self._notes.note(("characters", expression), size)

    def pieces(self) -> Iterator[tuple[str, Expression | None]]:
        """Yield the text of every atom, and its expression."""
        at, plain = 0, plain_text(self)
        for size, expression in self._atoms:
            yield plain[at : at + size], expression
            at += size


_FILLING = {"zfill": "0"}
"""What methods put next to a text; the others a space, if they are given nothing else."""
_ASKED = (str, int, tuple, type(None))
"""Types of arguments that can be part of a question."""
_OF_ALL = frozenset(dir(object)) - {f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_NOT_ASKED = (_OF_ALL | {"__class_getitem__"}) - {"__hash__", "__str__", "__repr__", "__format__"}
"""What no template does to a value."""


def do_others(kind: type, base: type, way: Callable[..., Any], names: Iterable[str] = ()) -> None:
    """Have methods of `base` done in one way, which is given their names first; all that `kind` has none of itself."""
    names_done = {
        name
        for base_class in kind.__mro__
        if base_class.__module__.startswith("chatmill.")
        for name in vars(base_class)
    }

    def made(name: str) -> Any:
        def method(self: Any, *arguments: Any, **named: Any) -> Any:
            return way(self, name, *arguments, **named)

        method.__name__, method.__doc__ = name, f"As `{base.__name__}.{name}`."
        return method if callable(getattr(base, name)) else property(method)

    for name in names or set(dir(base)) - names_done - _NOT_ASKED:
        if getattr(base, name) is not None:
            setattr(kind, name, made(name))


do_others(Traced, str, Traced._parts, ("split", "rsplit", "splitlines", "partition", "rpartition"))
do_others(Traced, str, Traced._stripped, ("strip", "lstrip", "rstrip"))
do_others(Traced, str, Traced._unfollowed, ("__repr__", "__format__", "__mod__", "__rmod__", "format", "format_map"))
do_others(Traced, str, Traced._filled_up, ("center", "ljust", "rjust", "zfill", "expandtabs"))
do_others(Traced, str, Traced._followed)


def plain_text(text: str) -> str:
    """Return the text alone, without its origin."""
    return str.__str__(text)


def of_atoms(text: str, atoms: tuple[Atom, ...], notes: Notes) -> str:
    """Return a text with atoms; a plain string where none of them comes from the record."""
    for _, expression in atoms:
        if expression is not None:
            text_made = _new(Traced, text)
            text_made._atoms, text_made._notes = atoms, notes
            return text_made
    return text


def atoms_of(text: str) -> tuple[Atom, ...]:
    """Return the atoms of a text, traced or not."""
    if type(text) is Traced:
        return text._atoms
    return ((_len(text), None),) if text else ()


def _borders(key: Any, size: int) -> tuple[int, int, int]:
    if isinstance(key, slice):
        return key.indices(size)
    index = operator.index(key)
    return (index + size if index < 0 else index), (index + size if index < 0 else index) + 1, 1


def _atoms_between(atoms: tuple[Atom, ...], start: int, stop: int) -> tuple[Atom, ...]:
    """Return the atoms of a part of a text; an atom that is cut becomes a cut of its expression."""
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
    """Return the text of a record's field."""
    return of_atoms(text, ((_len(text), ("field", path)),), notes)


def made_of(text: str, expression: Expression, notes: Notes) -> str:
    """Return a text that an expression gives."""
    return of_atoms(text, ((_len(text), expression),), notes)


def note_exact(value: object) -> None:
    """Note the exact value of whatever comes from the record in a value."""
    if isinstance(value, Noting):
        value._note_value()
    elif isinstance(value, dict):
        note_exact([*dict.keys(value), *dict.values(value)])
    elif isinstance(value, list | tuple | set | KeysView | ValuesView | ItemsView):
        for item in value:
            note_exact(item)


def may_hold(value: object) -> bool:
    """Return whether something of the record may be in a value; of what keeps values of its own nobody knows."""
    if isinstance(value, Noting):
        return True
    if isinstance(value, dict):
        return any(may_hold(item) for pair in dict.items(value) for item in pair)
    if isinstance(value, list | tuple | set | KeysView | ValuesView | ItemsView):
        return any(map(may_hold, value))
    return not isinstance(value, str | int | float | range | jinja2.Undefined | type(None))


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
    return whole if notes is None else of_atoms(whole, tuple(atoms), notes)
