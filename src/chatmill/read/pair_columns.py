"""Pairs straight into columns: `chosen`, `rejected` and the prompts next to them are read one after the other.

A pair is sure if both sides are answers to the prompt next to them, or, without one, whole conversations that part at
an answer. All others, and those with a margin, are for `read.preferences`, with its checks and its errors.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversations import Conversations
from chatmill.core.kinds import RoleCode
from chatmill.core.messages import TEXT_FIELDS, MessageColumns
from chatmill.core.native.text_ranges import distinct
from chatmill.core.sides import Side
from chatmill.core.texts import OptionalTexts, TextJoiner, Texts
from chatmill.core.tokens import offsets_of, ranges

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Part = tuple[MessageColumns, Ints]
"""Messages of some records, and where those of each begin and end."""
BEFORE_USERS = (RoleCode.SYSTEM, RoleCode.DEVELOPER)


def paired(chosen: Conversations, rejected: Part, prompts: Part) -> tuple[Conversations, Flags]:
    """The two sides of each record next to each other, with answers in the prompt as context; which pairs are sure.

    A prompt may be no messages, or a system message alone.
    """
    count, parts = len(chosen), (prompts, (chosen.messages, chosen.offsets), rejected)
    columns = [messages for messages, _ in parts]
    messages = MessageColumns.joined(columns, TextJoiner(text for part in columns for text in part.text_columns()))
    begins = np.cumsum([0, *map(len, columns[:-1])])
    asked, *answers = (offsets[:-1] + begin for (_, offsets), begin in zip(parts, begins, strict=True))
    asked_sizes, *answer_sizes = (np.diff(offsets) for _, offsets in parts)
    is_asked = _said_first(messages.roles, asked, asked_sizes) != RoleCode.NONE
    first_roles = [_said_first(messages.roles, *answer) for answer in zip(answers, answer_sizes, strict=True)]
    are_whole, are_answers = (
        np.all([roles == role for roles in first_roles], axis=0) for role in (RoleCode.USER, RoleCode.ASSISTANT)
    )
    sure = np.where(is_asked, are_answers, are_whole)
    sizes = np.array([asked_sizes, answer_sizes[0], asked_sizes, answer_sizes[1]]).T
    order = ranges(np.array([asked, answers[0], asked, answers[1]]).T.ravel(), sizes.ravel())
    whole = messages.take(order)
    offsets = offsets_of(sizes.reshape(-1, 2).sum(axis=1))
    firsts, lengths = offsets[:-1].reshape(-1, 2).T, np.diff(offsets).reshape(-1, 2).T
    shared = _shared(whole, firsts[0], firsts[1], lengths.min(axis=0))
    sure &= (shared < lengths[0]) | (shared < lengths[1])
    starts = np.where(is_asked, asked_sizes, shared)
    roles = np.append(whole.roles, [RoleCode.NONE] * 2)
    for side in (0, 1):
        sure &= (starts < lengths[side]) & (roles[firsts[side] + starts] == RoleCode.ASSISTANT)
        # Of two system messages one may be that of a field: there once, or refused.
        sure &= (roles[firsts[side]] != RoleCode.SYSTEM) | (roles[firsts[side] + 1] != RoleCode.SYSTEM)
    before = ranges(firsts.T.ravel(), np.repeat(starts, 2))
    about = replace(chosen, offsets=np.zeros_like(chosen.offsets))  # without messages
    weights = whole.weights.copy()
    weights[before[whole.roles[before] == RoleCode.ASSISTANT]] = 0.0
    return (
        replace(
            about.take(np.repeat(np.arange(count), 2)),
            messages=replace(whole, weights=weights),
            offsets=offsets,
            sides=np.tile(np.array([Side.CHOSEN, Side.REJECTED], dtype=np.uint8), count),
        ),
        sure,
    )


def _said_first(roles: NDArray[np.uint8], firsts: Ints, sizes: Ints) -> NDArray[np.uint8]:
    """The role of the first message of each conversation that is not the system's; `NONE` where there is none."""
    places, owners = ranges(firsts, sizes), np.repeat(np.arange(len(firsts)), sizes)
    said = np.flatnonzero(~np.isin(roles[places], BEFORE_USERS))
    begins = said[np.diff(owners[said], prepend=-1) > 0]
    found = np.full(len(firsts), RoleCode.NONE, dtype=np.uint8)
    found[owners[begins]] = roles[places[begins]]
    return found


def _shared(messages: MessageColumns, chosen: Ints, rejected: Ints, sizes: Ints) -> Ints:
    """Return how many of so many messages the conversations that begin at two places begin with together."""
    mine, others = ranges(chosen, sizes), ranges(rejected, sizes)
    same = messages.roles[mine] == messages.roles[others]
    for flags in (messages.has_content, messages.has_reasoning):
        same &= flags[mine] == flags[others]
    for name in ("contents", "reasoning", *TEXT_FIELDS.values(), "token_ids", "prompt_token_ids"):
        same &= _equal(getattr(messages, name), mine, others)
    weights = messages.weights
    same &= (weights[mine] == weights[others]) | (np.isnan(weights[mine]) & np.isnan(weights[others]))
    same &= _same_calls(messages, mine, others)
    by_value = messages.structured.present | messages.logprobs.present  # what is equal may be written in two ways
    for number in np.flatnonzero(same & (by_value[mine] | by_value[others])).tolist():
        a, b = int(mine[number]), int(others[number])
        same[number] = messages.objects(a, a + 1) == messages.objects(b, b + 1)
    shared = sizes.copy()
    places = ranges(np.zeros_like(sizes), sizes)
    np.minimum.at(shared, np.repeat(np.arange(len(sizes)), sizes)[~same], places[~same])
    return shared


def _equal(texts: Texts | OptionalTexts, mine: Ints, others: Ints) -> Flags:
    """Return which texts at two lists of places are equal, or both missing."""
    if isinstance(texts, OptionalTexts) and texts.is_none:
        return np.ones(len(mine), dtype=np.bool_)
    same: Flags = texts.lengths[mine] == texts.lengths[others]
    held = np.flatnonzero(same & (texts.lengths[mine] > 0))
    places = np.concatenate([mine[held], others[held]])
    numbers, _ = distinct(texts.data, texts.starts[places], texts.lengths[places])
    same[held] = numbers[: len(held)] == numbers[len(held) :]
    return same


def _same_calls(messages: MessageColumns, mine: Ints, others: Ints) -> Flags:
    """Return which messages have the same calls."""
    counts = messages.call_counts
    same: Flags = counts[mine] == counts[others]
    held = np.flatnonzero(same & (counts[mine] > 0))
    sizes = counts[mine[held]]
    first, second = (ranges(messages.call_offsets[places[held]], sizes) for places in (mine, others))
    equal = messages.call_orders[first] == messages.call_orders[second]
    for texts in (messages.call_names, messages.call_arguments, messages.call_ids):
        equal &= _equal(texts, first, second)
    same[np.repeat(held, sizes)[~equal]] = False
    return same
