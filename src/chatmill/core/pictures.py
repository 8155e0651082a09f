"""Pictures of records: the parts that people write for them, and the field that holds them in order."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from chatmill.errors import RecordError

if TYPE_CHECKING:
    from chatmill.core.conversation import Message

PICTURE_PARTS = frozenset({"image", "image_url", "input_image"})
PICTURE_FIELDS = ("images", "image")
"""Fields of records that hold pictures in order."""
MARK = "<image>"
"""Stands for a picture in the text of records that have such a field and no parts."""


class Picture(NamedTuple):
    """A picture of a message: where it is, as the record writes it, or its bytes where the record holds them."""

    place: str = ""
    data: bytes = b""

    def __repr__(self) -> str:
        return f"Picture({self.place or f'{len(self.data):,} bytes'})"


NEXT = Picture()
"""A part without a picture of its own: the next one of the record's field."""


def picture_of_part(part: Mapping[str, Any], path: str) -> Picture:
    """The picture of a part of a content; `NEXT` where the part names none."""
    for key in ("image_url", "image", "source", "path", "url", "value"):
        if part.get(key) is not None:
            return _picture(part[key], f"{path}.{key}")
    return NEXT


def _picture(value: object, path: str) -> Picture:
    if isinstance(value, bytes) and value:
        return Picture(data=value)
    if isinstance(value, str) and value:
        return _of_text(value, path)
    if isinstance(value, Mapping):
        if value.get("type") == "base64" and isinstance(value.get("data"), str):
            return Picture(data=_decoded(value["data"], path))
        for key in ("bytes", "path", "url", "data"):
            if value.get(key) is not None:
                return _picture(value[key], f"{path}.{key}")
    raise RecordError(
        "no picture: it must be a path, a data: URL, bytes, or an object with 'url', 'path', 'bytes' or base64 'data'",
        code="bad_image",
        path=path,
    )


def _of_text(text: str, path: str) -> Picture:
    if text[:5].lower() != "data:":
        return Picture(text)
    about, comma, data = text.partition(",")
    if not comma or not about.lower().endswith(";base64"):
        raise RecordError("a data: URL of a picture must be base64", code="bad_image", path=path)
    return Picture(data=_decoded(data, path))


def _decoded(text: str, path: str) -> bytes:
    try:
        found = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        found = b""
    if not found:
        raise RecordError("the picture is not valid base64", code="bad_image", path=path)
    return found


def with_pictures(messages: Sequence[Message], record: Mapping[str, Any]) -> tuple[Message, ...]:
    """Put the pictures of a record's field into the places that its messages have for them, in order."""
    field = next((name for name in PICTURE_FIELDS if record.get(name)), "")
    given = record[field] if field else []
    listed = given if isinstance(given, list | tuple) else [given]
    pictures = [_picture(one, f"{field}[{number}]") for number, one in enumerate(listed)]
    if pictures and not any(message.parts for message in messages):
        messages = [_marked(message) for message in messages]
    places = sum(part == NEXT for message in messages for part in message.parts)
    if places != len(pictures):
        raise RecordError(
            f"the record has {len(pictures)} pictures in {field or PICTURE_FIELDS[0]!r} and its messages have {places} "
            f"places for them (parts of type 'image', or {MARK} in texts)",
            code="images_differ",
            path=field,
        )
    if not places:
        return tuple(messages)
    left = iter(pictures)
    return tuple(
        message._replace(parts=tuple(next(left) if part == NEXT else part for part in message.parts))
        for message in messages
    )


def _marked(message: Message) -> Message:
    """A message whose text has marks, as parts."""
    texts = message.content.split(MARK)
    if len(texts) == 1:
        return message
    parts: list[str | Picture] = [texts[0]]
    for text in texts[1:]:
        parts += [NEXT, text]
    return message._replace(content="", parts=tuple(part for part in parts if part != ""))
