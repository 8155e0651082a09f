"""Packed rows against a plain loop: ids, aligned columns, starts, padding, and groups of rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.tokens import offsets_of
from chatmill.errors import ConfigError, DataError
from chatmill.pack.assemble import PackedRows, assemble_rows, iter_rows
from chatmill.pack.plan import Plan, Strategy, plan

PAD = -7


@st.composite
def documents(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, Plan]:
    capacity = draw(st.integers(1, 30))
    lengths = np.array(draw(st.lists(st.integers(1, capacity), max_size=40)), dtype=np.int64)
    offsets = offsets_of(lengths)
    ids = np.arange(100, 100 + offsets[-1], dtype=np.int32)
    return ids, offsets, plan(lengths, capacity, draw(st.sampled_from(list(Strategy))))


def reference(
    made: Plan, values: list[float], offsets: list[int], pad: float
) -> tuple[list[list[float]], list[list[int]]]:
    """Rows and starts, written token by token."""
    rows, starts = [], []
    for b in range(made.bins):
        row: list[float] = []
        begun = []
        for d in made.bin(b).tolist():
            begun.append(len(row))
            row += values[offsets[d] : offsets[d + 1]]
        rows.append(row + [pad] * (made.capacity - len(row)))
        starts.append(begun)
    return rows, starts


@settings(max_examples=200)
@given(documents())
def test_rows_are_what_a_loop_writes(data: tuple[np.ndarray, np.ndarray, Plan]) -> None:
    ids, offsets, made = data
    weights = (ids / 8).astype(np.float32)
    kinds = (ids % 40).astype(np.uint8)
    packed = assemble_rows(made, ids, offsets, PAD, columns={"weights": (weights, 0.0), "kinds": (kinds, 0)})
    rows, starts = reference(made, ids.tolist(), offsets.tolist(), PAD)
    assert packed.ids.tolist() == rows
    assert packed.ids.shape == (made.bins, made.capacity)
    assert packed.ids.dtype == np.int32
    assert [packed.starts(r).tolist() for r in range(len(packed))] == starts
    assert packed.documents.tolist() == made.order.tolist()
    assert packed.row_lengths.tolist() == made.bin_lengths(np.diff(offsets)).tolist()
    for name, values in (("weights", weights), ("kinds", kinds)):
        assert packed.columns[name].tolist() == reference(made, values.tolist(), offsets.tolist(), 0)[0]
        assert packed.columns[name].dtype == values.dtype


@settings(max_examples=60)
@given(documents(), st.integers(1, 9))
def test_groups_of_rows_are_the_rows(data: tuple[np.ndarray, np.ndarray, Plan], rows: int) -> None:
    ids, offsets, made = data
    columns = {"weights": (ids.astype(np.float32), 0.0)}
    whole = assemble_rows(made, ids, offsets, PAD, columns=columns)
    groups = list(iter_rows(made, ids, offsets, PAD, rows_at_a_time=rows, columns=columns))
    assert [len(g) for g in groups] == [rows] * (made.bins // rows) + [made.bins % rows] * (made.bins % rows > 0)
    for name in ("ids", "row_lengths", "start_values", "documents"):
        joined = [value for g in groups for value in getattr(g, name).tolist()]
        assert joined == getattr(whole, name).tolist()
    assert [row for g in groups for row in g.columns["weights"].tolist()] == whole.columns["weights"].tolist()
    assert [g.starts(r).tolist() for g in groups for r in range(len(g))] == [
        whole.starts(r).tolist() for r in range(len(whole))
    ]


def test_some_rows_and_none() -> None:
    lengths = np.array([4, 3, 2, 5])
    offsets = offsets_of(lengths)
    ids = np.arange(14, dtype=np.int32)
    made = plan(lengths, 6, "greedy")
    some = assemble_rows(made, ids, offsets, 0, first=1, last=2)
    assert some.ids.tolist() == [[4, 5, 6, 7, 8, 0]]
    assert some.starts(0).tolist() == [0, 3]
    assert some.documents.tolist() == [1, 2]
    empty = assemble_rows(plan([], 6), np.empty(0, dtype=np.int32), np.zeros(1, dtype=np.int64), 0)
    assert isinstance(empty, PackedRows)
    assert empty.ids.shape == (0, 6)
    assert empty.start_offsets.tolist() == [0]


def test_a_pad_id_that_is_also_a_real_token_is_told_by_length() -> None:
    ids = np.array([5, 9, 9, 9], dtype=np.int32)
    packed = assemble_rows(plan([2, 2], 6), ids, np.array([0, 2, 4]), 9)
    assert packed.ids.tolist() == [[5, 9, 9, 9, 9, 9]]
    assert packed.row_lengths.tolist() == [4]


def test_errors() -> None:
    ids = np.arange(6, dtype=np.int32)
    made = plan([2, 4], 6)
    with pytest.raises(DataError, match=r"2 documents.* 3"):
        assemble_rows(made, ids, np.array([0, 2, 4, 6]), 0)
    with pytest.raises(DataError, match="bin 0 has 7 tokens and a capacity of 6"):
        assemble_rows(made, np.arange(7, dtype=np.int32), np.array([0, 3, 7]), 0)
    with pytest.raises(DataError, match=r"'ids' has shape \(6,\).* 5 tokens"):
        assemble_rows(made, ids, np.array([0, 1, 5]), 0)
    with pytest.raises(DataError, match=r"'weights' has shape \(5,\).* 6 tokens"):
        assemble_rows(made, ids, np.array([0, 2, 6]), 0, columns={"weights": (np.ones(5), 0)})
    with pytest.raises(ConfigError, match="rows_at_a_time"):
        next(iter_rows(made, ids, np.array([0, 2, 6]), 0, rows_at_a_time=0))
