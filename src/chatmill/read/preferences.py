"""Preference pairs: the chosen answer of a record with `chosen` and `rejected`, as a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from chatmill.core.conversation import Message, Role, checked_string, checked_text, parse_messages
from chatmill.errors import RecordError

CHOSEN, REJECTED = "chosen", "rejected"
LISTS, ASKED, JOINED = ("messages", "conversations"), ("prompt", "question"), ("instruction", "input")
PAIR_FIELDS = (CHOSEN, REJECTED, "system", *LISTS, *ASKED, *JOINED)
"""Fields that such a record may have its messages in."""


def refuse_pairs(record: Mapping[str, Any]) -> NoReturn:
    """The error about pairs of which nobody has said what to do with them; see the shape `chosen`."""
    raise RecordError(
        "the record holds a pair of answers, 'chosen' and 'rejected', and there is no training on 'rejected' here. "
        "Train on the chosen answers with preferences: chosen (--set preferences=chosen)",
        code="preference_pair",
        path=CHOSEN,
    )


def chosen_messages(record: Mapping[str, Any]) -> tuple[Message, ...]:
    """The prompt and the chosen answer; a list of messages that begins with a user's is the whole conversation."""
    if CHOSEN not in record:
        raise RecordError("the record has no 'chosen'", code="missing_field", path=CHOSEN)
    answer = record[CHOSEN]
    if isinstance(answer, str):
        messages: tuple[Message, ...] = (Message(Role.ASSISTANT, checked_text(answer, CHOSEN)),)
    else:
        messages = _listed([answer] if isinstance(answer, Mapping) else answer, CHOSEN)
    prompts = dict(_prompts(record))
    first = next((message for message in messages if message.role not in (Role.SYSTEM, Role.DEVELOPER)), messages[0])
    if first.role is not Role.USER:
        if not prompts:
            raise RecordError(
                "nothing says what 'chosen' answers: give 'prompt', 'messages', or the whole conversation in 'chosen'",
                code="missing_field",
                path="prompt",
            )
        key = next(iter(prompts))
        messages = (*prompts.pop(key), *messages)
    for key, prompt in prompts.items():
        _refuse_another(key, prompt, messages)
    system = _text(record, "system")
    return behind_system((Message(Role.SYSTEM, system),) if system else (), messages)


def _prompts(record: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Message, ...]]]:
    """What the record says that `chosen` answers, by the field that says it."""
    for key in (*LISTS, *ASKED):
        given = record.get(key)
        if given and (key in LISTS or isinstance(given, list)):
            yield key, _listed(given, key)
        elif text := _text(record, key):
            yield key, (Message(Role.USER, text),)
    if text := "\n".join(filter(None, (_text(record, name) for name in JOINED))):
        yield JOINED[0], (Message(Role.USER, text),)


def _refuse_another(key: str, prompt: tuple[Message, ...], messages: tuple[Message, ...]) -> None:
    """A second prompt is fine where it only repeats what is in the conversation."""
    there = {(message.role, message.content.strip()) for message in messages}
    if any((message.role, message.content.strip()) not in there for message in prompt):
        raise RecordError(
            f"{key!r} has messages that are not in the conversation which the other fields give; keep one of the two",
            code="prompt_twice",
            path=key,
        )


def behind_system(turns: tuple[Message, ...], listed: tuple[Message, ...]) -> tuple[Message, ...]:
    """Turns, then the list; a system message that both have is there once, and two different ones are refused."""
    if not turns or turns[-1].role is not Role.SYSTEM or listed[0].role is not Role.SYSTEM:
        return (*turns, *listed)
    if turns[-1].content != listed[0].content:
        raise RecordError(
            "the record has a system text, and its list of messages begins with another one; keep one",
            code="system_twice",
            path="system",
        )
    return (*turns[:-1], *listed)


def _listed(items: Any, path: str) -> tuple[Message, ...]:
    """Messages with role and content, or with from and value."""
    first = items[0] if isinstance(items, list) and items else None
    if isinstance(first, Mapping) and "from" in first:
        return parse_messages(items, path=path, role_key="from", content_key="value")
    return parse_messages(items, path=path)


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    return "" if value is None else checked_string(value, repr(key), code="missing_field", path=key)
