"""Adds up the runs of tokens, and what the messages of conversations hold."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversations import Conversations
from chatmill.core.kinds import Part, RoleCode, parts_of, roles_of
from chatmill.core.shared_rows import SharedRows
from chatmill.core.tokens import Tokens, offsets_of, segment_sums

Ints = NDArray[np.int64]
Weights = NDArray[np.float32]
ROLES = len(RoleCode)


class TurnSums(NamedTuple):
    """Counts of each conversation."""

    trained: Ints
    """Trained tokens."""
    turns: Ints
    """Messages of the assistant that have tokens."""
    unended: Ints
    """Those that are trained although their terminator is not, or is gone.

    A message that another one of the assistant follows at once (Harmony's analysis before the final answer) needs none.
    """
    endless: Ints
    """The same, such messages included."""


def sum_lengths(tokens: Tokens, lengths: Ints, weights: Weights, codes: Ints, count: int) -> Ints:
    """Lengths of runs, summed up by the code of their conversation, their role, and whether their weight is above 0.

    Codes are smaller than `count`; the result has the shape `(count, ROLES, 2)`.
    """
    places = np.repeat(codes * ROLES, np.diff(tokens.sequence_runs)) + roles_of(tokens.run_kinds)
    sums = np.bincount(2 * places + (weights > 0), weights=lengths, minlength=count * ROLES * 2)
    return sums.astype(np.int64).reshape(count, ROLES, 2)


def sum_rows(rows: SharedRows, lengths: Ints, weights: Weights, codes: Ints, count: int) -> Ints:
    """The same for all runs of rows that share some: each is trained in the rows that do not have it as repeated."""
    if rows.are_apart:
        return sum_lengths(rows.own, lengths, weights, codes, count)
    trained = sum_lengths(rows.merged, lengths * rows.unrepeated, weights, codes, count)
    repeated = lengths * (rows.times - rows.unrepeated)
    return trained + sum_lengths(rows.merged, repeated, np.zeros_like(weights), codes, count)


def sum_turns(tokens: Tokens, weights: Weights) -> TurnSums:
    """What the runs of each conversation add up to."""
    passed = offsets_of(np.where(weights > 0, tokens.run_lengths, 0))[tokens.sequence_runs]
    filled = np.flatnonzero(tokens.run_lengths)
    kinds = tokens.run_kinds[filled]
    place = np.flatnonzero(roles_of(kinds) == RoleCode.ASSISTANT)  # among the runs that are not empty
    if not len(place):
        nothing = np.zeros(len(tokens), dtype=np.int64)
        return TurnSums(np.diff(passed), nothing, nothing, nothing)
    run = filled[place]
    owners = np.repeat(np.arange(len(tokens)), np.diff(tokens.sequence_runs))[run]
    messages = tokens.run_messages[run]
    opens = np.ones(len(run), dtype=np.bool_)
    opens[1:] = (messages[1:] != messages[:-1]) | (owners[1:] != owners[:-1])
    first = np.flatnonzero(opens)
    trained = weights[run] > 0
    ended = trained & (parts_of(kinds[place]) == Part.TERMINATOR)
    endless = np.logical_or.reduceat(trained, first) & ~np.logical_or.reduceat(ended, first)
    owner = owners[first]
    goes_on = (place[first[1:]] == place[first[1:] - 1] + 1) & (np.diff(owner) == 0)
    unended = endless & ~np.append(goes_on, False)
    return TurnSums(
        np.diff(passed),
        np.bincount(owner, minlength=len(tokens)),
        *(np.bincount(owner, weights=one, minlength=len(tokens)).astype(np.int64) for one in (unended, endless)),
    )


def reasoning_of(batch: Conversations) -> NDArray[np.int64]:
    """Characters of reasoning of each conversation."""
    reasoning = batch.messages.reasoning
    found = np.zeros(len(batch), dtype=np.int64)
    places = np.flatnonzero(reasoning.lengths > 0)
    np.add.at(found, batch.owners(places), reasoning.take(places).characters())
    return found


def empty_answers(batch: Conversations) -> NDArray[np.int64]:
    """Answers of each conversation that hold nothing."""
    messages = batch.messages
    empty = (messages.roles == RoleCode.ASSISTANT) & (messages.contents.lengths == 0)
    empty &= (messages.reasoning.lengths == 0) & (messages.call_counts == 0) & ~messages.token_ids.present
    return segment_sums(empty, batch.offsets)
