"""The history that a rule gives each answer, by the slow, obvious path: one answer and one message at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from chatmill.compiler.histories import IN_MESSAGE, History
from chatmill.core.conversation import Conversation, Message, Role
from chatmill.core.ledger import HISTORY_CHANGED, HISTORY_ROWS
from chatmill.errors import RecordError
from chatmill.prove.pairs import joined
from chatmill.prove.reference import DerivedRecord, Reference, lacks_of


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
        asked = [answer for answer in answers if answer <= k]
        if not asked:
            kept.append((k, message))
            continue
        exchanges = [answer for answer in answers if answer >= asked[-1]]
        if rule.exchanges is not None and len(exchanges) > rule.exchanges:
            continue
        later = [other for other in messages[k + 1 :] if other.role.value in rule.roles]
        is_old = rule.observations is not None and len(later) >= rule.observations
        if is_old and message.role.value in rule.roles:
            text = rule.elided.replace("{lines}", str(len(message.content.splitlines())))
            message = message._replace(content=text, has_content=True, parts=())
        kept.append((k, message))
    return kept


def variants_of(conversation: Conversation, rule: History, *, last_turn_only: bool) -> list[Variant]:
    """Return the conversations of a record: each answer after its history, with the answer before it if that fits."""
    messages = conversation.messages
    last_user = max((k for k, message in enumerate(messages) if message.role is Role.USER), default=-1)
    trained = [k for k, message in enumerate(messages) if message.role is Role.ASSISTANT and message.weight != 0]
    trained = [k for k in trained if not last_turn_only or k > last_user]
    made: list[tuple[list[tuple[int, Message]], set[int]]] = []
    for answer in trained:
        given = [*plain_history(messages[:answer], rule), (answer, messages[answer])]
        if made and _keys(given, messages)[: len(made[-1][0])] == _keys(made[-1][0], messages):
            made[-1] = (given, {*made[-1][1], answer})
        else:
            made.append((given, {answer}))
    if made:
        made[-1][0].extend((k, messages[k]) for k in range(trained[-1] + 1, len(messages)))
    variants = []
    for given, own in made or [(list(enumerate(messages)), set[int]())]:
        shown = tuple(message if k in own else _context(message) for k, message in given)
        whole = {at for at, (_, is_whole) in enumerate(_keys(given, messages)) if is_whole}
        variants.append(Variant(conversation._replace(messages=shown), [k for k, _ in given], whole))
    return variants


def _keys(given: Sequence[tuple[int, Message]], messages: Sequence[Message]) -> list[tuple[int, bool]]:
    """What is given: the place of each message, and whether it is as in the record."""
    return [(k, message is messages[k]) for k, message in given]


def _context(message: Message) -> Message:
    """A message that is not trained here: of a sampled answer, its text."""
    if message.role is not Role.ASSISTANT:
        return message
    return message._replace(weight=0.0, token_ids=None, prompt_token_ids=None, logprobs=None)


def derive_after(reference: Reference, conversation: Conversation, rule: History | None) -> DerivedRecord:
    """Derive a record whose answers have the histories that a rule gives them; None: all that comes before."""
    if rule is None or reference.is_calls(conversation):
        return reference.derive(conversation)
    variants = variants_of(conversation, rule, last_turn_only=reference.template.given.last_turn_only)
    made: list[DerivedRecord] = []
    seen: set[int] = set()
    changed: set[int] = set()
    for one in variants:
        new = {at for at in one.whole if one.places[at] not in seen}
        try:
            made.append(reference.derive(one.conversation, counted=new, is_last=one is variants[-1]))
        except RecordError as error:
            if named := IN_MESSAGE.match(error.path):
                error.path = f"messages[{one.places[int(named[1])]}]{error.path[named.end() :]}"
            raise
        whole = {one.places[at] for at in one.whole}
        seen |= whole
        changed |= set(range(max(one.places, default=0))) - whole
        for sequence in made[-1].sequences:
            sequence.messages = [one.places[k] if k >= 0 else k for k in sequence.messages]
    derived = joined(made)
    history = {HISTORY_CHANGED: len(changed), HISTORY_ROWS: len(variants) - 1 if changed else 0}
    return replace(
        derived,
        sides=1,
        lost={**derived.lost, **lacks_of(conversation)},
        notes={**derived.notes, **reference.logprobs_left(conversation), **history},
        variants=[(one.conversation, own) for one, own in zip(variants, made, strict=True)],
    )
