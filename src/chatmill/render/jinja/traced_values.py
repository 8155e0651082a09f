"""Values of a record that are no text: objects, lists and numbers that note what a template asks about them.

`written_as_json` is `tojson` on such values: the text of `json.dumps`, with the origin of all its parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from chatmill.render.jinja.expressions import KEY, SYMBOLS, VALUE, Notes, Path, kind_of_value
from chatmill.render.jinja.traced import (
    SCALARS,
    Measure,
    Noting,
    OriginLost,
    RecordValue,
    Traced,
    do_others,
    field,
    joined,
    made_of,
    may_hold,
    note_exact,
    plain_text,
)


def _noted(self: Any, name: str, *arguments: Any, **named: Any) -> Any:
    """Return what a method or attribute of a number gives; its exact value is noted, and that of every other number."""
    note_exact([self, arguments, named])
    value = getattr(self._raw, name)
    return value(*without_origin(arguments), **without_origin(named)) if callable(value) else value


def _by_value(self: Any, name: str, *arguments: Any, **named: Any) -> Any:
    """Return what a method of an object or list gives that is not followed."""
    result = _noted(self, name, *arguments, **named)
    if type(result) in SCALARS:
        return result
    raise OriginLost(f"{name} of a value of the record")


class TracedLength(Measure):
    """The length of a traced text; a comparison with a number is a question, anything else notes the length."""

    _of: Traced

    def _compare(self, name: str, other: Any) -> bool:
        inner = self._of._single()
        reply: bool = getattr(int, name)(self, other)
        if inner is None or type(other) is not int:
            note_exact([self, other])
            return reply
        return bool(self._of._notes.note(("length", inner, SYMBOLS[name], other), reply))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return bool(self._of)

    def _note_value(self) -> None:
        self._of._exact_length()


do_others(TracedLength, int, TracedLength._compare, SYMBOLS)
do_others(TracedLength, int, _noted)


class TracedNumber(RecordValue):
    """What traced numbers share: a number of the record, which is part of the text it is written into."""

    def __str__(self) -> str:
        return made_of(str(self._raw), ("text", self._path), self._notes)

    def __repr__(self) -> str:
        raise OriginLost("a number of the record is written as Python code")

    def __format__(self, spec: str) -> str:
        raise OriginLost("a number of the record is put into a format")


class TracedInt(TracedNumber, int):
    """A whole number of a record."""


class TracedFloat(TracedNumber, float):
    """A number of a record."""


do_others(TracedInt, int, _noted)
do_others(TracedFloat, float, _noted)


class _Container(RecordValue):
    """What objects and lists share: printed as a whole, their text is one of the record."""

    __slots__ = ()

    def __str__(self) -> str:
        return made_of(str(self._raw), ("text", self._path), self._notes)

    def __repr__(self) -> str:
        raise OriginLost("a value of the record is written inside another one")

    def __bool__(self) -> bool:
        return len(self) > 0

    def __len__(self) -> int:
        return int(self._notes.note(("size", self._path), len(self._raw)))


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
        """Return the keys: texts of the record, known by their numbers, whatever they are."""
        keys = list(self._raw)[: len(self)]
        return [field(key, (*self._path, (KEY, number)), self._notes) for number, key in enumerate(keys)]

    def __getitem__(self, key: Any) -> Any:
        if not self._has(key):
            raise KeyError(key)
        return self._child(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Do as `dict.get` does."""
        return self._child(key) if self._has(key) else default

    def __contains__(self, key: object) -> bool:
        return self._has(key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._keys())

    def __reversed__(self) -> Iterator[Any]:
        return iter(self._keys()[::-1])

    def keys(self) -> Any:
        """Return the keys, as a list."""
        return _Listed(self._keys())

    def values(self) -> Any:
        """Return the values, as a list."""
        values = list(self._raw.values())[: len(self)]
        return _Listed(
            wrapped(value, (*self._path, (VALUE, number)), self._notes) for number, value in enumerate(values)
        )

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

    def __iter__(self) -> Iterator[Any]:
        return iter([self._child(index) for index in range(len(self))])

    def __getitem__(self, key: Any) -> Any:
        size = len(self)
        if isinstance(key, slice):
            return [self._child(index) for index in range(*key.indices(size))]
        index = key.__index__()
        if not -size <= index < size:
            raise IndexError("list index out of range")
        return self._child(index % size)

    def __contains__(self, value: object) -> bool:
        return any(item is value or item == value for item in self)

    def __add__(self, other: Any) -> Any:
        return [*self, *other] if isinstance(other, list) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return [*other, *self] if isinstance(other, list) else NotImplemented


do_others(TracedDict, dict, _by_value)
do_others(TracedList, list, _by_value)


def wrapped(value: Any, path: Path, notes: Notes) -> Any:
    """Return a JSON value of a record as a traced one; its type is noted."""
    notes.note(("type", path), kind_of_value(value))
    if isinstance(value, str):
        return field(value, path, notes)
    if isinstance(value, dict):
        return TracedDict(value, path, notes)
    if isinstance(value, list):
        return TracedList(value, path, notes)
    if value is None or isinstance(value, bool):
        return value
    number = (TracedInt if isinstance(value, int) else TracedFloat)(value)
    number._raw, number._path, number._notes = value, path, notes
    return number


def fixed(value: Any, path: Path, notes: Notes) -> Any:
    """A JSON value that is the same in every record of the shape; its texts are text of the record all the same."""
    if isinstance(value, str):
        return made_of(value, ("const", value, path), notes)
    if isinstance(value, dict):
        return {fixed(key, path, notes): fixed(item, (*path, key), notes) for key, item in value.items()}
    if isinstance(value, list):
        return [fixed(item, (*path, number), notes) for number, item in enumerate(value)]
    return value


def without_origin(value: Any) -> Any:
    """The plain value that a traced one stands for, also inside plain lists and objects; its value is noted before."""
    if isinstance(value, Noting):
        return value._raw
    if type(value) is dict:
        return {without_origin(key): without_origin(item) for key, item in value.items()}
    return type(value)(map(without_origin, value)) if type(value) in (list, tuple) else value


def settled(value: Any) -> Any:
    """A number of the record as a plain one, for code that reads numbers without asking them; its value is noted."""
    value = settled_length(value)
    return value._raw if isinstance(value, TracedNumber) else value


def settled_length(value: Any) -> Any:
    """Return the length of a text as a plain number; of other numbers, which may be handed on, the value is noted."""
    if isinstance(value, Measure | TracedNumber):
        note_exact(value)
    return value._raw if isinstance(value, Measure) else value


def length_of(value: Any) -> int:
    """Return the length of any value; that of a traced text answers comparisons without giving itself away."""
    if not isinstance(value, Traced):
        return len(value)
    length = TracedLength(str.__len__(value))
    length._of = value
    return length


def text_of(value: Any) -> str:
    """Return a value as `str` writes it, with its origin."""
    if isinstance(value, SafeText):
        return str(value._text)
    if type(value) in (dict, list, tuple) and may_hold(value):
        raise OriginLost("a list with texts of the record is printed")
    return str(value)


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


do_others(SafeText, str, SafeText._unfollowed)


def written_as_json(value: Any, options: dict[str, Any]) -> str:
    """Return a value as `json.dumps` writes it, with the origin of all its parts."""
    if isinstance(value, TracedDict | TracedList):
        indent, controls = options.get("indent"), value._notes.controls
        is_indented_by_text = isinstance(indent, str) and controls.may_be_made_of(indent)
        if is_indented_by_text or any(map(controls.are_in, options.get("separators", ()))):
            raise OriginLost("control tokens between the values of JSON")
        text = json.dumps(value._raw, **options)
        return made_of(text, ("json", tuple(sorted(options.items())), value._path), value._notes)
    if isinstance(value, TracedNumber):
        return made_of(json.dumps(value._raw, **options), ("json", (), value._path), value._notes)
    if isinstance(value, Traced):
        return _json_string(value, bool(options.get("ensure_ascii")))
    if isinstance(value, Measure):
        return json.dumps(settled(value), **options)
    if not isinstance(value, dict | list | tuple) or not may_hold(value):
        return json.dumps(value, **options)
    texts: list[str] = []
    frame = json.dumps(_put_aside(value, options, texts), **{**options, "sort_keys": False})
    pieces = re.split(r'"(\d+)"', frame)
    return joined(texts[int(piece)] if place % 2 else piece for place, piece in enumerate(pieces))


def _put_aside(value: Any, options: dict[str, Any], texts: list[str]) -> Any:
    """Return a value in which numbers, as strings, stand for everything but lists and objects: `texts` as JSON."""
    is_laid_out = options.get("indent") is not None  # what a record's own list is written as depends on where it is
    if isinstance(value, list | tuple) and (is_laid_out or not isinstance(value, TracedList)):
        return [_put_aside(item, options, texts) for item in value]
    if isinstance(value, dict) and (is_laid_out or not isinstance(value, TracedDict)):
        pairs = sorted(value.items()) if options.get("sort_keys") else value.items()
        named = ((key if isinstance(key, str) else json.dumps(key), item) for key, item in pairs)
        return {_put_aside(key, options, texts): _put_aside(item, options, texts) for key, item in named}
    texts.append(written_as_json(value, {name: options[name] for name in options if name != "indent"}))
    return str(len(texts) - 1)


def _json_string(text: Traced, ascii_only: bool) -> str:
    """Return a text as a JSON string: JSON writes it character by character, so its atoms are written one by one."""
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
