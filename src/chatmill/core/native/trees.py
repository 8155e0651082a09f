"""Rows put into trees, and positions and ends of their tokens: in compiled code where it is there, else in Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import REPEATED
from chatmill.core.native.library import library

Ints = NDArray[np.int64]
OUTSIDE = "a row, a group or a branch lies outside its array"
COPY, AGAIN = 1, 2
"""States of a stored token: the copy that a branch begins with, and one that an earlier tree of its group has too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowColumns:
    """Rows one behind the other; kinds, weights and `kept` are changed where rows share tokens."""

    ids: NDArray[np.int32]
    offsets: Ints
    kinds: NDArray[np.uint8]
    weights: NDArray[np.float32]
    kept: NDArray[np.uint8]
    """1 for tokens that no other row was given as a repetition."""


class GrownTrees(NamedTuple):
    """Trees one behind the other."""

    source: Ints
    """For each stored token the token of the rows that holds its values."""
    state: NDArray[np.uint8]
    """For each stored token 0, `COPY` or `AGAIN`."""
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

    Rows share tokens from the beginning on while ids agree, and kinds but for the flag of repeated answers. Branches
    are in the order of the rows that open them. Rows that share nothing are trees of their own, and so is what does not
    fit: the path that leads there is repeated. No row is longer than `capacity`.
    """
    compiled = library()
    count, tokens = len(rows.offsets) - 1, len(rows.ids)
    if count and (groups[0] != 0 or groups[-1] != count or rows.offsets[-1] != tokens):
        raise IndexError(OUTSIDE)
    if compiled is None:
        return trees_by_python(rows, groups, capacity)
    columns = (rows.ids, rows.offsets, rows.kinds, rows.weights, rows.kept)
    assert all(column.flags.c_contiguous for column in columns)
    most = int(np.diff(groups).max(initial=0))
    nodes = np.empty((2 * most + 1, 6), dtype=np.int64)
    source, state = np.empty(tokens, dtype=np.int64), np.empty(tokens, dtype=np.uint8)
    out = np.empty((5, count), dtype=np.int64)
    made = compiled.chatmill_trees(
        *(column.ctypes.data for column in columns),
        *(count, groups.ctypes.data, len(groups) - 1, min(capacity, np.iinfo(np.int64).max), nodes.ctypes.data, most),
        *(source.ctypes.data, state.ctypes.data, *(column.ctypes.data for column in out)),
    )
    if made < 0:
        raise IndexError(OUTSIDE)
    starts, depths, lengths, branches, tree_groups = out
    stored, branch_count = int(lengths[:made].sum()), int(branches[:made].sum())
    return GrownTrees(
        source[:stored],
        state[:stored],
        *(column[:branch_count] for column in (starts, depths)),
        *(column[:made] for column in (lengths, branches, tree_groups)),
    )


@dataclass(slots=True)
class _Node:
    """A stretch of tokens that the same rows share."""

    owner: int
    start: int
    end: int
    parent: _Node | None
    children: list[_Node]


class _Planting:
    """The rows of one group, put into a tree one after the other."""

    def __init__(self, rows: RowColumns) -> None:
        self._rows = rows
        self.root = _Node(-1, 0, 0, None, [])

    def _shared(self, one: int, other: int, depth: int, end: int) -> int:
        """How far two rows agree from a depth on, up to `end`."""
        rows, length = self._rows, end - depth
        a, b = int(rows.offsets[one]) + depth, int(rows.offsets[other]) + depth
        differ = rows.ids[a : a + length] != rows.ids[b : b + length]
        differ |= ((rows.kinds[a : a + length] ^ rows.kinds[b : b + length]) & ~np.uint8(REPEATED)) != 0
        return depth + int(np.argmax(differ)) if differ.any() else end

    def _merge(self, into: int, other: int, start: int, end: int) -> None:
        rows = self._rows
        a, b = (slice(int(rows.offsets[row]) + start, int(rows.offsets[row]) + end) for row in (into, other))
        rows.kinds[a] &= rows.kinds[b] | ~np.uint8(REPEATED)
        rows.kept[a] |= rows.kept[b]
        np.maximum(rows.weights[a], rows.weights[b], out=rows.weights[a])

    def add(self, row: int) -> None:
        """Put a row into the tree."""
        length, at, depth = int(self._rows.offsets[row + 1] - self._rows.offsets[row]), self.root, 0
        while depth < length:
            for node in at.children:
                stop = self._shared(node.owner, row, depth, min(node.end, length))
                if stop > depth:
                    break
            else:
                at.children.append(_Node(row, depth, length, at, []))
                return
            self._merge(node.owner, row, depth, stop)
            depth = stop
            if depth < min(node.end, length):
                rest = _Node(node.owner, depth, node.end, node, node.children)
                for child in rest.children:
                    child.parent = rest
                node.end, node.children = depth, [rest]
            at = node


def trees_by_python(rows: RowColumns, groups: Ints, capacity: int) -> GrownTrees:
    """What `grow_trees` gives, slower."""
    source: list[Ints] = []
    state: list[NDArray[np.uint8]] = []
    branches: list[tuple[int, int]] = []
    trees: list[list[int]] = []  # tokens, branches and group

    def write(node: _Node, start: int, end: int, what: int) -> None:
        base = int(rows.offsets[node.owner])
        source.append(np.arange(base + start, base + end, dtype=np.int64))
        state.append(np.full(end - start, what, dtype=np.uint8))

    for group, (begin, end) in enumerate(zip(groups[:-1].tolist(), groups[1:].tolist(), strict=True)):
        planting = _Planting(rows)
        for row in range(begin, end):
            planting.add(row)
        waiting = planting.root.children[::-1]  # first nodes of branches, the next one last
        while waiting:
            fresh = waiting.pop()
            chain = [fresh]
            while chain[-1].children:
                waiting += chain[-1].children[:0:-1]
                chain.append(chain[-1].children[0])
            depth, more = fresh.start, chain[-1].end - fresh.start
            above = fresh.parent
            assert above is not None
            if depth == 0 or trees[-1][0] + 1 + more > capacity:
                trees.append([depth, 0, group])
                path = []
                while above is not None and above.end:
                    path.append(above)
                    above = above.parent
                for node in reversed(path):
                    write(node, node.start, node.end, AGAIN)
            else:
                branches.append((trees[-1][0], depth - 1))
                write(above, depth - 1, depth, COPY)
                trees[-1][0] += 1
                trees[-1][1] += 1
            for node in chain:
                write(node, node.start, node.end, 0)
            trees[-1][0] += more
    facts = np.array(trees, dtype=np.int64).reshape(-1, 3).T
    places = np.array(branches, dtype=np.int64).reshape(-1, 2).T
    empty = [np.empty(0, dtype=np.int64)]
    return GrownTrees(
        np.concatenate([*source, *empty]), np.concatenate([*state, np.empty(0, dtype=np.uint8)]), *places, *facts
    )


def tree_ends(lengths: Ints, branches: Ints, starts: Ints, depths: Ints) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Position and end of every token of trees that follow each other, counted in its own tree.

    `lengths` and `branches` have the tokens and branches of each tree; a branch that cannot be is an `IndexError`.
    """
    if len(lengths) != len(branches) or not len(starts) == len(depths) == branches.sum():
        raise IndexError(OUTSIDE)
    if (lengths < 0).any() or (branches < 0).any():
        raise IndexError(OUTSIDE)
    compiled = library()
    if compiled is None:
        return ends_by_python(lengths, branches, starts, depths)
    given = [np.ascontiguousarray(column, dtype=np.int64) for column in (lengths, branches, starts, depths)]
    tokens = int(lengths.sum())
    path = np.empty(int(lengths.max(initial=0)) + 1, dtype=np.int32)
    positions, ends = np.empty((2, tokens), dtype=np.int32)
    found = compiled.chatmill_tree_ends(
        *(given[0].ctypes.data, given[1].ctypes.data, len(lengths), given[2].ctypes.data, given[3].ctypes.data),
        *(path.ctypes.data, positions.ctypes.data, ends.ctypes.data),
    )
    if found != tokens:
        raise IndexError(OUTSIDE)
    return positions, ends


def ends_by_python(
    lengths: Ints, branches: Ints, starts: Ints, depths: Ints
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """What `tree_ends` gives, slower."""
    positions, ends = np.empty((2, int(lengths.sum())), dtype=np.int32)
    path = np.empty(int(lengths.max(initial=0)) + 1, dtype=np.int32)
    at = branch = 0
    for length, count in zip(lengths.tolist(), branches.tolist(), strict=True):
        begin = depth = 0
        for number in range(count + 1):
            end = length if number == count else int(starts[branch + number])
            if end < begin or end > length or (end == begin and count):
                raise IndexError(OUTSIDE)
            reached, index = depth + end - begin, np.arange(begin, end, dtype=np.int32)
            positions[at + begin : at + end] = np.arange(depth, reached)
            path[depth:reached] = index
            depth = 0 if number == count else int(depths[branch + number])
            if depth < 0 or (depth >= reached and number < count):
                raise IndexError(OUTSIDE)
            ends[at + path[depth:reached]] = end
            begin = end
        at, branch = at + length, branch + count
    return positions, ends
