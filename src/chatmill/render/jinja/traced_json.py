"""`tojson` on traced values: the text of `json.dumps`, with the origin of all its parts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from chatmill.render.jinja.traced import RecordValue, Traced, joined, made_of
from chatmill.render.jinja.traced_values import TracedDict, TracedList, TracedNumber


def written_as_json(value: Any, options: dict[str, Any]) -> str:
    """A value as `json.dumps` writes it, with the origin of all its parts."""
    if isinstance(value, TracedDict | TracedList):
        text = json.dumps(value._raw, **options)
        return made_of(text, ("json", tuple(sorted(options.items())), value._path), value._notes)
    if isinstance(value, TracedNumber):
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
    if isinstance(value, Traced | RecordValue):
        return True
    if isinstance(value, dict):
        return any(_holds_traced(one) for pair in value.items() for one in pair)
    return isinstance(value, list | tuple) and any(_holds_traced(one) for one in value)
