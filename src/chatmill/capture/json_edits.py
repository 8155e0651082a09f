"""Edit JSON text in place, byte for byte."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from chatmill.errors import RecordError

BLANKS = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


class Removal(StrEnum):
    """The remains of a removed member."""

    NULL = "null"
    """The member with `null`."""
    NOTHING = "nothing"
    """No member."""


class Member(NamedTuple):
    """One member of an object or item of a list.

    Items have no key. Positions are offsets into the text.
    """

    key: str
    start: int
    value_start: int
    stop: int


Edit = tuple[int, int, str]
"""Start and end of a piece of the text, and what replaces it."""


def add_member(text: str, key: str, value: str) -> str:
    """Insert a member at the beginning of an object."""
    start = _skip_blanks(text, 0)
    _expect(text, start, "{")
    is_empty = text[_skip_blanks(text, start + 1)] == "}"
    separator = "" if is_empty else ","
    return f"{text[: start + 1]}{json.dumps(key)}:{value}{separator}{text[start + 1 :]}"


def members(text: str, start: int) -> list[Member]:
    """List the members or items of the value at an offset.

    Raises:
        RecordError: The text is no JSON there, or neither an object nor a list.
    """
    try:
        return list(_iterate_members(text, start))
    except (ValueError, IndexError, RecursionError) as error:
        raise RecordError(f"not JSON: {error}", code="invalid_json") from None


def remove_members(text: str, found: list[Member], keys: frozenset[str], removal: Removal) -> list[Edit]:
    """Build the edits for removing members of one object.

    Args:
        text: The JSON.
        found: All members of one object, in order.
        keys: Names of the members to take out.
        removal: What stays in their place.
    """
    if removal is Removal.NULL:
        return [(one.value_start, one.stop, "null") for one in found if one.key in keys and not _is_null(text, one)]

    edits: list[Edit] = []
    has_kept = False
    for index, one in enumerate(found):
        if one.key not in keys:
            has_kept = True
        elif has_kept:
            # The comma before it goes with it.
            edits.append((found[index - 1].stop, one.stop, ""))
        elif index + 1 < len(found):
            edits.append((one.start, found[index + 1].start, ""))
        else:
            edits.append((one.start, one.stop, ""))
    return edits


def apply_edits(text: str, edits: list[Edit]) -> str:
    """Apply edits without overlaps."""
    pieces: list[str] = []
    position = 0
    for start, stop, replacement in sorted(edits):
        pieces += [text[position:start], replacement]
        position = stop
    pieces.append(text[position:])
    return "".join(pieces)


def _is_null(text: str, member: Member) -> bool:
    return text[member.value_start : member.stop] == "null"


def _iterate_members(text: str, start: int) -> Iterator[Member]:
    position = _skip_blanks(text, start)
    is_object = text[position] == "{"
    if not is_object:
        _expect(text, position, "[")
    position = _skip_blanks(text, position + 1)
    if text[position] == ("}" if is_object else "]"):
        return

    while True:
        member_start = position
        key = ""
        if is_object:
            _expect(text, position, '"')
            key, position = _DECODER.raw_decode(text, position)
            position = _skip_blanks(text, position)
            _expect(text, position, ":")
            position = _skip_blanks(text, position + 1)
        value_start = position
        _, position = _DECODER.raw_decode(text, position)
        yield Member(key, member_start, value_start, position)

        position = _skip_blanks(text, position)
        if text[position] != ",":
            _expect(text, position, "}" if is_object else "]")
            return
        position = _skip_blanks(text, position + 1)


def _skip_blanks(text: str, position: int) -> int:
    match = BLANKS.match(text, position)
    return position if match is None else match.end()


def _expect(text: str, position: int, character: str) -> None:
    if text[position] != character:
        raise ValueError(f"expected {character} at character {position}")
