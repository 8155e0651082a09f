"""Values of a record that are no text: objects, lists and numbers that note what a template asks about them.

`written_as_json` is `tojson` on such values: the text of `json.dumps`, with the origin of all its parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from chatmill.render.jinja.expressions import COMPARISONS, KEY, VALUE, Notes, Path, kind_of_value, written_value
from chatmill.render.jinja.traced import (
    ORDERED,
    Measure,
    OriginLost,
    RecordValue,
    Traced,
    field,
    joined,
    made_of,
    may_hold,
    note_exact,
    plain_text,
)


class TracedLength(int, Measure):
    """The length of a traced text; a comparison with a number is a question, anything else notes the length."""

    _of: Traced

    @property
    def _raw(self) -> int:
        return int.__int__(self)

    def _compare(self, symbol: str, other: Any) -> bool:
        inner = self._of._single()
        reply = COMPARISONS[symbol](int.__int__(self), other)
        if inner is None or type(other) is not int:
            self._of._exact_length()
            return reply
        return bool(self._of._notes.note(("length", inner, symbol, other), reply))

    def __eq__(self, other: object) -> bool:
        return self._compare("==", other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return bool(self._of)

    def __hash__(self) -> int:
        self._of._exact_length()
        return int.__hash__(self)

    def _note_value(self) -> None:
        self._of._exact_length()


def _comparing(symbol: str) -> Callable[[TracedLength, int], bool]:
    return lambda self, other: self._compare(symbol, other)


for _name, _symbol in (("__lt__", "<"), ("__le__", "<="), ("__gt__", ">"), ("__ge__", ">=")):
    setattr(TracedLength, _name, _comparing(_symbol))


def _noting(base: type, names: Iterable[str]) -> dict[str, Any]:
    """Methods and attributes of a number that note its exact value first, and that of every other number."""

    def method(name: str) -> Callable[..., Any]:
        def noted(self: Any, *arguments: Any, **named: Any) -> Any:
            self._note_value()
            note_exact([arguments, named])
            return getattr(self._raw, name)(*arguments, **named)

        return noted

    def attribute(name: str) -> property:
        def noted(self: Any) -> Any:
            self._note_value()
            return getattr(self._raw, name)

        return property(noted)

    return {name: method(name) if callable(getattr(base, name)) else attribute(name) for name in names}


_COMPARED = [f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge", "hash", "bool")]
_ARITHMETIC = [
    f"__{name}__"
    for name in (
        *("int", "float", "abs", "neg", "pos", "round", "trunc"),
        *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod"),
        *("pow", "rpow", "divmod", "rdivmod"),
    )
]


def _public(base: type) -> list[str]:
    return [name for name in dir(base) if not name.startswith("_")]


_WRITTEN = ["__index__", "__str__", "__repr__", "__format__"]
for _name, _method in _noting(int, [*_ARITHMETIC, *_WRITTEN, *_public(int)]).items():
    if _name != "__int__":
        setattr(TracedLength, _name, _method)


class TracedNumber(RecordValue):
    """What traced numbers share: a number of the record, which is part of the text it is written into."""

    def _note_value(self) -> None:
        self._notes.note(("value", self._path), written_value(self._raw))

    def __str__(self) -> str:
        return made_of(str(self._raw), ("text", self._path), self._notes)

    def __repr__(self) -> str:
        raise OriginLost("a number of the record is written as Python code")

    def __format__(self, spec: str) -> str:
        raise OriginLost("a number of the record is put into a format")


TracedInt: Any = type(
    "TracedInt",
    (TracedNumber, int),
    {
        "__doc__": "A whole number of a record.",
        **_noting(int, [*_COMPARED, *_ARITHMETIC, "__index__", *_public(int)]),
    },
)
TracedFloat: Any = type(
    "TracedFloat",
    (TracedNumber, float),
    {"__doc__": "A number of a record.", **_noting(float, [*_COMPARED, *_ARITHMETIC, *_public(float)])},
)


class _Container(RecordValue):  # noqa: PLW1641 - as plain ones, they have no hash
    """What objects and lists share: compared or printed as a whole, their exact value matters."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        note_exact(self)
        return bool(self._raw == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __str__(self) -> str:
        return made_of(str(self._raw), ("text", self._path), self._notes)

    def __repr__(self) -> str:
        raise OriginLost("a value of the record is written inside another one")


def _ordering(name: str) -> Callable[[Any, Any], Any]:
    def ordered(self: Any, other: Any) -> Any:
        note_exact([self, other])
        return getattr(self._raw, name)(other) if hasattr(self._raw, name) else NotImplemented

    return ordered


for _name in ORDERED:
    setattr(_Container, _name, _ordering(_name))


class _Listed(list[Any]):
    """What an object lists: it is walked over, and written otherwise than a list."""

    def __repr__(self) -> str:
        raise OriginLost("the keys or values of an object are printed")


class TracedDict(_Container, dict[Any, Any]):
    """A JSON object of a record; what a template looks at is noted, and what it takes out is traced."""

    __slots__ = ("_notes", "_path", "_raw")

    def __init__(self, raw: dict[str, Any], path: Path, notes: Notes) -> None:
        """`raw` is the plain object."""
        super().__init__(raw)
        self._raw, self._path, self._notes = raw, path, notes

    def _child(self, key: Any) -> Any:
        key = plain_text(key) if isinstance(key, str) else key
        return wrapped(self._raw[key], (*self._path, key), self._notes)

    def _has(self, key: Any) -> bool:
        note_exact(key)
        key = plain_text(key) if isinstance(key, str) else key
        return bool(self._notes.note(("has", self._path, key), key in self._raw))

    def _keys(self) -> list[Any]:
        """The keys are texts of the record: known by their numbers, whatever they are."""
        keys = list(self._raw)[: len(self)]
        return [field(key, (*self._path, (KEY, number)), self._notes) for number, key in enumerate(keys)]

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

    def __reversed__(self) -> Iterator[Any]:
        return iter(self._keys()[::-1])

    def __len__(self) -> int:
        return int(self._notes.note(("size", self._path), len(self._raw)))

    def __bool__(self) -> bool:
        return len(self) > 0

    def keys(self) -> Any:
        """The keys, as a list."""
        return _Listed(self._keys())

    def values(self) -> Any:
        """The values, as a list."""
        values = list(self._raw.values())[: len(self)]
        return _Listed(wrapped(one, (*self._path, (VALUE, number)), self._notes) for number, one in enumerate(values))

    def items(self) -> Any:
        """Keys and values, as a list."""
        return _Listed(zip(self._keys(), self.values(), strict=True))


class TracedList(_Container, list[Any]):
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


def _refusing(name: str) -> Callable[..., Any]:
    def refused(*_: Any) -> Any:
        raise OriginLost(f"{name} of a value of the record")

    return refused


for _type, _names in (
    (TracedDict, ("copy", "fromkeys")),
    (TracedList, ("copy", "index", "count", "__mul__", "__rmul__")),
):
    for _name in _names:
        setattr(_type, _name, _refusing(_name))


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


def fixed(value: Any, path: Path, notes: Notes) -> Any:
    """A JSON value that is the same in every record of the shape; its texts are text of the record all the same."""
    if isinstance(value, str):
        return made_of(value, ("const", value, path), notes)
    if isinstance(value, dict):
        return {fixed(key, path, notes): fixed(one, (*path, key), notes) for key, one in value.items()}
    if isinstance(value, list):
        return [fixed(one, (*path, number), notes) for number, one in enumerate(value)]
    return value


def without_origin(value: Any) -> Any:
    """The plain value that a traced one stands for, also inside plain lists and objects; its value is noted before."""
    if isinstance(value, RecordValue | Measure):
        return value._raw
    if isinstance(value, Traced):
        return plain_text(value)
    if type(value) is dict:
        return {without_origin(key): without_origin(one) for key, one in value.items()}
    return type(value)(map(without_origin, value)) if type(value) in (list, tuple) else value


def settled(value: Any) -> Any:
    """A number of the record as a plain one, for code that reads numbers without asking them; its value is noted."""
    if isinstance(value, TracedNumber):
        value._note_value()
        return value._raw
    return settled_length(value)


def settled_length(value: Any) -> Any:
    """The length of a text as a plain number; of other numbers, which may be handed on, the value is noted."""
    if isinstance(value, Measure):
        value._note_value()
        return int.__int__(value) if isinstance(value, int) else value
    if isinstance(value, TracedNumber):
        value._note_value()
    return value


def length_of(value: Any) -> int:
    """The length of any value; that of a traced text answers comparisons without giving itself away."""
    if not isinstance(value, Traced):
        return len(value)
    made = TracedLength(str.__len__(value))
    made._of = value
    return made


def text_of(value: Any) -> str:
    """A value as `str` writes it, with the origin of all its parts."""
    if isinstance(value, SafeText):
        return str(value._text)
    if type(value) in _PLAIN_CONTAINERS and may_hold(value):
        return joined(_repr_pieces(value))
    return str(value)


_PLAIN_CONTAINERS = (dict, list, tuple)


def _repr_pieces(value: Any) -> Iterator[str]:
    """What `repr` writes for a value, piece by piece."""
    if isinstance(value, Traced):
        yield value.as_code()
    elif type(value) not in _PLAIN_CONTAINERS:
        yield str(value) if isinstance(value, RecordValue) else repr(value)
    else:
        opening, closing = "{}" if isinstance(value, dict) else "[]" if isinstance(value, list) else "()"
        yield opening
        for number, one in enumerate(value.items() if isinstance(value, dict) else value):
            yield ", " if number else ""
            if isinstance(value, dict):
                yield from _repr_pieces(one[0])
                yield ": "
                one = one[1]
            yield from _repr_pieces(one)
        yield ",)" if isinstance(value, tuple) and len(value) == 1 else closing


class SafeText:
    """A text of the record that the template calls safe: it is written as it is, and nothing else is followed.

    Jinja escapes what is added to such a text.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        """`text` is traced."""
        self._text = text

    def _unfollowed(self, *_: Any) -> Any:
        raise OriginLost("a text of the record is called safe, and then changed or compared")


for _name in (
    "eq",
    "hash",
    "bool",
    "len",
    "iter",
    "contains",
    "getitem",
    "repr",
    "str",
    "format",
    "add",
    "radd",
    "mod",
):
    setattr(SafeText, f"__{_name}__", SafeText._unfollowed)


def written_as_json(value: Any, options: dict[str, Any]) -> str:
    """A value as `json.dumps` writes it, with the origin of all its parts."""
    if isinstance(value, TracedDict | TracedList):
        text = json.dumps(value._raw, **options)
        return made_of(text, ("json", tuple(sorted(options.items())), value._path), value._notes)
    if isinstance(value, TracedNumber):
        return made_of(json.dumps(value._raw, **options), ("json", (), value._path), value._notes)
    if isinstance(value, Traced):
        return _json_string(value, bool(options.get("ensure_ascii")))
    if isinstance(value, Measure):
        value._note_value()
        return json.dumps(value, **options)
    if isinstance(value, dict | list | tuple) and may_hold(value):
        return joined(_json_pieces(value, options, 0))
    return json.dumps(value, **options)


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
            pieces.append(made_of(escaped, ("apply", "json_string", (ascii_only,), expression), text._notes))
    return joined([*pieces, '"'])
