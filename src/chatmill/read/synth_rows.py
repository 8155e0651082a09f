"""Rows of the Harmony distillation dataset (SYNTH KD v1): `synth_id` and `messages_json`, with rules of their own.

A row has a `synth_id`, which decides its split, and at least one assistant message; its roles and channels are those of
the dataset, spelled as there. What the compiled scanner declines is read here, and every refusal says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Message, Role
from chatmill.core.kinds import RoleCode
from chatmill.core.message_parser import is_encodable
from chatmill.core.messages import CODES, MessageColumns
from chatmill.core.native.scan import MessageField, RecordField, ShapeNames
from chatmill.core.native.text_ranges import distinct
from chatmill.errors import RecordError
from chatmill.json_values import decoded_text

ID, TEXT = "synth_id", "messages_json"
ROLES = ("system", "developer", "user", "assistant")
SPANS = {"analysis": 1, "final": 2}
"""Channels of assistant messages, and the span id of their tokens."""
_FIELDS = ("name", "recipient", "channel", "content_type")
_ROLE_OF_CONTENT = {"system_content": "system", "developer_content": "developer"}
"""The role that a Harmony content belongs to."""


@cache
def scanned_names() -> ShapeNames:
    """Return what the scanner has to know: fewer names than other files may have, and no other spelling."""
    message = {"role": MessageField.ROLE, "content": MessageField.ONE_CONTENT}
    message |= {name: MessageField[name.upper()] for name in _FIELDS}
    return ShapeNames({"messages": RecordField.LIST}, message, {name: RoleCode(CODES[Role(name)]) for name in ROLES})


def keep_rules(messages: MessageColumns, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which conversations have an assistant message, and every one of them in a known channel."""
    is_assistant, channels = messages.roles == RoleCode.ASSISTANT, messages.channels
    places = np.flatnonzero(is_assistant & channels.present)
    which, firsts = distinct(channels.data, channels.starts[places], channels.lengths[places])
    is_known = np.zeros(len(messages), dtype=np.bool_)
    is_known[places] = np.array([channels[place] in SPANS for place in places[firsts].tolist()], dtype=np.bool_)[which]
    owners = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    kept = np.zeros(len(offsets) - 1, dtype=np.bool_)
    kept[owners[is_assistant]] = True
    kept[owners[is_assistant & ~is_known]] = False
    return kept


def row_messages(record: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return the messages of a row, read by Python."""
    if not record.get(ID):
        raise RecordError("the row has no synth_id, which decides its split", code="no_synth_id", path=ID)
    messages = checked_messages(record.get(TEXT))
    return tuple(_message(message, f"messages[{number}]") for number, message in enumerate(messages))


def checked_messages(text: str | None) -> Sequence[Mapping[str, Any]]:
    """Return the messages in the JSON of a row, with the rules of the dataset checked; contents are not looked at."""
    if text is None:
        raise RecordError("the row has no messages_json", code="no_messages", path=TEXT)
    try:
        record = decoded_text(text)
    except RecordError as error:
        raise RecordError(error.message, code=error.code, path=TEXT) from None
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise RecordError("the row has no messages", code="no_messages", path="messages")
    for number, message in enumerate(messages):
        _check_message(message, f"messages[{number}]")
    if not any(message["role"] == "assistant" for message in messages):
        raise RecordError("the row has no assistant message", code="no_assistant", path="messages")
    return messages


def _check_message(message: Any, path: str) -> None:
    """Role and channel of a message are among those of the dataset."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        message = f"role {role!r}; this dataset has: {', '.join(ROLES)}"
        raise RecordError(message, code="unknown_role", path=f"{path}.role")
    if role == "assistant" and message.get("channel") not in tuple(SPANS):
        raise RecordError(
            f"assistant message in channel {message.get('channel')!r}; this dataset has: {', '.join(SPANS)}",
            code="unknown_channel",
            path=f"{path}.channel",
        )


def _message(message: Mapping[str, Any], path: str) -> Message:
    """Return a checked message; fields that Harmony does not know are not read, as its own library does not."""
    content: Any = message.get("content")
    structured: Mapping[str, Any] | None = None
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if len(parts) > 1:
        text = f"{len(parts)} contents, which Harmony encodes one by one: join them into one text"
        raise RecordError(text, code="several_contents", path=f"{path}.content")
    part = (parts or [{"type": "text", "text": ""}])[0]
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _ROLE_OF_CONTENT and _ROLE_OF_CONTENT[kind] == message["role"]:
        content, structured = "", part
    else:
        content = part.get("text") if kind == "text" else None
    fields: dict[str, Any] = {name: message[name] for name in _FIELDS if message.get(name) is not None}
    for name, value in {"content": content, **fields}.items():
        if not isinstance(value, str) or not is_encodable(value):
            text = "no text that the Harmony renderer takes"
            raise RecordError(text, code="harmony_refused", path=f"{path}.{name}")
    return Message(Role(message["role"]), content, structured=structured, **fields)
