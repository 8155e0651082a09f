"""What records look like: the questions by which detection tells their shapes apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chatmill.core.conversation import HARMONY_PARTS
from chatmill.read.files import decode_line

Record = Mapping[str, Any]


def listed(record: Record, key: str) -> list[Any]:
    """The list in a field, also one that is a text of JSON; empty where there is none."""
    found = record.get(key)
    if isinstance(found, str) and found.lstrip().startswith("["):
        found = decode_line(found.encode(errors="surrogatepass"), "").value
    return found if isinstance(found, list) else []


def first_message(record: Record, key: str) -> Mapping[str, Any]:
    """The first message of a list; empty where there is none."""
    found = listed(record, key)
    return found[0] if found and isinstance(found[0], Mapping) else {}


def is_harmony(record: Record) -> bool:
    """Messages with channels or Harmony contents."""
    if isinstance(record.get("messages_json"), str):
        return True
    return any(
        isinstance(m, Mapping) and ("channel" in m or _has_harmony_part(m.get("content")))
        for m in listed(record, "messages")
    )


def is_openai(record: Record) -> bool:
    """A list of messages, or one whose first message has a role."""
    if isinstance(record.get("messages"), list):
        return True
    return "role" in first_message(record, "messages") or "role" in first_message(record, "conversations")


def _has_harmony_part(content: object) -> bool:
    return isinstance(content, list) and any(
        isinstance(part, Mapping) and part.get("type") in list(HARMONY_PARTS) for part in content
    )
