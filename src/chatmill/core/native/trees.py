"""Rows put into trees, and positions and ends of their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.library import call, int64s, memory, struct

Ints = NDArray[np.int64]
OUTSIDE = "a row, a group or a branch lies outside its array"
COPY, AGAIN = 1, 2
"""States of a stored token: the copy that a branch begins with, and one that an earlier tree of its group has too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowColumns:
    """Rows one after another; kinds, weights and flags are changed where rows share tokens."""

    ids: NDArray[np.int32]
    offsets: Ints
    kinds: NDArray[np.uint8]
    weights: NDArray[np.float32]
    kept: NDArray[np.uint8]
    """1 for tokens that no other row was given as a repetition."""
    later: NDArray[np.uint8]
    """1 for tokens before which something is left out of their conversation, as overflow does it."""
    parents: Ints
    """The earlier row of its group whose first tokens a row begins with, which it does not have itself; -1 for none."""
    begins: Ints
    """How many tokens these are."""


class GrownTrees(NamedTuple):
    """Trees one after another."""

    firsts: Ints
    """Stored tokens are slices of those of the rows, which hold their values: where each slice begins there."""
    sizes: Ints
    states: Ints
    """For each slice 0, `COPY` or `AGAIN`."""
    starts: Ints
    """Where each branch begins in its tree, with the copy of the last shared token."""
    depths: Ints
    """The position of that copy."""
    lengths: Ints
    """Tokens of each tree."""
    branches: Ints
    """Branches of each tree, the trunk not counted."""
    groups: Ints
    """The group of each tree."""


def grow_trees(rows: RowColumns, groups: Ints, capacity: int) -> GrownTrees:
    """Put the rows of each group, `groups[i]` up to `groups[i + 1]`, into trees of up to `capacity` tokens.

    Rows share tokens from the beginning on while ids agree, and kinds but for the flag of repeated answers, up to a
    later token that both train: it is another answer in each, and each is to be trained. Branches
    are in the order of the rows that open them. Rows that share nothing are trees of their own, and so is what does not
    fit: the path that leads there is repeated. No row is longer than `capacity`.
    """
    count = len(rows.offsets) - 1
    _check_rows(rows)
    if count and (groups[0] != 0 or groups[-1] != count):
        raise IndexError(OUTSIDE)
    bases, ends = rows.offsets[:-1] - rows.begins, rows.begins + np.diff(rows.offsets)
    columns = (rows.ids, bases, rows.parents, rows.begins, ends, rows.kinds, rows.weights, rows.kept, rows.later)
    assert all(column.flags.c_contiguous for column in columns)
    most = int(np.diff(groups).max(initial=0))
    nodes, leaves = np.empty((2 * most + 1, 6), dtype=np.int64), np.empty(count, dtype=np.int64)
    slices = struct(None, 0, 0)
    out = np.empty((5, count), dtype=np.int64)
    limits = (len(groups) - 1, min(capacity, np.iinfo(np.int64).max), nodes, most, leaves)
    tree_count = call("chatmill_trees", *columns, count, groups, *limits, *out, slices)
    address, slice_count, _ = slices.tolist()
    stored = memory(address, 3 * slice_count, np.int64).reshape(-1, 3)
    call("chatmill_free_list", slices)
    if tree_count < 0:
        raise IndexError(OUTSIDE)
    starts, depths, lengths, branches, tree_groups = out
    branch_count = int(branches[:tree_count].sum())
    return GrownTrees(
        *stored.T,
        *(column[:branch_count] for column in (starts, depths)),
        *(column[:tree_count] for column in (lengths, branches, tree_groups)),
    )


def _check_rows(rows: RowColumns) -> None:
    """Refuse columns that do not fit each other: compiled code reads them side by side."""
    count, tokens = len(rows.offsets) - 1, len(rows.ids)
    fit = len(rows.parents) == len(rows.begins) == count
    fit &= len(rows.kinds) == len(rows.weights) == len(rows.kept) == tokens
    if not fit or not rises(rows.offsets, tokens):
        raise IndexError(OUTSIDE)


def rises(offsets: Ints, last: int) -> bool:
    """Return whether offsets go from 0 to `last`, and none is less than the one before it."""
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != last:
        return False
    return bool((offsets[1:] >= offsets[:-1]).all())


class TreeRuns(NamedTuple):
    """The tokens of trees, and their runs: nothing changes inside of one, and no tree or branch begins there."""

    ids: NDArray[np.int32]
    starts: Ints
    kinds: NDArray[np.uint8]
    messages: NDArray[np.int32]
    weights: NDArray[np.float32]
    injected: NDArray[np.bool_]


def tree_runs(trees: GrownTrees, rows: RowColumns, run_offsets: Ints, run_messages: NDArray[np.int32]) -> TreeRuns:
    """Write the tokens of trees, which were grown of these rows; the runs of the rows say whose messages they are.

    What an earlier tree has is context here, and neither that nor the copy at the begin of a branch is a target.
    """
    slices, offsets = int64s(trees.firsts, trees.sizes, trees.states), np.append(0, np.cumsum(trees.lengths))
    tokens, (firsts, sizes, states) = len(rows.ids), slices
    _check_rows(rows)
    if not len(firsts) == len(sizes) == len(states) or len(run_offsets) - 1 != len(run_messages):
        raise IndexError(OUTSIDE)
    if (firsts < 0).any() or (sizes < 1).any() or (sizes > tokens - firsts).any() or not rises(run_offsets, tokens):
        raise IndexError(OUTSIDE)
    count = int(sizes.sum())
    if count != offsets[-1]:
        raise IndexError(OUTSIDE)
    dtypes = (np.int32, np.int64, np.uint8, np.int32, np.float32, np.bool_)
    out: list[NDArray[Any]] = [np.empty(count, dtype=dtype) for dtype in dtypes]
    columns = (rows.ids, rows.kinds, rows.weights, rows.kept, run_offsets, run_messages)
    assert all(column.flags.c_contiguous for column in columns)
    given = (*slices, len(slices[0]), offsets, *columns, len(run_messages))
    runs = call("chatmill_tree_runs", *given, *out)
    return TreeRuns(out[0], *(column[:runs].copy() for column in out[1:]))


def tree_ends(lengths: Ints, branches: Ints, starts: Ints, depths: Ints) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Position and end of every token of trees that follow each other, counted in its own tree.

    `lengths` and `branches` have the tokens and branches of each tree; a branch that cannot be is an `IndexError`.
    """
    if len(lengths) != len(branches) or len(starts) != len(depths):
        raise IndexError(OUTSIDE)
    for counts, most in ((lengths, np.iinfo(np.int32).max), (branches, len(starts))):  # so that no sum wraps around
        if len(counts) and not 0 <= counts.min() <= counts.max() <= most:
            raise IndexError(OUTSIDE)
    if branches.sum() != len(starts):
        raise IndexError(OUTSIDE)
    tokens = int(lengths.sum())
    path = np.empty(int(lengths.max(initial=0)) + 1, dtype=np.int32)
    positions, ends = np.empty((2, tokens), dtype=np.int32)
    lengths, branches, starts, depths = int64s(lengths, branches, starts, depths)
    if call("chatmill_tree_ends", lengths, branches, len(lengths), starts, depths, path, positions, ends) != tokens:
        raise IndexError(OUTSIDE)
    return positions, ends
