"""The form of JSON files: what each key must hold, checked once when a file is read, with one clear error."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chatmill.errors import FormatError
from chatmill.store.names import is_inner_path, is_split_name

_HEX = re.compile(r"[0-9a-f]*")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value that holds no further ones."""

    words: str
    """What is needed, for the error."""
    fits: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Maybe:
    """Null, or a value of this form."""

    form: Any


def _hex(name: str, digits: int) -> Leaf:
    def fits(value: Any) -> bool:
        return isinstance(value, str) and len(value) == digits and _HEX.fullmatch(value) is not None

    return Leaf(f"{name} of {digits} hex digits", fits)


TEXT = Leaf("a text", lambda value: isinstance(value, str))
COUNT = Leaf("a whole number, 0 or more", lambda value: type(value) is int and 0 <= value < 2**63)
NUMBER = Leaf("a number", lambda value: type(value) in (int, float))
FLAG = Leaf("true or false", lambda value: isinstance(value, bool))
OBJECT = Leaf("an object", lambda value: isinstance(value, dict))
TEXTS = Leaf("a list of texts", lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value))
SHA256, XXH128 = _hex("a sha256", 64), _hex("an xxh128", 32)
SPLIT = Leaf("the plain name of a split", is_split_name)
PATH = Leaf("a path inside of the folder", is_inner_path)
FILE_OF_OTHERS = {"bytes": COUNT, "sha256": SHA256}
FILE = {"bytes": COUNT, "xxh128": XXH128}
"""The record of a file of a dataset; those that come from others or go to them have sha256."""


def check_form(value: Any, form: Any, where: str, place: str = "") -> None:
    """Raise a `FormatError` about the first value of `where` that does not have its form.

    A form is a `Leaf`, a `Maybe`, a list with the one form of all entries, or an object of forms. In an
    object a key with `?` behind it may be missing, and keys that the form does not have are left alone; a `Leaf` as the
    only key matches all keys that fit it.
    """
    if isinstance(form, Leaf):
        if not form.fits(value):
            raise _refused(where, place, value, form.words)
    elif isinstance(form, Maybe):
        if value is not None:
            check_form(value, form.form, where, place)
    elif isinstance(form, list):
        if not isinstance(value, list):
            raise _refused(where, place, value, "a list")
        for number, entry in enumerate(value):
            check_form(entry, form[0], where, f"{place}[{number}]")
    elif not isinstance(value, dict):
        raise _refused(where, place, value, "an object")
    else:
        for key, inner in form.items():
            if isinstance(key, Leaf):
                _check_named(value, key, inner, where, place)
                continue
            name = key.removesuffix("?")
            inside = f"{place}.{name}" if place else name
            if name in value:
                check_form(value[name], inner, where, inside)
            elif not key.endswith("?"):
                raise FormatError(f"{where} lacks {inside}: the file was edited or damaged, or is of another kind")


def _check_named(value: dict[str, Any], keys: Leaf, form: Any, where: str, place: str) -> None:
    for key, inner in value.items():
        if not keys.fits(key):
            raise _refused(where, f"a key of {place}", key, keys.words)
        check_form(inner, form, where, f"{place}[{key!r}]")


def _refused(where: str, place: str, value: Any, needed: str) -> FormatError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return FormatError(
        f"{where}: {place or 'the whole'} is {shown}; {needed} is needed: the file was edited or damaged"
    )
