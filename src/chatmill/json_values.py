"""Decodes the JSON of records so that nothing of it is lost: what a decoder would drop or change is an error.

A key that stands twice in an object is one (a decoder keeps the last), and so is a number that float64 does not hold
(a decoder makes it infinite, or 0). Keys are compared as the texts they are, however they are spelled.
"""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import numpy as np

from chatmill.core.native.scan import is_exact_json
from chatmill.errors import RecordError

TOO_DEEP = "the JSON is nested too deeply"
MAX_NESTING = 500
"""Levels of JSON, whatever version of Python decodes it and however deep its own calls are; real records have ten."""
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def decoded(data: bytes) -> Any:
    """The value of JSON, or a `RecordError`; what the fast decoder refuses is read again, for the reason."""
    if is_too_deep(data):
        raise RecordError(TOO_DEEP, code="invalid_json")
    try:
        value = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        value = decoded_slowly(data, error)
    if not is_exact_json(data):  # compiled code is not sure
        _refuse_inexact(data)
    return value


def decoded_text(text: str) -> Any:
    """The value of JSON that a record has as a text, or a `RecordError`."""
    return decoded(text.encode(errors="surrogatepass"))


def decoded_slowly(data: bytes, error: Exception) -> Any:
    """Decode lone surrogates, as the standard library does, so that the check of the texts can name them."""
    try:
        return json.loads(data.rstrip().decode(), parse_constant=refuse_constant)
    except UnicodeDecodeError as broken:
        byte, code = broken.object[broken.start], "not_utf8"
        message = f"not UTF-8: byte 0x{byte:02X} at byte {broken.start} of the line"
    except RecursionError:
        message, code = TOO_DEEP, "invalid_json"
    except ValueError as invalid:
        message, code = f"not JSON: {invalid or error}", "invalid_json"
    raise RecordError(message, code=code)


def is_too_deep(data: bytes) -> bool:
    """Return whether JSON has more levels than the limit."""
    if data.count(b"[") + data.count(b"{") <= MAX_NESTING:
        return False
    outside = b"".join(data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])  # of strings
    brackets = np.frombuffer(outside.translate(None, _NO_BRACKETS), dtype=np.uint8)
    depths = np.cumsum(np.where((brackets == ord("[")) | (brackets == ord("{")), 1, -1))
    return int(depths.max(initial=0)) > MAX_NESTING


def refuse_constant(name: str) -> Any:
    """Refuse `NaN` and the like, which the standard library takes for JSON."""
    raise ValueError(f"{name} is not a JSON value")


class _Members(list[tuple[str, Any]]):
    """The members of an object, as they are written."""


class _Beyond(str):
    """A number that float64 does not hold, as it is written."""

    __slots__ = ()


def _number(text: str) -> float | _Beyond:
    value = float(text)
    is_lost = value == 0 and any(digit in "123456789" for digit in text.lower().partition("e")[0])
    return _Beyond(text) if is_lost or math.isinf(value) else value


def _refuse_inexact(data: bytes) -> None:
    """Raise the error of the first key that stands twice, or number that float64 does not hold, if there is one."""
    value = json.loads(data.decode(), object_pairs_hook=_Members, parse_float=_number)
    waiting: list[tuple[Any, str]] = [(value, "")]  # values and their places, the next one last
    while waiting:
        value, path = waiting.pop()
        inner: list[tuple[Any, str]] = []
        if isinstance(value, _Beyond):
            message = f"the number {value[:40]} is beyond what float64 holds, and would become {float(value)}"
            raise RecordError(message, code="number_range", path=path)
        if isinstance(value, _Members):
            _refuse_repeated([key for key, _ in value], path)
            inner = [(member, _joined(path, key)) for key, member in value]
        elif isinstance(value, list):
            inner = [(item, f"{path}[{number}]") for number, item in enumerate(value)]
        waiting += reversed(inner)


def _refuse_repeated(keys: list[str], path: str) -> None:
    """Raise an error if one of the keys of an object, whose place is `path`, stands there twice."""
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            message = f"the key {key!r} is there twice, and only one of the two could be kept"
            raise RecordError(message, code="duplicate_key", path=_joined(path, key))
        seen.add(key)


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
