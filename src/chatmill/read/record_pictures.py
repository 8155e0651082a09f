"""Puts the pictures of a record's field into the places that its messages have for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chatmill.core.conversation import Message
from chatmill.core.part_training import part_error
from chatmill.core.pictures import MARK, NEXT, PICTURE_FIELDS, Picture, picture_of
from chatmill.core.words import counted
from chatmill.errors import RecordError


def with_pictures(messages: Sequence[Message], record: Mapping[str, Any]) -> tuple[Message, ...]:
    """Put the pictures of a record's field into the places that its messages have for them, in order."""
    field = next((name for name in PICTURE_FIELDS if record.get(name)), "")
    value = record[field] if field else []
    listed = value if isinstance(value, list | tuple) else [value]
    pictures = [picture_of(picture, f"{field}[{number}]") for number, picture in enumerate(listed)]
    if pictures and not any(message.parts for message in messages):
        messages = [_marked(message) for message in messages]
    places = sum(part == NEXT for message in messages for part in message.parts)
    if places != len(pictures):
        raise RecordError(
            f"the record has {counted(len(pictures), 'picture')} in {field or PICTURE_FIELDS[0]!r}, and its messages "
            f"have {counted(places, 'place')} for pictures (parts of type 'image', or {MARK} in texts)",
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
    """Return a message whose text has marks, as parts."""
    texts = message.content.split(MARK)
    if len(texts) == 1:
        return message
    if message.spans:
        raise part_error(
            "parts of a message with images have no weights of their own: give the message a 'weight', or put the "
            "images into a message of their own",
            "messages",
        )
    parts: list[str | Picture] = [texts[0]]
    for text in texts[1:]:
        parts += [NEXT, text]
    return message._replace(content="", parts=tuple(part for part in parts if part != ""))
