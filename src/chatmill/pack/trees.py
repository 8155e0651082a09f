"""Rows of the same conversations, put into trees in which shared beginnings are stored once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import RoleCode, roles_of
from chatmill.core.native.gather import gathered
from chatmill.core.native.trees import AGAIN, RowColumns, grow_trees, tree_runs
from chatmill.core.shared_rows import SharedRows
from chatmill.core.tokens import Tokens, offsets_of, ranges, segment_sums
from chatmill.core.trees import Branches

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """Trees in the order of their groups."""

    tokens: Tokens
    """One document per tree. Messages are numbered through the records of its group."""
    run_weights: NDArray[np.float32]
    """One weight per run of `tokens`; 0 on copies, and on what an earlier tree of the group trains."""
    injected_runs: NDArray[np.bool_]
    """Runs that are repetitions: the copies that branches begin with, paths that a split repeats, and what overflow
    added to every row that has it."""
    branches: Branches
    first_row: Ints
    """The first row of the group of each tree."""
    turns: Ints
    """Assistant messages of each tree."""
    split_tokens: Ints
    """Tokens of each tree that an earlier tree of its group has too: what it cost to split one that was too long."""


def put_into_trees(
    shared: SharedRows,
    run_weights: NDArray[np.float32],
    injected_runs: NDArray[np.bool_],
    later_runs: NDArray[np.bool_],
    records: Ints,
    groups: Ints,
    capacity: int,
) -> Trees:
    """Put the rows of each group into one tree, or several if it would exceed `capacity`, which no row does.

    `records` and `groups` have the record and the group of each row; rows of a record, and records of a group, follow
    each other. Weights, injected and later runs are those of the rows' own runs, as overflow gives them.
    """
    tokens = shared.merged
    opens = np.append(True, groups[1:] != groups[:-1])[: len(groups)]
    rows = RowColumns(
        ids=tokens.ids,
        offsets=tokens.offsets,
        kinds=tokens.kinds,
        weights=tokens.per_token(run_weights),
        kept=tokens.per_token((~injected_runs).astype(np.uint8)),
        later=tokens.per_token(later_runs.astype(np.uint8)),
        parents=shared.parents,
        begins=shared.begins,
    )
    trees = grow_trees(rows, np.append(np.flatnonzero(opens), len(groups)), capacity)
    run_messages = (tokens.run_messages + _shifts(tokens, records, opens)).astype(np.int32)
    runs = tree_runs(trees, rows, tokens.run_offsets, run_messages)
    offsets, logprobs = offsets_of(trees.lengths), tokens.logprobs
    if logprobs is not None:
        logprobs = gathered([logprobs], np.zeros(len(trees.firsts), dtype=np.uint8), trees.firsts, trees.sizes)
    run_offsets = np.append(runs.starts, len(runs.ids))
    message_offsets, message_weights = _messages(tokens, records, opens, trees.groups)
    grown = Tokens(
        ids=runs.ids,
        offsets=offsets,
        run_offsets=run_offsets,
        run_kinds=runs.kinds,
        run_messages=runs.messages,
        document_runs=np.searchsorted(run_offsets, offsets),
        message_offsets=message_offsets,
        message_weights=message_weights,
        logprobs=logprobs,
    )
    return Trees(
        tokens=grown,
        run_weights=runs.weights,
        injected_runs=runs.injected,
        branches=Branches(offsets=offsets_of(trees.branches), starts=trees.starts, depths=trees.depths),
        first_row=np.flatnonzero(opens)[trees.groups],
        turns=_turns(grown),
        split_tokens=segment_sums(
            np.where(trees.states == AGAIN, trees.sizes, 0), np.searchsorted(offsets_of(trees.sizes), offsets)
        ),
    )


def _first_rows(records: Ints, opens: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which rows are the first of their record in their group."""
    changes: NDArray[np.bool_] = np.append(True, records[1:] != records[:-1])[: len(records)]
    return opens | changes


def _shifts(tokens: Tokens, records: Ints, opens: NDArray[np.bool_]) -> Ints:
    """Count, for each run, the messages of its group before those of its record; 0 for runs of no message."""
    counts = np.where(_first_rows(records, opens), np.diff(tokens.message_offsets), 0)
    up_to = np.cumsum(counts)
    messages = np.diff(tokens.message_offsets)
    group_begins = np.repeat((up_to - counts)[opens], np.diff(np.append(np.flatnonzero(opens), len(opens))))
    shifts = np.repeat(up_to - messages - group_begins, np.diff(tokens.document_runs))
    return np.where(tokens.run_messages < 0, 0, shifts)


def _messages(
    tokens: Tokens, records: Ints, opens: NDArray[np.bool_], tree_groups: Ints
) -> tuple[Ints, NDArray[np.float32]]:
    """Offsets and weights of the messages of each tree: those of all records of its group."""
    rows = np.flatnonzero(_first_rows(records, opens))
    begins = np.append(np.searchsorted(rows, np.flatnonzero(opens)), len(rows))  # first of each group among `rows`
    per_group = begins[tree_groups + 1] - begins[tree_groups]
    of_tree = rows[ranges(begins[tree_groups], per_group)]
    counts = np.diff(tokens.message_offsets)[of_tree]
    ends = offsets_of(counts)[offsets_of(per_group)]
    return ends, tokens.message_weights[ranges(tokens.message_offsets[of_tree], counts)]


def _turns(trees: Tokens) -> Ints:
    """Messages of the assistant that have tokens, each counted once in its tree."""
    runs = np.flatnonzero(roles_of(trees.run_kinds) == RoleCode.ASSISTANT)
    tree = np.repeat(np.arange(len(trees)), np.diff(trees.document_runs))[runs]
    most = int(trees.run_messages.max(initial=0)) + 2  # messages are counted from -1 on
    keys = tree * most + trees.run_messages[runs] + 1
    keys = np.unique(keys[np.append(True, keys[1:] != keys[:-1])[: len(keys)]])  # most are like the one before
    return np.bincount(keys // most, minlength=len(trees))
