"""What is trained of a record, and after which history, by the slow, obvious path: one message at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from chatmill.compiler.histories import History
from chatmill.core.conversation import Conversation, Message, Role
from chatmill.label.errors import ErrorRule


def without_failed(conversation: Conversation, rule: ErrorRule) -> Conversation:
    """Return a record in which no answer is trained that made a call with an error."""
    messages = list(conversation.messages)
    for place, result in enumerate(conversation.messages):
        has_field = any(
            result.extra.get(name) == value and isinstance(result.extra.get(name), bool) == isinstance(value, bool)
            for name, value in rule.fields.items()
        )
        is_error = has_field or any(result.content.startswith(text) for text in rule.begins)
        callers = [k for k in range(place) if messages[k].tool_calls]
        if result.role is not Role.TOOL or not is_error or not callers:
            continue
        named = [k for k in callers if result.tool_call_id in [call.id for call in messages[k].tool_calls]]
        caller = named[-1] if named and result.tool_call_id is not None else callers[-1]
        if messages[caller].weight != 0:
            messages[caller] = messages[caller]._replace(weight=0.0)
    return conversation._replace(messages=tuple(messages))


class Variant(NamedTuple):
    """A conversation in which some answers of a record are trained, each after its own history."""

    conversation: Conversation
    places: list[int]
    """Where each of its messages is in the record."""
    whole: set[int]
    """Its messages that are as in the record."""


def plain_history(messages: Sequence[Message], rule: History) -> list[tuple[int, Message]]:
    """Return what a model is given of the messages before its answer, with their places."""
    answers = [k for k, message in enumerate(messages) if message.role is Role.ASSISTANT]
    kept: list[tuple[int, Message]] = []
    for k, message in enumerate(messages):
        asked_before = [answer for answer in answers if answer <= k]
        exchanges = [answer for answer in answers if asked_before and answer >= asked_before[-1]]
        if asked_before and rule.exchanges is not None and len(exchanges) > rule.exchanges:
            continue
        later = [other for other in messages[k + 1 :] if other.role.value in rule.roles]
        is_old = asked_before and rule.observations is not None and len(later) >= rule.observations
        if is_old and message.role.value in rule.roles:
            text = rule.elided.replace("{lines}", str(len(message.content.splitlines())))
            message = message._replace(content=text, has_content=True, parts=(), spans=())
        kept.append((k, message))
    return kept


def variants_of(conversation: Conversation, rule: History | None, *, last_turn_only: bool) -> list[Variant]:
    """Return the conversations of a record: each answer after its history, with the answer before it if that fits.

    Without a rule a record is one conversation.
    """
    messages = conversation.messages
    if rule is None:
        places = list(range(len(messages)))
        return [Variant(conversation, places, set(places))]
    last_user = max((k for k, message in enumerate(messages) if message.role is Role.USER), default=-1)
    trained = [k for k, message in enumerate(messages) if message.role is Role.ASSISTANT and message.weight != 0]
    trained = [k for k in trained if not last_turn_only or k > last_user]
    histories: list[tuple[list[tuple[int, Message]], set[int]]] = []
    for answer in trained:
        history = [*plain_history(messages[:answer], rule), (answer, messages[answer])]
        if histories and _keys(history, messages)[: len(histories[-1][0])] == _keys(histories[-1][0], messages):
            histories[-1] = (history, {*histories[-1][1], answer})
        else:
            histories.append((history, {answer}))
    if histories:
        histories[-1][0].extend((k, messages[k]) for k in range(trained[-1] + 1, len(messages)))
    variants = []
    for history, own_answers in histories or [(list(enumerate(messages)), set[int]())]:
        shown = tuple(message if k in own_answers else _context(message) for k, message in history)
        whole = {at for at, (_, is_whole) in enumerate(_keys(history, messages)) if is_whole}
        variants.append(Variant(conversation._replace(messages=shown), [k for k, _ in history], whole))
    return variants


def _keys(kept: Sequence[tuple[int, Message]], messages: Sequence[Message]) -> list[tuple[int, bool]]:
    """Return what is given: the place of each message, and whether it is as in the record."""
    return [(k, message is messages[k]) for k, message in kept]


def _context(message: Message) -> Message:
    """Return a message that is not trained here: of a sampled answer, its text."""
    if message.role is not Role.ASSISTANT:
        return message
    return message._replace(weight=0.0, token_ids=None, prompt_token_ids=None, logprobs=None)
