"""Pairs of whole conversations straight into columns: `chosen` and `rejected` are scanned one after the other.

A pair is sure if both lists are whole conversations that part at an answer. All others, and those with a prompt or a
margin in fields of their own, are for `read.preferences`, with its checks and its errors.
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
from chatmill.core.texts import OptionalTexts, Texts
from chatmill.core.tokens import ranges

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
BEFORE_USERS = (RoleCode.SYSTEM, RoleCode.DEVELOPER)


def paired(chosen: Conversations, rejected: Conversations) -> tuple[Conversations, Flags]:
    """The two sides of each record next to each other, with answers in the prompt as context; which pairs are sure."""
    count = len(chosen)
    both = Conversations.joined([chosen, rejected])
    firsts, sizes = both.offsets[:-1], np.diff(both.offsets)
    shared = _shared(both.messages, firsts, np.minimum(sizes[:count], sizes[count:]))
    sure = np.ones(count, dtype=np.bool_)
    for side in (slice(0, count), slice(count, None)):
        sure &= _begins_with_user(both.messages.roles, firsts[side], sizes[side])
        answers = np.append(both.messages.roles, RoleCode.NONE)[firsts[side] + shared]
        sure &= (shared < sizes[side]) & (answers == RoleCode.ASSISTANT)
    prompts = ranges(firsts, np.tile(shared, 2))
    weights = both.messages.weights.copy()
    weights[prompts[both.messages.roles[prompts] == RoleCode.ASSISTANT]] = 0.0
    sides = np.repeat(np.array([Side.CHOSEN, Side.REJECTED], dtype=np.uint8), count)
    whole = replace(both, messages=replace(both.messages, weights=weights), sides=sides)
    return whole.take(np.arange(2 * count).reshape(2, count).T.ravel()), sure


def _begins_with_user(roles: NDArray[np.uint8], firsts: Ints, sizes: Ints) -> Flags:
    """Whether the first message of a conversation that is not the system's is a user's."""
    places, owners = ranges(firsts, sizes), np.repeat(np.arange(len(firsts)), sizes)
    said = np.flatnonzero(~np.isin(roles[places], BEFORE_USERS))
    begins = said[np.diff(owners[said], prepend=-1) > 0]
    found = np.zeros(len(firsts), dtype=np.bool_)
    found[owners[begins]] = roles[places[begins]] == RoleCode.USER
    return found


def _shared(messages: MessageColumns, firsts: Ints, sizes: Ints) -> Ints:
    """How many messages the two conversations of each record begin with together.

    `firsts` are the first messages, of all chosen conversations and then of all rejected ones.
    """
    mine, others = ranges(firsts[: len(sizes)], sizes), ranges(firsts[len(sizes) :], sizes)
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
    """Which texts at two lists of places are equal, or both missing."""
    same: Flags = texts.lengths[mine] == texts.lengths[others]
    held = np.flatnonzero(same & (texts.lengths[mine] > 0))
    places = np.concatenate([mine[held], others[held]])
    numbers, _ = distinct(texts.data, texts.starts[places], texts.lengths[places])
    same[held] = numbers[: len(held)] == numbers[len(held) :]
    return same


def _same_calls(messages: MessageColumns, mine: Ints, others: Ints) -> Flags:
    """Which messages have the same calls."""
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
