"""Values of files and options, checked by the types of msgspec: one clear error with the path of the key.

Recipes, training configs and manifests are all read this way.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from chatmill.errors import ChatmillError, ConfigError

WORDS = {
    "array": "a list", "object": "a mapping", "int": "a whole number", "float": "a number", "bool": "true or false",
    "str": "a text",
}  # fmt: skip
COMPARED = {">=": "of at least", ">": "above", "<=": "of at most", "<": "below"}
"""What kinds of values and comparisons are called in errors."""
_PLAIN = r"(?!\.{1,2}(?:/|\Z))[^/\\\0]+"
_SHA256, _XXH128, _NAME = r"\A[0-9a-f]{64}\Z", r"\A[0-9a-f]{32}\Z", rf"\A{_PLAIN}\Z"
_EMPTY = rf"\A(?:{_PLAIN})?\Z"
_SPLIT, _PATH = rf"\A(?!\.){_PLAIN}\Z", rf"\A{_PLAIN}(?:/{_PLAIN})*\Z"
TEXTS = {
    _SHA256: "a sha256 of 64 hex digits", _XXH128: "an xxh128 of 32 hex digits", _NAME: "a plain file name",
    _EMPTY: "a plain file name, or empty",
    _SPLIT: "the plain name of a split", _PATH: "a path inside of the folder",
}  # fmt: skip
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Sha256 = Annotated[str, Meta(pattern=_SHA256)]
Xxh128 = Annotated[str, Meta(pattern=_XXH128)]
PlainName = Annotated[str, Meta(pattern=_NAME)]
"""One file or folder: not empty, no separator of any system, no NUL, not dots alone."""
NameOrEmpty = Annotated[str, Meta(pattern=_EMPTY)]
SplitName = Annotated[str, Meta(pattern=_SPLIT)]
"""A plain name that is not hidden."""
InnerPath = Annotated[str, Meta(pattern=_PATH)]
"""A path, with `/`, of a file below the folder it is relative to."""


def typed(kind: Any, value: Any, place: str, *, text: bool = False, error: type[ChatmillError] = ConfigError) -> Any:
    """Convert a value to a type; one that does not fit is an error that names `place` and the path inside it.

    With `text` numbers and flags may be written as text, as in XML.
    """
    try:
        return msgspec.convert(value, kind, strict=not text)
    except msgspec.ValidationError as wrong:
        raise error(f"{place}: {mistake(str(wrong), kind, value)}") from None


def mistake(said: str, kind: Any, value: Any, name: str = "") -> str:
    """Describe what is wrong with a value, from msgspec's message: the path, what is expected, and what was found.

    `name` is the key of the value itself.
    """
    said, _, path = said.replace("`", "").partition(" - at ")
    place = path.replace("$.", f"{name}." if name else "").replace("$", name) if path else name
    is_found = not path.startswith("key in ")
    for key, index in re.findall(r"\.([\w-]+)|\[(\d+|\.\.\.)\]", path):
        is_found = is_found and index != "..."  # of the values of a mapping msgspec does not say which
        if key:
            kind = _fields(kind)[key]
        if is_found:
            value = value[key or int(index)]
    unknown, missing = "Object contains unknown field ", "Object missing required field "
    if said.startswith((unknown, missing)):
        key = said.removeprefix(unknown).removeprefix(missing)
        full = f"{place}.{key}" if place else key
        return unknown_key(full, key, _fields(kind)) if said.startswith(unknown) else f"{full!r} is missing"
    words = wanted(said, kind)
    shown = f" (found {_short(value)})" if is_found and words != said else ""
    return f"{place}: {words}{shown}" if place else f"{words}{shown}"


def _fields(kind: Any) -> dict[str, Any]:
    """Find the field types of the struct in a type."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    return next((fields for part in get_args(kind) if (fields := _fields(part))), {})


def fits(kind: Any, value: Any) -> bool:
    """Return whether a value is of a type."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def unknown_key(place: str, name: str, names: Iterable[str]) -> str:
    """Describe an unknown key, and suggest the closest known one."""
    close = difflib.get_close_matches(name, list(names), n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
    return f"unknown key {place!r}, {hint}"


def misspelt(name: str, names: Iterable[str]) -> str | None:
    """Find the name that `name` misspells: nearly the same letters, ignoring case, `_` and `-`."""
    plain = {key.lower().replace("_", ""): key for key in names}
    close = difflib.get_close_matches(name.lower().replace("_", "").replace("-", ""), plain, n=1, cutoff=0.9)
    return plain[close[0]] if close else None


def wanted(said: str, kind: Any) -> str:
    """Describe what a value should be; `said` is msgspec's message, `kind` the type that the value does not fit."""
    for pattern, words in TEXTS.items():
        if said == f"Expected str matching regex {pattern!r}":
            return f"should be {words}"
    if said.startswith("Invalid enum value"):
        *others, last = map(repr, _choices(kind))
        return f"should be {', '.join(others)}{' or ' if others else ''}{last}"
    if said.startswith("Invalid RFC3339"):
        return "should be a date, such as 2026-01-31"
    match = re.fullmatch(r"Expected ([a-z |]+?)(?:, got \w+|( of length >= 1)|(?: ([<>]=?) (\S+)))?", said)
    if match is None:
        return said
    kinds, not_empty, sign, limit = match.groups()
    words = " or ".join(WORDS.get(word, word) for word in kinds.split(" | ") if word != "null")
    if not_empty:
        return f"should be {words} that is not empty"
    if sign and float(limit) == sys.float_info.max:
        return "should be a finite number"
    return f"should be {words} {COMPARED[sign]} {limit}" if sign else f"should be {words}"


def _choices(kind: Any) -> list[str]:
    """List the choices of an enumeration or of literals."""
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return [str(part) for part in kind]
    return [text for part in get_args(kind) for text in ([part] if isinstance(part, str) else _choices(part))]
