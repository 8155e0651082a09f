"""What is hashed of a value: all of its fields but those that are left out by name, with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from enum import Enum
from pathlib import PurePath
from typing import Any


def hashed_fields(value: object, left_out: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a value as plain JSON, for hashing; `left_out` says of each other field why it is left out.

    A field that is added later is hashed until somebody writes down why it need not be. Only names and values of fields
    are in the result: no names of classes, and nothing that Python prints.
    """
    names = field_names(value)
    if unknown := sorted(left_out.keys() - set(names)):
        raise ValueError(f"{type(value).__name__} has no field {unknown[0]!r} that could be left out")
    return {name: plain(getattr(value, name)) for name in names if name not in left_out}


def field_names(value: object) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass, a named tuple or a struct of msgspec; empty for other values."""
    for kind in ("__dataclass_fields__", "__struct_fields__", "_fields"):
        if hasattr(type(value), kind):
            return tuple(getattr(type(value), kind))
    return ()


def plain(value: object) -> Any:
    """Return a value as plain JSON; a `TypeError` for one that has no such form."""
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, PurePath | date):
        return str(value)
    if names := field_names(value):
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(inner) for inner in value]
    raise TypeError(f"{type(value).__name__} cannot be hashed: it has no plain form")
