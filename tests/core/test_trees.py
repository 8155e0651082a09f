"""Random rows put into trees, against a slow reference made of single tokens."""

from __future__ import annotations

import itertools
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from chatmill.core.kinds import REPEATED
from chatmill.core.native.trees import AGAIN, COPY, GrownTrees, RowColumns, grow_trees, tree_ends
from chatmill.core.tokens import offsets_of, ranges
from chatmill.core.trees import Branches, joined, rows_of_tree
from chatmill.errors import DataError
from tests.oracles import ends_by_python, trees_by_python

Token = tuple[int, int, float]
"""Id, kind and weight."""
LATER = 64
"""Added to the kind of a token, in rows that lack something of their conversation before it."""


@st.composite
def families(draw: st.DrawFn) -> list[list[Token]]:
    """Rows that begin alike and go apart, as those of one conversation do."""
    rows: list[list[Token]] = []
    token = st.tuples(st.integers(0, 2), st.sampled_from([33, 34, 34 | REPEATED]), st.sampled_from([0.0, 1.0, 0.5]))
    for _ in range(draw(st.integers(1, 6))):
        kept: list[Token] = []
        if rows:
            before = draw(st.sampled_from(rows))
            kept = before[: draw(st.integers(0, len(before)))]
        more = draw(st.lists(token, min_size=0 if kept else 1, max_size=6))
        rows.append([*kept, *more])
    return rows


Groups = list[list[list[Token]]]


def borders_of(groups: Groups) -> NDArray[np.int64]:
    return offsets_of(np.array([len(group) for group in groups], dtype=np.int64))


def shared_columns(groups: Groups) -> RowColumns:
    """The rows without what they begin with like an earlier one, wherever one does."""
    rows: list[list[Token]] = []
    parents: list[int] = []
    begins: list[int] = []
    for group in groups:
        first = len(parents)
        for number, row in enumerate(group):
            same = [sum(itertools.takewhile(bool, map(operator.eq, row, other))) for other in group[:number]]
            begins.append(max(same, default=0))
            parents.append(first + same.index(begins[-1]) if begins[-1] else -1)
            rows.append(row[begins[-1] :])
    return columns_of([rows], parents, begins)


def columns_of(groups: Groups, parents: list[int] | None = None, begins: list[int] | None = None) -> RowColumns:
    """All rows, whole unless parents are given."""
    rows = [row for group in groups for row in group]
    tokens = [token for row in rows for token in row]
    return RowColumns(
        ids=np.array([token[0] for token in tokens], dtype=np.int32),
        offsets=offsets_of(np.array([len(row) for row in rows], dtype=np.int64)),
        kinds=np.array([token[1] & ~LATER for token in tokens], dtype=np.uint8),
        weights=np.array([token[2] for token in tokens], dtype=np.float32),
        kept=np.ones(len(tokens), dtype=np.uint8),
        later=np.array([token[1] & LATER > 0 for token in tokens], dtype=np.uint8),
        parents=np.array(parents or [-1] * len(rows), dtype=np.int64),
        begins=np.array(begins or [0] * len(rows), dtype=np.int64),
    )


def stored(columns: RowColumns, made: GrownTrees) -> list[list[float]]:
    """Ids, kinds, weights and states of all stored tokens."""
    at = ranges(made.firsts, made.sizes)
    values = (columns.ids[at], columns.kinds[at], columns.weights[at], np.repeat(made.states, made.sizes))
    return [column.tolist() for column in values]


def key(row: list[Token]) -> tuple[tuple[int, int], ...]:
    """What rows share: ids and kinds without the flag."""
    return tuple((one, kind & ~REPEATED) for one, kind, _ in row)


def maximal(rows: list[list[Token]]) -> set[tuple[tuple[int, int], ...]]:
    """Rows that no other one begins with."""
    keys = {key(row) for row in rows}
    return {one for one in keys if not any(other[: len(one)] == one for other in keys - {one})}


def branches_of(made: GrownTrees) -> Branches:
    return Branches(offsets=offsets_of(made.branches), starts=made.starts, depths=made.depths)


@settings(max_examples=400)
@given(st.lists(families(), min_size=1, max_size=3), st.integers(0, 8))
def test_trees_taken_apart_give_the_rows_with_the_fewest_tokens(groups: Groups, room: int) -> None:
    longest = max(len(row) for group in groups for row in group)
    capacity = 10**6 if room == 0 else longest + room - 1
    columns, slow, shared = columns_of(groups), columns_of(groups), shared_columns(groups)
    borders = borders_of(groups)
    made, of_shared = grow_trees(columns, borders, capacity), grow_trees(shared, borders, capacity)
    for fast, by_python in zip(made, trees_by_python(slow, borders, capacity), strict=True):
        assert np.array_equal(fast, by_python)
    assert stored(shared, of_shared) == stored(columns, made) == stored(slow, made)
    assert all(map(np.array_equal, of_shared[3:], made[3:]))

    branches = branches_of(made)
    positions, ends = branches.positions_and_ends(made.lengths)
    assert made.lengths.max() <= capacity
    borders_of_trees = offsets_of(made.lengths)
    all_sources, all_states = ranges(made.firsts, made.sizes), np.repeat(made.states, made.sizes)
    seen: list[set[tuple[tuple[int, int], ...]]] = [set() for _ in groups]
    trained: list[dict[tuple[tuple[int, int], ...], float]] = [{} for _ in groups]
    for tree, group in enumerate(made.groups.tolist()):
        span = slice(borders_of_trees[tree], borders_of_trees[tree + 1])
        source, state = all_sources[span], all_states[span]
        starts = branches.starts[branches.offsets[tree] : branches.offsets[tree + 1]]
        assert np.array_equal(np.flatnonzero(state == COPY), starts)
        for path, older in rows_of_tree(ends[span], starts):
            assert np.array_equal(positions[span][path], np.arange(len(path)))
            row = tuple((int(columns.ids[at]), int(columns.kinds[at]) & ~REPEATED) for at in source[path])
            seen[group].add(row)
            for n in range(older, len(path)):
                if state[path[n]] == 0:
                    assert row[: n + 1] not in trained[group], "a token of a tree is stored twice"
                    trained[group][row[: n + 1]] = float(columns.weights[source[path[n]]])
    for number, rows in enumerate(groups):
        assert seen[number] == maximal(rows)
        most: dict[tuple[tuple[int, int], ...], float] = {}
        for row in rows:
            for n in range(len(row)):
                at = key(row)[: n + 1]
                most[at] = max(most.get(at, 0.0), row[n][2])
        assert trained[number] == most, "every target in its context, and none twice"
        if capacity == 10**6:
            mine = made.groups == number
            leaves, roots = len(maximal(rows)), len({key(row)[0] for row in rows})
            assert made.lengths[mine].sum() == len(most) + leaves - roots
            assert mine.sum() == roots
    assert (made.states == AGAIN).any() <= (capacity < 10**6)


@settings(max_examples=300)
@given(st.lists(families(), min_size=1, max_size=3), st.lists(st.integers(0, 6), min_size=18, max_size=18))
def test_no_trained_token_is_lost_where_rows_lack_what_was_before_it(groups: Groups, begins: list[int]) -> None:
    """Each row has all of its conversation up to some token, and other parts of it from there on."""
    first = iter(begins)
    later = [
        [
            [(one, kind | LATER if at >= begin else kind, weight) for at, (one, kind, weight) in enumerate(row)]
            for row, begin in zip(rows, first, strict=False)
        ]
        for rows in groups
    ]
    columns, slow, borders = columns_of(later), columns_of(later), borders_of(later)
    made = grow_trees(columns, borders, 10**6)
    for fast, by_python in zip(made, trees_by_python(slow, borders, 10**6), strict=True):
        assert np.array_equal(fast, by_python)
    assert stored(columns, made) == stored(slow, made)
    _, _, weights, states = stored(columns, made)
    stored_weights = sum(weight for weight, state in zip(weights, states, strict=True) if state == 0 and weight > 0)
    alone = sum(weight for rows in later for row in rows for _, kind, weight in row if kind & LATER)
    assert stored_weights >= alone
    every = columns_of(
        [[[(one, kind | LATER, weight) for one, kind, weight in row] for row in rows] for rows in groups]
    )
    count = np.count_nonzero(every.weights > 0)
    made = grow_trees(every, borders, 10**6)
    _, _, weights, states = stored(every, made)
    assert sum(weight > 0 and state == 0 for weight, state in zip(weights, states, strict=True)) == count


def test_a_path_may_have_any_number_of_branches() -> None:
    """Each row goes on from the one before by a token; the last leaves the whole path, and does not fit its tree."""
    count = 300_000
    rows = RowColumns(
        ids=np.append(np.arange(count), [-1, -2]).astype(np.int32),
        offsets=np.append(np.arange(count), [count, count + 2]),
        kinds=np.zeros(count + 2, dtype=np.uint8),
        weights=np.zeros(count + 2, dtype=np.float32),
        kept=np.ones(count + 2, dtype=np.uint8),
        later=np.zeros(count + 2, dtype=np.uint8),
        parents=np.append(np.arange(-1, count - 1), count - 2),
        begins=np.append(np.arange(count), count - 1),
    )
    made = grow_trees(rows, np.array([0, count + 1]), count + 1)
    assert made.lengths.tolist() == [count, count + 1]
    again = made.firsts[made.states == AGAIN]
    assert np.array_equal(rows.ids[again], np.arange(count - 1))


@settings(max_examples=200)
@given(families())
def test_the_rule_of_ends_is_the_mask_of_ancestors(rows: list[list[Token]]) -> None:
    made = grow_trees(columns_of([rows]), borders_of([rows]), 10**6)
    branches = branches_of(made)
    positions, ends = branches.positions_and_ends(made.lengths)
    counts = (made.lengths, branches.counts, branches.starts, branches.depths)
    for fast, slow in zip(tree_ends(*counts), ends_by_python(*counts), strict=True):
        assert np.array_equal(fast, slow)
    for tree, (first, last) in enumerate(zip(offsets_of(made.lengths), np.cumsum(made.lengths), strict=False)):
        length = int(last - first)
        starts = set(branches.starts[branches.offsets[tree] : branches.offsets[tree + 1]].tolist())
        parent: list[int] = []  # of each token, by the path of positions
        for i in range(length):
            depth = positions[first + i]
            parent.append(next((j for j in range(i - 1, -1, -1) if positions[first + j] == depth - 1), -1))
            if i not in starts and i:
                assert parent[i] == i - 1
        for q in range(length):
            ancestors, at = {q}, q
            while parent[at] >= 0:
                at = parent[at]
                ancestors.add(at)
            assert {k for k in range(length) if k <= q < ends[first + k]} == ancestors


def test_trees_are_cut_taken_and_joined() -> None:
    branches = Branches(offsets=np.array([0, 2, 2, 3]), starts=np.array([4, 6, 2]), depths=np.array([2, 1, 0]))
    assert branches.cut(np.array([5, 3, 2])).starts.tolist() == [4]
    assert branches.cut(np.array([5, 3, 2])).offsets.tolist() == [0, 1, 1, 1]
    some = branches.take(np.array([2, 0]))
    assert (some.offsets.tolist(), some.starts.tolist(), some.depths.tolist()) == ([0, 1, 3], [2, 4, 6], [0, 2, 1])
    both = joined([Branches.none(1), some])
    assert (both.offsets.tolist(), both.depths.tolist()) == ([0, 0, 1, 3], [0, 2, 1])


@pytest.mark.parametrize(
    ("starts", "depths"), [([9], [0]), ([2], [2]), ([2], [-1]), ([3, 2], [1, 1]), ([0], [0]), ([5], [1])]
)
def test_a_branch_that_cannot_be_is_refused(starts: list[int], depths: list[int]) -> None:
    branches = Branches(offsets=np.array([0, len(starts)]), starts=np.array(starts), depths=np.array(depths))
    with pytest.raises(DataError, match="does not fit its tree"):
        branches.positions_and_ends(np.array([5]))
    with pytest.raises(IndexError):
        ends_by_python(np.array([5]), branches.counts, branches.starts, branches.depths)
