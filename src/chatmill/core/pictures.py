"""Pictures of records: the parts that people write for them, and the values that hold them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, NamedTuple

from chatmill.errors import RecordError

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
    """Return the picture of a part of a content; `NEXT` where the part names none."""
    for key in ("image_url", "image", "source", "path", "url", "value"):
        if part.get(key) is not None:
            return picture_of(part[key], f"{path}.{key}")
    return NEXT


def picture_of(value: object, path: str) -> Picture:
    """Return the picture that a value of a record is; `path` is its place there."""
    if isinstance(value, bytes) and value:
        return Picture(data=value)
    if isinstance(value, str) and value:
        return _of_text(value, path)
    if isinstance(value, Mapping):
        if value.get("type") == "base64" and isinstance(value.get("data"), str):
            return Picture(data=_decoded(value["data"], path))
        for key in ("bytes", "path", "url", "data"):
            if value.get(key) is not None:
                return picture_of(value[key], f"{path}.{key}")
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
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if not data:
        raise RecordError("the picture is not valid base64", code="bad_image", path=path)
    return data
