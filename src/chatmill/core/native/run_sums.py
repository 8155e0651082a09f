"""What the runs of tokens add up to: in compiled code where it is there, else by NumPy, with the same result."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import Part, RoleCode, parts_of, roles_of
from chatmill.core.native.library import library
from chatmill.core.tokens import Tokens, offsets_of

Ints = NDArray[np.int64]
Weights = NDArray[np.float32]
ROLES = len(RoleCode)
OUTSIDE = "a run or a code lies outside its array"


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


def sum_lengths(tokens: Tokens, lengths: Ints, weights: Weights, codes: Ints, count: int) -> Ints:
    """Lengths of runs, summed up by the code of their conversation, their role, and whether their weight is above 0.

    Codes are smaller than `count`; the result has the shape `(count, ROLES, 2)`.
    """
    kinds, weights, runs = _runs(tokens, weights)
    if len(lengths) != len(kinds) or len(codes) != len(tokens):
        raise ValueError(
            f"{len(kinds)} runs and {len(lengths)} lengths, {len(tokens)} conversations and {len(codes)} codes"
        )
    compiled = library()
    if compiled is None:
        return lengths_by_numpy(tokens, lengths, weights, codes, count)
    sums = np.zeros((count, ROLES, 2), dtype=np.int64)
    lengths, codes = (np.ascontiguousarray(column, dtype=np.int64) for column in (lengths, codes))
    found = compiled.chatmill_sum_lengths(
        *(kinds.ctypes.data, lengths.ctypes.data, weights.ctypes.data, len(kinds)),
        *(runs.ctypes.data, codes.ctypes.data, len(tokens), count, sums.ctypes.data),
    )
    if found < 0:
        raise IndexError(OUTSIDE)
    return sums


def lengths_by_numpy(tokens: Tokens, lengths: Ints, weights: Weights, codes: Ints, count: int) -> Ints:
    """What `sum_lengths` gives, slower."""
    if len(codes) and not 0 <= codes.min() <= codes.max() < count:
        raise IndexError(OUTSIDE)
    places = np.repeat(codes * ROLES, np.diff(tokens.sequence_runs)) + roles_of(tokens.run_kinds)
    sums = np.bincount(2 * places + (weights > 0), weights=lengths, minlength=count * ROLES * 2)
    return sums.astype(np.int64).reshape(count, ROLES, 2)


def sum_turns(tokens: Tokens, weights: Weights) -> TurnSums:
    """What the runs of each conversation add up to."""
    kinds, weights, runs = _runs(tokens, weights)
    compiled = library()
    if compiled is None:
        return turns_by_numpy(tokens, weights)
    trained, turns, unended = sums = np.empty((3, len(tokens)), dtype=np.int64)
    messages, lengths = np.ascontiguousarray(tokens.run_messages, dtype=np.int32), tokens.run_lengths
    found = compiled.chatmill_sum_turns(
        *(kinds.ctypes.data, messages.ctypes.data, lengths.ctypes.data, weights.ctypes.data, len(kinds)),
        *(runs.ctypes.data, len(tokens), *(row.ctypes.data for row in sums)),
    )
    if found < 0:
        raise IndexError(OUTSIDE)
    return TurnSums(trained, turns, unended)


def turns_by_numpy(tokens: Tokens, weights: Weights) -> TurnSums:
    """What `sum_turns` gives, slower."""
    passed = offsets_of(np.where(weights > 0, tokens.run_lengths, 0))[tokens.sequence_runs]
    filled = np.flatnonzero(tokens.run_lengths)
    kinds = tokens.run_kinds[filled]
    place = np.flatnonzero(roles_of(kinds) == RoleCode.ASSISTANT)  # among the runs that are not empty
    if not len(place):
        nothing = np.zeros(len(tokens), dtype=np.int64)
        return TurnSums(np.diff(passed), nothing, nothing)
    run = filled[place]
    owners = np.repeat(np.arange(len(tokens)), np.diff(tokens.sequence_runs))[run]
    messages = tokens.run_messages[run]
    opens = np.ones(len(run), dtype=np.bool_)
    opens[1:] = (messages[1:] != messages[:-1]) | (owners[1:] != owners[:-1])
    first = np.flatnonzero(opens)
    trained = weights[run] > 0
    ended = trained & (parts_of(kinds[place]) == Part.TERMINATOR)
    unended = np.logical_or.reduceat(trained, first) & ~np.logical_or.reduceat(ended, first)
    owner = owners[first]
    goes_on = (place[first[1:]] == place[first[1:] - 1] + 1) & (np.diff(owner) == 0)
    unended[:-1] &= ~goes_on
    return TurnSums(
        np.diff(passed),
        np.bincount(owner, minlength=len(tokens)),
        np.bincount(owner, weights=unended, minlength=len(tokens)).astype(np.int64),
    )


def _runs(tokens: Tokens, weights: Weights) -> tuple[NDArray[np.uint8], Weights, Ints]:
    """Columns of runs as compiled code reads them."""
    if not len(tokens.run_kinds) == len(weights) == len(tokens.run_messages) == len(tokens.run_offsets) - 1:
        raise ValueError(f"{len(tokens.run_kinds)} runs and {len(weights)} weights")
    if len(tokens.sequence_runs) != len(tokens) + 1:
        raise ValueError(f"{len(tokens)} sequences and {len(tokens.sequence_runs)} offsets into their runs")
    return (
        np.ascontiguousarray(tokens.run_kinds, dtype=np.uint8),
        np.ascontiguousarray(weights, dtype=np.float32),
        np.ascontiguousarray(tokens.sequence_runs, dtype=np.int64),
    )
