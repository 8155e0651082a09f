"""Pairs straight into columns: `chosen`, `rejected` and the prompts next to them are read one after the other.

A pair is sure if both sides are answers to the prompt next to them, or whole conversations that part at an answer and
hold the prompt, if there is one. All others are for `read.preferences`, with its checks and its errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversations import Conversations
from chatmill.core.kinds import RoleCode
from chatmill.core.message_parser import MAX_WEIGHT, MIN_WEIGHT
from chatmill.core.messages import TEXT_FIELDS, MessageColumns
from chatmill.core.native.text_ranges import distinct
from chatmill.core.sides import Side
from chatmill.core.texts import OptionalTexts, TextJoiner, Texts
from chatmill.core.tokens import offsets_of, ranges
from chatmill.read.preferences import SAME_MARGIN, SCORES

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
BEFORE_USERS = (RoleCode.SYSTEM, RoleCode.DEVELOPER)


class PairPart(NamedTuple):
    """Messages of some records: one side of pairs, or their prompts."""

    messages: MessageColumns
    offsets: Ints
    """Where those of each record begin and end."""
    fields: Ints
    """An id for the unknown fields of each message, 0 for none; equal ids of any part mean equal fields."""


def paired(
    about: Conversations, chosen: PairPart, rejected: PairPart, prompts: PairPart
) -> tuple[Conversations, Flags]:
    """The two sides of each record next to each other, with answers in the prompt as context; which pairs are sure.

    A prompt may be no messages, or a system message alone. Next to whole conversations it may repeat some of them.

    Args:
        about: The records; their messages are those of `chosen`.
        chosen: The chosen answers, or whole conversations that end in them.
        rejected: Likewise.
        prompts: What the answers answer.
    """
    count = len(about)
    parts = (prompts, chosen, rejected)
    columns = [part.messages for part in parts]
    messages = MessageColumns.joined(columns, TextJoiner(text for part in columns for text in part.text_columns()))
    fields = np.concatenate([part.fields for part in parts])
    begins = np.cumsum([0, *map(len, columns[:-1])])
    asked, *answers = (part.offsets[:-1] + begin for part, begin in zip(parts, begins, strict=True))
    asked_sizes, *answer_sizes = (np.diff(part.offsets) for part in parts)
    is_asked = _said_first(messages.roles, asked, asked_sizes) != RoleCode.NONE
    first_roles = [_said_first(messages.roles, *answer) for answer in zip(answers, answer_sizes, strict=True)]
    are_whole, are_answers = (
        np.all([roles == role for roles in first_roles], axis=0) for role in (RoleCode.USER, RoleCode.ASSISTANT)
    )
    is_repeated = is_asked & are_whole
    if is_repeated.any():
        is_repeated &= _repeats(messages, fields, parts)
        is_asked &= ~is_repeated
        asked_sizes = np.where(is_repeated, 0, asked_sizes)
    sure = np.where(is_asked, are_answers, are_whole)
    sizes = np.array([asked_sizes, answer_sizes[0], asked_sizes, answer_sizes[1]]).T
    order = ranges(np.array([asked, answers[0], asked, answers[1]]).T.ravel(), sizes.ravel())
    whole = messages.take(order)
    offsets = offsets_of(sizes.reshape(-1, 2).sum(axis=1))
    firsts, lengths = offsets[:-1].reshape(-1, 2).T, np.diff(offsets).reshape(-1, 2).T
    shared, is_other_way = _shared(whole, fields[order], firsts[0], firsts[1], lengths.min(axis=0))
    sure &= ((shared < lengths[0]) | (shared < lengths[1])) & ~is_other_way
    starts = np.where(is_asked, asked_sizes, shared)
    roles = np.append(whole.roles, [RoleCode.NONE] * 2)
    for side in (0, 1):
        sure &= (starts < lengths[side]) & (roles[firsts[side] + starts] == RoleCode.ASSISTANT)
        # Of two system messages one may be that of a field: there once, or refused.
        sure &= (roles[firsts[side]] != RoleCode.SYSTEM) | (roles[firsts[side] + 1] != RoleCode.SYSTEM)
    before = ranges(firsts.T.ravel(), np.repeat(starts, 2))
    empty = replace(about, offsets=np.zeros_like(about.offsets))  # without messages
    weights = whole.weights.copy()
    weights[before[whole.roles[before] == RoleCode.ASSISTANT]] = 0.0
    return (
        replace(
            empty.take(np.repeat(np.arange(count), 2)),
            messages=replace(whole, weights=weights),
            offsets=offsets,
            sides=np.tile(np.array([Side.CHOSEN, Side.REJECTED], dtype=np.uint8), count),
        ),
        sure,
    )


def _repeats(messages: MessageColumns, fields: Ints, parts: Sequence[PairPart]) -> Flags:
    """Find the records whose prompt does no more than repeat messages of both sides.

    Args:
        messages: Those of the prompts, then of the chosen side, then of the rejected one.
        fields: An id for the unknown fields of each.
        parts: The three parts, in this order.
    """
    contents = messages.contents
    ids, _ = distinct(contents.data, contents.starts, contents.lengths)
    ids = ids * 256 + messages.roles
    asked, *sides = np.split(ids, np.cumsum([len(part.messages) for part in parts[:-1]]))
    offsets = parts[0].offsets
    records = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    room = int(ids.max(initial=0)) + 1
    is_there = fields[: len(asked)] == 0  # the fields of a prompt that is left out are not counted
    for part, side in zip(parts[1:], sides, strict=True):
        owners = np.repeat(np.arange(len(part.offsets) - 1), np.diff(part.offsets))
        is_there &= np.isin(records * room + asked, owners * room + side)
        # A system text comes first: it may be that of the field `system`, which goes before all messages.
        leads = np.append(side, -1)[part.offsets[:-1]]
        is_lead = np.zeros(len(asked), dtype=np.bool_)
        is_lead[offsets[:-1][np.diff(offsets) > 0]] = True
        is_system = asked % 256 == RoleCode.SYSTEM
        is_there &= ~(is_lead & is_system) | (asked == leads[records])
    repeats = np.ones(len(offsets) - 1, dtype=np.bool_)
    repeats[records[~is_there]] = False
    return repeats


def _said_first(roles: NDArray[np.uint8], firsts: Ints, sizes: Ints) -> NDArray[np.uint8]:
    """The role of the first message of each conversation that is not the system's; `NONE` where there is none."""
    places, owners = ranges(firsts, sizes), np.repeat(np.arange(len(firsts)), sizes)
    said = np.flatnonzero(~np.isin(roles[places], BEFORE_USERS))
    begins = said[np.diff(owners[said], prepend=-1) > 0]
    found = np.full(len(firsts), RoleCode.NONE, dtype=np.uint8)
    found[owners[begins]] = roles[places[begins]]
    return found


def _shared(messages: MessageColumns, fields: Ints, chosen: Ints, rejected: Ints, sizes: Ints) -> tuple[Ints, Flags]:
    """Count the messages that the two conversations of each pair begin with together.

    Args:
        messages: All messages.
        fields: An id for the unknown fields of each.
        chosen: Where the chosen conversations begin.
        rejected: Where the rejected ones begin.
        sizes: The most that may be counted of each.

    Returns:
        The counts, and which pairs have messages that differ in how their unknown fields are written, and in nothing
        else: what is equal may be written in two ways.
    """
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
    owners = np.repeat(np.arange(len(sizes)), sizes)
    is_other_way = np.zeros(len(sizes), dtype=np.bool_)
    is_other_way[owners[same & (fields[mine] != fields[others])]] = True
    shared = sizes.copy()
    places = ranges(np.zeros_like(sizes), sizes)
    np.minimum.at(shared, owners[~same], places[~same])
    return shared, is_other_way


def margins(scores: NDArray[np.float64]) -> tuple[NDArray[np.float32] | None, Flags]:
    """Compute the margins of pairs, as `read.preferences.margin_of` does for one, and which are sure.

    The margins are None if no record has a score.

    Args:
        scores: A column for each of `MARGIN_FIELDS`, NaN for none.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # of numbers that are refused, one by one
        found, is_sure = _margins(scores)
    found[~is_sure] = np.nan  # which float32 may not hold
    return None if np.isnan(found).all() else found.astype(np.float32), is_sure


def _margins(scores: NDArray[np.float64]) -> tuple[NDArray[np.float64], Flags]:
    """Compute margins in full precision; see `margins`."""
    sizes = np.abs(scores)
    is_sure = np.all(np.isnan(scores) | (scores == 0) | ((sizes >= MIN_WEIGHT) & (sizes < MAX_WEIGHT)), axis=1)
    found = scores[:, 0].copy()
    for number in range(len(SCORES)):
        chosen = scores[:, 2 * number + 1]
        rejected = scores[:, 2 * number + 2]
        is_sure &= np.isnan(chosen) == np.isnan(rejected)
        margin = chosen - rejected
        size = np.abs(margin)
        is_sure &= np.isnan(margin) | (margin == 0) | ((size >= MIN_WEIGHT) & (size < MAX_WEIGHT))
        apart = np.abs(margin - found)
        larger = np.fmax(size, np.abs(found))
        is_sure &= np.isnan(apart) | (apart <= np.fmax(SAME_MARGIN * larger, SAME_MARGIN))
        found = np.where(np.isnan(found), margin, found)
    return found, is_sure


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
