"""Preference pairs: the chosen answer of a record with `chosen` and `rejected`, as a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from chatmill.core.conversation import Message, Role, checked_text, json_type, parse_messages
from chatmill.errors import RecordError

CHOSEN, REJECTED = "chosen", "rejected"
LISTS, TEXTS = ("messages", "conversations"), ("system", "instruction", "input")
PAIR_FIELDS = (CHOSEN, REJECTED, "prompt", *LISTS, *TEXTS)
"""Fields that such a record may have its messages in."""


def refuse_pairs() -> NoReturn:
    """The error about pairs of which nobody has said what to do with them."""
    raise RecordError(
        "the record holds a pair of answers, 'chosen' and 'rejected', and there is no training on 'rejected' here. "
        "Train on the chosen answers with preferences: chosen (--preferences chosen)",
        code="preference_pair",
        path=CHOSEN,
    )


def chosen_messages(record: Mapping[str, Any]) -> tuple[Message, ...]:
    """The prompt and the chosen answer; a list of messages that has a user message is the whole conversation."""
    if CHOSEN not in record:
        raise RecordError("the record has no 'chosen'", code="missing_field", path=CHOSEN)
    answer = record[CHOSEN]
    if isinstance(answer, str):
        messages: tuple[Message, ...] = (Message(Role.ASSISTANT, checked_text(answer, CHOSEN)),)
    else:
        messages = _listed([answer] if isinstance(answer, Mapping) else answer, CHOSEN)
    if any(message.role is Role.USER for message in messages):
        return messages
    before = _before(record)
    if not before:
        raise RecordError(
            "nothing says what 'chosen' answers: give 'prompt', 'messages', or the whole conversation in 'chosen'",
            code="missing_field",
            path="prompt",
        )
    return (*before, *messages)


def _before(record: Mapping[str, Any]) -> tuple[Message, ...]:
    system = _text(record, "system")
    first = (Message(Role.SYSTEM, system),) if system else ()
    key = next((key for key in LISTS if record.get(key)), None)
    if key is not None:
        return (*first, *_listed(record[key], key))
    prompt = record.get("prompt")
    if isinstance(prompt, list):
        return (*first, *_listed(prompt, "prompt"))
    asked = _text(record, "prompt") or "\n".join(filter(None, (_text(record, name) for name in TEXTS[1:])))
    return (*first, Message(Role.USER, asked)) if asked else ()


def _listed(items: Any, path: str) -> tuple[Message, ...]:
    """Messages with role and content, or with from and value."""
    first = items[0] if isinstance(items, list) and items else None
    if isinstance(first, Mapping) and "from" in first:
        return parse_messages(items, path=path, role_key="from", content_key="value")
    return parse_messages(items, path=path)


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RecordError(f"{key!r} must be a string, found {json_type(value)}", code="missing_field", path=key)
    return checked_text(value, key)
