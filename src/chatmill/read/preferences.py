"""Answers that people compared: records with `chosen` and `rejected`, and records with a `label` (KTO)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np

from chatmill.core.conversation import Message, Role
from chatmill.core.message_parser import (
    MAX_WEIGHT,
    MIN_WEIGHT,
    checked_text,
    field_text,
    fits_float32,
    is_number,
    mistyped,
    parse_messages,
)
from chatmill.core.sides import Side
from chatmill.errors import RecordError

CHOSEN, REJECTED, LABEL = "chosen", "rejected", "label"
LISTS, ASKED, JOINED = ("messages", "conversations"), ("prompt", "question"), ("instruction", "input")
SYSTEM = "system"
PAIR_FIELDS = (CHOSEN, REJECTED, SYSTEM, *LISTS, *ASKED, *JOINED)
"""Fields that such a record may have its messages in."""
MARGIN = "margin"
SCORES = (("chosen_score", "rejected_score"), ("score_chosen", "score_rejected"), ("chosen_rating", "rejected_rating"))
MARGIN_FIELDS = (MARGIN, *(name for pair in SCORES for name in pair))
SAME_MARGIN = 0.01
"""Two margins that differ by no more than this, or this share of them, are one that was rounded."""


def refuse_pairs(record: Mapping[str, Any]) -> NoReturn:
    """The error about pairs of which nobody has said what to do with them; see the shapes `chosen` and `pairs`."""
    raise RecordError(
        "the record holds a pair of answers, 'chosen' and 'rejected'. Compile both for DPO or a reward model with "
        "preferences: pairs (--set preferences=pairs), or train the chosen answers with preferences: chosen",
        code="preference_pair",
        path=CHOSEN,
    )


def chosen_messages(record: Mapping[str, Any]) -> tuple[Message, ...]:
    """The prompt and the chosen answer; a list of messages that begins with a user's is the whole conversation."""
    return _side(record, CHOSEN)[0]


def pair_messages(record: Mapping[str, Any]) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Return the two conversations of a pair, whose prompt is the same; answers in the prompt are context.

    The prompt is what other fields say that the answers answer, or what two whole conversations begin with.
    """
    (chosen, start), (rejected, other) = _side(record, CHOSEN), _side(record, REJECTED)
    if chosen == rejected:
        raise RecordError("'chosen' and 'rejected' are the same", code="answers_same", path=REJECTED)
    if start is None:
        start = other
    if start is None:
        same = (a == b for a, b in zip(chosen, rejected, strict=False))
        start = next((place for place, is_same in enumerate(same) if not is_same), min(len(chosen), len(rejected)))
    goes_on = all(len(side) > start and side[start].role is Role.ASSISTANT for side in (chosen, rejected))
    if chosen[:start] != rejected[:start] or not goes_on:
        raise RecordError(
            "'chosen' and 'rejected' do not answer the same prompt: their messages differ before an answer does",
            code="prompts_differ",
            path=REJECTED,
        )
    return as_context(chosen, start), as_context(rejected, start)


def margin_of(record: Mapping[str, Any]) -> float | None:
    """By how much the chosen answer of a pair is better: its `margin`, or the difference of two scores, as float32.

    None where the record says nothing. Scores of which one is missing are an error, and so are two margins that differ.
    """
    found = dict(_margins(record))
    if not found:
        return None
    name, margin = next(iter(found.items()))
    for other, value in found.items():
        if not math.isclose(value, margin, rel_tol=SAME_MARGIN, abs_tol=SAME_MARGIN):
            raise RecordError(
                f"{name} says {margin:g}, and {other} {value:g}; keep one", code="margins_differ", path=name.split()[0]
            )
    return float(np.float32(margin))


def _margins(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield what the record says about its margin, by the fields that say it."""
    if record.get(MARGIN) is not None:
        yield MARGIN, _score(record, MARGIN)
    for names in SCORES:
        there = [name for name in names if record.get(name) is not None]
        if len(there) == 1:
            missing = names[0] if there[0] == names[1] else names[1]
            raise RecordError(
                f"{there[0]!r} is given without {missing!r}, and one score is no margin: give both, or neither",
                code="margin_incomplete",
                path=there[0],
            )
        if there:
            chosen, rejected = names
            margin = _score(record, chosen) - _score(record, rejected)
            if not fits_float32(margin):
                raise _out_of_range(f"the difference of {chosen!r} and {rejected!r}", margin, chosen)
            yield f"{chosen} - {rejected}", margin


def _score(record: Mapping[str, Any], name: str) -> float:
    value = record[name]
    if not is_number(value):
        raise mistyped(f"{name!r} must be a number", value, code="margin_type", path=name)
    if not fits_float32(value):
        raise _out_of_range(repr(name), value, name)
    return float(value)


def _out_of_range(what: str, value: float, path: str) -> RecordError:
    limits = f"0 or a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}, or below 0 as far from it"
    return RecordError(f"{what} must be {limits}, found {str(value)[:40]}", code="margin_type", path=path)


def as_context(messages: tuple[Message, ...], end: int) -> tuple[Message, ...]:
    """Return the messages, in which no answer before the message `end` is trained."""
    before = [message._replace(weight=0.0) if message.role is Role.ASSISTANT else message for message in messages[:end]]
    return (*before, *messages[end:])


def label_of(record: Mapping[str, Any]) -> bool | None:
    """Read whether people liked the answer of a record; None if it does not say so.

    Tables of texts, such as CSV files, spell the two values.
    """
    label = record.get(LABEL)
    if isinstance(label, str):
        return {"true": True, "false": False}.get(label.strip().lower())
    return label if isinstance(label, bool) else None


def labelled(record: Mapping[str, Any], messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], Side]:
    """A conversation whose label says whether people liked what follows its last user message, which is trained."""
    label = label_of(record)
    if label is None:
        rule = "with preferences: pairs a record has 'chosen' and 'rejected', or a 'label' that is true or false"
        raise mistyped(rule, record.get(LABEL), code="label_type", path=LABEL)
    last = max((place for place, message in enumerate(messages) if message.role is Role.USER), default=0)
    return as_context(messages, last), Side.LIKED if label else Side.DISLIKED


def _side(record: Mapping[str, Any], key: str) -> tuple[tuple[Message, ...], int | None]:
    """The conversation that ends in an answer, and where the answer begins; None if the answer holds its prompt."""
    if key not in record:
        raise RecordError(f"the record has no {key!r}", code="missing_field", path=key)
    answer = record[key]
    if isinstance(answer, str):
        messages: tuple[Message, ...] = (Message(Role.ASSISTANT, checked_text(answer, key)),)
    else:
        messages = _listed([answer] if isinstance(answer, Mapping) else answer, key)
    prompts, said = dict(_prompts(record)), len(messages)
    first = next((message for message in messages if message.role not in (Role.SYSTEM, Role.DEVELOPER)), messages[0])
    has_prompt = first.role is Role.USER
    if not has_prompt:
        if not prompts:
            raise RecordError(
                f"nothing says what {key!r} answers: give 'prompt', 'messages', or the whole conversation in {key!r}",
                code="missing_field",
                path="prompt",
            )
        name = next(iter(prompts))
        messages = (*prompts.pop(name), *messages)
    for name, prompt in prompts.items():
        _refuse_another(name, prompt, messages)
    system = field_text(record, SYSTEM, default="")
    messages = after_system((Message(Role.SYSTEM, system),) if system else (), messages)
    return messages, None if has_prompt else len(messages) - said


def _prompts(record: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Message, ...]]]:
    """Yield what the record says that its answers answer, by the field that says it.

    A list that is the chosen conversation once more, as records have it that serve SFT too, says nothing.
    """
    for key in (*LISTS, *ASKED):
        value = record.get(key)
        if key in LISTS and isinstance(value, list) and value == record.get(CHOSEN):
            continue
        if value and (key in LISTS or isinstance(value, list)):
            yield key, _listed(value, key)
        elif text := field_text(record, key, default=""):
            yield key, (Message(Role.USER, text),)
    if text := "\n".join(filter(None, (field_text(record, name, default="") for name in JOINED))):
        yield JOINED[0], (Message(Role.USER, text),)


def _refuse_another(key: str, prompt: tuple[Message, ...], messages: tuple[Message, ...]) -> None:
    """Refuse a second prompt that does more than repeat what is in the conversation."""
    there = {(message.role, message.content.strip()) for message in messages}
    if any((message.role, message.content.strip()) not in there for message in prompt):
        raise RecordError(
            f"{key!r} has messages that are not in the conversation which the other fields give; keep one of the two",
            code="prompt_twice",
            path=key,
        )


def after_system(turns: tuple[Message, ...], listed: tuple[Message, ...]) -> tuple[Message, ...]:
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
