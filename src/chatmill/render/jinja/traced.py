"""Strings that remember where they came from, and that note what a template asks about them.

A template runs on these values instead of plain ones. Each behaves as the plain value it stands for. A `Traced` string
also knows its *atoms*: runs of characters that are fixed text of the template, or an expression over the record's
fields. Whatever lets a template decide something (`in`, `==`, emptiness) is noted in a `Notes` as a question and its
answer: another record of the same shape that gives the same answers is written in the same way. An operation that
cannot be followed notes the exact value, which is right for this record and useless for others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

from chatmill.render.jinja.expressions import COMPARISONS, Expression, Path, Question, kind_of_value

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


class Notes:
    """What one run of a template asked, in order."""

    __slots__ = ("answers",)

    def __init__(self) -> None:
        """Nothing asked yet."""
        self.answers: dict[Question, Any] = {}

    def note(self, question: Question, answer: Any) -> Any:
        """Keep an answer, and give it back."""
        self.answers.setdefault(question, answer)
        return answer


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
        self._exact()
        return str.__repr__(self)

    def __format__(self, spec: str) -> str:
        self._exact()
        return str.__format__(self, spec)

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
        return lost(str.__mod__(self, value), self, value)

    def __rmod__(self, value: Any) -> str:
        return lost(str.__mod__(value, self), self, value)

    def join(self, texts: Iterable[str]) -> str:
        """All texts, with this one between them."""
        return joined(texts, self)

    # ---- taking apart

    def __getitem__(self, key: Any) -> str:
        text = str.__getitem__(self, key)
        inner = self._single()
        if inner is None:
            self._exact()
            return self._cut(key, text)
        if isinstance(key, slice):
            applied: Expression = ("apply", "cut", (key.start, key.stop, key.step), inner)
        else:
            index = key.__index__()
            self._notes.note(("length", inner, ">", index if index >= 0 else -index - 1), True)
            applied = ("apply", "at", (index,), inner)
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
                return lost(text, self)
        else:
            start = key.__index__() % size
            stop = start + 1
        return _traced(text, _atoms_between(self._atoms, start, stop), self._notes)

    def _parts(self, method: str, separator: str | None, limit: int | None, parts: list[str]) -> list[str]:
        inner = self._single()
        if inner is None or _is_traced(separator):
            self._exact()
            found, at = [], 0
            for part in parts:
                at = str.index(self, part, at)
                found.append(_traced(part, _atoms_between(self._atoms, at, at + len(part)), self._notes))
                at += len(part)
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

    def strip(self, chars: str | None = None) -> str:
        """As `str.strip`."""
        return self._stripped("strip", chars)

    def lstrip(self, chars: str | None = None) -> str:
        """As `str.lstrip`."""
        return self._stripped("lstrip", chars)

    def rstrip(self, chars: str | None = None) -> str:
        """As `str.rstrip`."""
        return self._stripped("rstrip", chars)

    def _stripped(self, method: str, chars: str | None) -> str:
        text: str = getattr(str, method)(self, chars)
        if _is_traced(chars):
            return lost(text, self, chars)
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
        if _is_traced(old) or _is_traced(new) or (inner is None and (_len(old) != 1 or int(count) >= 0)):
            return lost(text, self, old, new)
        arguments = (old, new, int(count))
        atoms = []
        for piece, expression in self.pieces():
            changed = piece.replace(*arguments)
            atoms.append((len(changed), expression and ("apply", "replace", arguments, expression)))
        return _traced(text, tuple(atoms), self._notes)

    def _whole(self, name: str, arguments: tuple[Any, ...]) -> str:
        text: str = getattr(str, name)(self, *arguments)
        inner = self._single()
        if any(_is_traced(one) for one in arguments):
            return lost(text, self, *arguments)
        if inner is not None:
            return _traced(text, ((_len(text), ("apply", name, arguments, inner)),), self._notes)
        self._exact()
        if name in PER_CHARACTER and str.isascii(self):
            return _traced(text, self._atoms, self._notes)
        if name == "removeprefix":
            return _traced(text, _atoms_between(self._atoms, _len(self) - len(text), _len(self)), self._notes)
        if name == "removesuffix":
            return _traced(text, _atoms_between(self._atoms, 0, len(text)), self._notes)
        return lost(text, self)

    def translate(self, table: Any) -> str:
        """As `str.translate`; the origin of characters is lost."""
        return lost(str.translate(self, table), self)

    def format(self, *args: Any, **kwargs: Any) -> str:
        """As `str.format`; the origin of characters is lost."""
        return lost(str.format(plain_text(self), *args, **kwargs), self, args, kwargs)

    def format_map(self, mapping: Any) -> str:
        """As `str.format_map`; the origin of characters is lost."""
        return lost(str.format_map(plain_text(self), mapping), self, mapping)

    def encode(self, *args: Any, **kwargs: Any) -> bytes:
        """As `str.encode`."""
        self._exact()
        return str.encode(self, *args, **kwargs)

    # ---- asking

    def __contains__(self, part: object) -> bool:
        if not isinstance(part, str):
            raise TypeError(f"'in <string>' requires string as left operand, not {type(part).__name__}")
        return bool(self._ask("contains", part, str.__contains__(self, part)))

    def __eq__(self, other: object) -> bool:
        answer = str.__eq__(self, other)
        if answer is NotImplemented:
            return False
        if isinstance(other, Traced):
            mine, theirs = self._single(), other._single()
            if mine is not None and theirs is not None:
                return bool(self._notes.note(("same", mine, theirs), answer))
            other._exact()
            self._exact()
            return bool(answer)
        return bool(self._ask("equals", other, answer))

    def __ne__(self, other: object) -> bool:
        return not self == other

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

    def __lt__(self, other: str) -> bool:
        return self._ordered("__lt__", other)

    def __le__(self, other: str) -> bool:
        return self._ordered("__le__", other)

    def __gt__(self, other: str) -> bool:
        return self._ordered("__gt__", other)

    def __ge__(self, other: str) -> bool:
        return self._ordered("__ge__", other)

    def _ordered(self, name: str, other: str) -> bool:
        self._exact()
        if isinstance(other, Traced):
            other._exact()
        answer: bool = getattr(str, name)(self, other)
        return answer

    def _ask(self, what: str, argument: object, answer: Any) -> Any:
        inner = self._single()
        if inner is None or type(argument) is not str:
            self._exact()
            note_exact(argument)
            return answer
        return self._notes.note((what, inner, argument), answer)

    def _method(self, name: str, arguments: tuple[Any, ...]) -> Any:
        inner = self._single()
        if inner is None or any(note_exact(one) for one in arguments) or not _is_hashable(arguments):
            self._exact()
            return getattr(str, name)(self, *arguments)
        return self._notes.note(("method", inner, name, arguments), getattr(str, name)(self, *arguments))

    # ---- its own

    def _single(self) -> Expression | None:
        """The expression of a text that is one atom."""
        return self._atoms[0][1] if len(self._atoms) == 1 else None

    def _exact(self) -> None:
        """Note the value of everything in this text that comes from the record."""
        for piece, expression in self.pieces():
            if expression is not None and expression[0] not in ("const", "lost"):
                self._notes.note(("exact", expression), piece)

    def _exact_length(self) -> None:
        for size, expression in self._atoms:
            if expression is not None and expression[0] not in ("const", "lost"):
                self._notes.note(("characters", expression), size)

    def pieces(self) -> Iterator[tuple[str, Expression | None]]:
        """The text of every atom, and its expression."""
        at, plain = 0, plain_text(self)
        for size, expression in self._atoms:
            yield plain[at : at + size], expression
            at += size


def _whole_method(name: str) -> Callable[..., str]:
    def method(self: Traced, *arguments: Any) -> str:
        return self._whole(name, arguments)

    method.__name__, method.__doc__ = name, f"As `str.{name}`."
    return method


def _test_method(name: str) -> Callable[..., Any]:
    def method(self: Traced, *arguments: Any) -> Any:
        return self._method(name, arguments)

    method.__name__, method.__doc__ = name, f"As `str.{name}`."
    return method


for _name in WHOLE_OPERATIONS:
    setattr(Traced, _name, _whole_method(_name))
for _name in TESTS:
    setattr(Traced, _name, _test_method(_name))


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


def lost(text: str, *sources: object) -> str:
    """A text whose characters cannot be followed back to these sources; their exact values are noted."""
    paths: list[Path] = []
    notes = [note for source in sources if (note := _collect(source, paths)) is not None]
    if not notes or not text:
        return plain_text(text)
    return _traced(plain_text(text), ((len(text), ("lost", tuple(dict.fromkeys(paths)))),), notes[0])


def _collect(value: object, paths: list[Path]) -> Notes | None:
    """Note the exact values inside a value, and collect the paths of the fields in it."""
    if isinstance(value, Traced):
        value._exact()
        for _, expression in value._atoms:
            if expression is not None:
                while expression[0] == "apply":
                    expression = expression[3]
                paths.extend(expression[1] if expression[0] == "lost" else [expression[-1]])
        return value._notes
    if isinstance(value, TracedDict | TracedList | TracedInt | TracedFloat):
        paths.append(value._path)
        value._notes.note(("value", value._path), (kind_of_value(value._raw), value._raw))
        return value._notes
    found = None
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set):
        for one in value:
            found = _collect(one, paths) or found
    return found


def note_exact(value: object) -> bool:
    """Note the exact value of whatever comes from the record in a value; False where nothing does."""
    return _collect(value, []) is not None


def joined(texts: Iterable[Any], separator: str = "") -> str:
    """Texts one behind the other, with a separator between them, and all their atoms."""
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


# ---- values that are not text


class TracedLength(int):
    """The length of a traced text; a comparison with a number is a question, anything else notes the length."""

    _of: Traced

    def _compare(self, symbol: str, other: Any) -> bool:
        inner = self._of._single()
        answer = COMPARISONS[symbol](int.__int__(self), other)
        if inner is None or type(other) is not int:
            self._of._exact_length()
            return answer
        return bool(self._of._notes.note(("length", inner, symbol, other), answer))

    def __eq__(self, other: object) -> bool:
        return self._compare("==", other)

    def __ne__(self, other: object) -> bool:
        return not self._compare("==", other)

    def __lt__(self, other: int) -> bool:
        return self._compare("<", other)

    def __le__(self, other: int) -> bool:
        return self._compare("<=", other)

    def __gt__(self, other: int) -> bool:
        return self._compare(">", other)

    def __ge__(self, other: int) -> bool:
        return self._compare(">=", other)

    def __bool__(self) -> bool:
        return bool(self._of)

    def __hash__(self) -> int:
        self._of._exact_length()
        return int.__hash__(self)

    def _note_value(self) -> None:
        self._of._exact_length()


def _noting(base: type, names: Iterable[str]) -> dict[str, Any]:
    """Methods of a number that note its exact value first."""

    def method(name: str) -> Callable[..., Any]:
        plain = getattr(base, name)

        def noted(self: Any, *arguments: Any) -> Any:
            self._note_value()
            return plain(self, *arguments)

        return noted

    return {name: method(name) for name in names}


_COMPARED = [f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge", "hash", "bool")]
_ARITHMETIC = [
    f"__{name}__"
    for name in (
        *("int", "float", "abs", "neg", "pos", "round", "trunc"),
        *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod"),
        *("pow", "rpow", "divmod", "rdivmod", "format"),
    )
]


for _name, _method in _noting(int, [*_ARITHMETIC, "__index__", "__str__", "__repr__"]).items():
    if _name != "__int__":
        setattr(TracedLength, _name, _method)


class _Number:
    """What traced numbers share: a number of the record, which is part of the text it is written into."""

    _path: Path
    _notes: Notes
    _raw: Any

    def _note_value(self) -> None:
        self._notes.note(("value", self._path), (kind_of_value(self._raw), self._raw))

    def __str__(self) -> str:
        return made_of(str(self._raw), ("text", self._path), self._notes)

    def __repr__(self) -> str:
        self._note_value()
        return repr(self._raw)


TracedInt: Any = type(
    "TracedInt",
    (_Number, int),
    {"__doc__": "A whole number of a record.", **_noting(int, [*_COMPARED, *_ARITHMETIC, "__index__"])},
)
TracedFloat: Any = type(
    "TracedFloat", (_Number, float), {"__doc__": "A number of a record.", **_noting(float, [*_COMPARED, *_ARITHMETIC])}
)


class TracedDict(dict[Any, Any]):
    """A JSON object of a record; what a template looks at is noted, and what it takes out is traced."""

    __slots__ = ("_notes", "_path", "_raw")

    def __init__(self, raw: dict[str, Any], path: Path, notes: Notes) -> None:
        """`raw` is the plain object."""
        super().__init__(raw)
        self._raw, self._path, self._notes = raw, path, notes

    def _child(self, key: Any) -> Any:
        return wrapped(self._raw[key], (*self._path, key), self._notes)

    def _has(self, key: Any) -> bool:
        note_exact(key)
        key = plain_text(key) if isinstance(key, str) else key
        return bool(self._notes.note(("has", self._path, key), key in self._raw))

    def _keys(self) -> list[Any]:
        keys = tuple(self._raw)
        self._notes.note(("keys", self._path), keys)
        return [made_of(key, ("const", key, self._path), self._notes) if isinstance(key, str) else key for key in keys]

    def __getitem__(self, key: Any) -> Any:
        if not self._has(key):
            raise KeyError(key)
        return self._child(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """As `dict.get`."""
        return self._child(key) if self._has(key) else default

    def __contains__(self, key: object) -> bool:
        return self._has(key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._keys())

    def __len__(self) -> int:
        return int(self._notes.note(("size", self._path), len(self._raw)))

    def __bool__(self) -> bool:
        return len(self) > 0

    def keys(self) -> Any:
        """The keys, as a list."""
        return self._keys()

    def values(self) -> Any:
        """The values, as a list."""
        self._keys()
        return [self._child(key) for key in self._raw]

    def items(self) -> Any:
        """Keys and values, as a list."""
        return list(zip(self._keys(), self.values(), strict=True))

    def copy(self) -> dict[Any, Any]:
        """A plain dict of traced values."""
        return dict(self.items())

    def __eq__(self, other: object) -> bool:
        note_exact(self)
        return self._raw == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __repr__(self) -> str:
        note_exact(self)
        return repr(self._raw)


class TracedList(list[Any]):
    """A JSON list of a record."""

    __slots__ = ("_notes", "_path", "_raw")

    def __init__(self, raw: list[Any], path: Path, notes: Notes) -> None:
        """`raw` is the plain list."""
        super().__init__(raw)
        self._raw, self._path, self._notes = raw, path, notes

    def _child(self, index: int) -> Any:
        return wrapped(self._raw[index], (*self._path, index), self._notes)

    def __len__(self) -> int:
        return int(self._notes.note(("size", self._path), len(self._raw)))

    def __bool__(self) -> bool:
        return len(self) > 0

    def __iter__(self) -> Iterator[Any]:
        return iter([self._child(index) for index in range(len(self))])

    def __reversed__(self) -> Iterator[Any]:
        return iter([self._child(index) for index in reversed(range(len(self)))])

    def __getitem__(self, key: Any) -> Any:
        size = len(self)
        if isinstance(key, slice):
            return [self._child(index) for index in range(*key.indices(size))]
        index = key.__index__()
        if not -size <= index < size:
            raise IndexError("list index out of range")
        return self._child(index % size)

    def __contains__(self, value: object) -> bool:
        return any(one is value or one == value for one in self)

    def __add__(self, other: Any) -> Any:
        return [*self, *other]

    def __radd__(self, other: Any) -> Any:
        return [*other, *self]

    def __eq__(self, other: object) -> bool:
        note_exact(self)
        return self._raw == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __repr__(self) -> str:
        note_exact(self)
        return repr(self._raw)


def wrapped(value: Any, path: Path, notes: Notes) -> Any:
    """A JSON value of a record as a traced one; its type is noted."""
    notes.note(("type", path), kind_of_value(value))
    if isinstance(value, str):
        return field(value, path, notes)
    if isinstance(value, dict):
        return TracedDict(value, path, notes)
    if isinstance(value, list):
        return TracedList(value, path, notes)
    if value is None or isinstance(value, bool):
        return value
    made = (TracedInt if isinstance(value, int) else TracedFloat)(value)
    made._raw, made._path, made._notes = value, path, notes
    return made


def length_of(value: Any) -> int:
    """The length of any value; that of a traced text answers comparisons without giving itself away."""
    if not isinstance(value, Traced):
        return len(value)
    made = TracedLength(_len(value))
    made._of = value
    return made


def written_as_json(value: Any, options: dict[str, Any]) -> str:
    """A value as `json.dumps` writes it, with the origin of all its parts."""
    if isinstance(value, TracedDict | TracedList):
        text = json.dumps(value._raw, **options)
        return made_of(text, ("json", tuple(sorted(options.items())), value._path), value._notes)
    if isinstance(value, _Number):
        return made_of(json.dumps(value._raw, **options), ("json", (), value._path), value._notes)
    if isinstance(value, Traced):
        return _json_string(value, bool(options.get("ensure_ascii")))
    if not _holds_traced(value):
        return json.dumps(value, **options)
    return joined(_json_pieces(value, options, 0))


def _json_pieces(value: Any, options: dict[str, Any], level: int) -> Iterator[str]:
    """What `json.dumps` writes for a value that holds traced ones, piece by piece."""
    indent = options.get("indent")
    if not isinstance(value, dict | list | tuple) or (indent is None and isinstance(value, TracedDict | TracedList)):
        yield written_as_json(value, options if indent is None else {"ensure_ascii": options.get("ensure_ascii")})
        return
    between, colon = options.get("separators") or (", " if indent is None else ",", ": ")
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    if not value:
        yield opening + closing
        return
    step = indent if isinstance(indent, str) else " " * (indent or 0)
    line = "" if indent is None else "\n" + step * (level + 1)
    yield opening + line
    if isinstance(value, dict):
        pairs = sorted(value.items()) if options.get("sort_keys") else list(value.items())
        entries = [(joined([_json_key(key, options), colon]), one) for key, one in pairs]
    else:
        entries = [("", one) for one in value]
    for number, (key, one) in enumerate(entries):
        if number:
            yield between + line
        yield key
        yield from _json_pieces(one, options, level + 1)
    yield ("" if indent is None else "\n" + step * level) + closing


def _json_key(key: Any, options: dict[str, Any]) -> str:
    if isinstance(key, Traced):
        return _json_string(key, bool(options.get("ensure_ascii")))
    return json.dumps({key: 0}, ensure_ascii=bool(options.get("ensure_ascii")))[1:-4]


def _json_string(text: Traced, ascii_only: bool) -> str:
    """A text as a JSON string: JSON writes it character by character, so its atoms are written one by one."""
    pieces: list[str] = ['"']
    for piece, expression in text.pieces():
        escaped = json.dumps(piece, ensure_ascii=ascii_only)[1:-1]
        if expression is None:
            pieces.append(escaped)
        elif expression[0] == "const":
            pieces.append(made_of(escaped, ("const", escaped, expression[2]), text._notes))
        else:
            applied = ("apply", "json_string", (ascii_only,), expression)
            pieces.append(made_of(escaped, applied if expression[0] != "lost" else expression, text._notes))
    return joined([*pieces, '"'])


def _holds_traced(value: Any) -> bool:
    if isinstance(value, Traced | TracedDict | TracedList | _Number):
        return True
    if isinstance(value, dict):
        return any(_holds_traced(one) for pair in value.items() for one in pair)
    return isinstance(value, list | tuple) and any(_holds_traced(one) for one in value)
