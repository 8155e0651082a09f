"""The one JSON spelling of a value, made for hashing."""

from __future__ import annotations

import json

from chatmill.errors import DataError


def canonical_json(value: object) -> bytes:
    """The one JSON spelling of a value: keys sorted, no spaces, ASCII, no newline at the end; made for hashing."""
    _check_keys(value, "")
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except ValueError as error:
        raise DataError(f"no canonical JSON for this value: {error}") from error
    return text.encode("ascii")


def _check_keys(value: object, place: str) -> None:
    """Keys must be strings: others would be turned into strings after sorting, and could collide."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise DataError(f"no canonical JSON: the key {key!r} at {place or 'the top'} is not a string")
            _check_keys(item, f"{place}.{key}" if place else key)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _check_keys(item, f"{place}[{number}]")
