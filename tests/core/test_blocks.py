"""Document starts to positions, segments and cu_seqlens, against slow loops over single tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.core.blocks import boundaries_from_starts, boundaries_from_token, whole_rows
from chatmill.core.tokens import offsets_of
from chatmill.errors import ChatmillError, DataError

Rows = list[tuple[int, list[int]]]


@st.composite
def packed_rows(draw: st.DrawFn) -> tuple[Rows, int]:
    """(tokens, document starts) of some rows, and a width that holds them; empty rows among them."""
    rows: Rows = []
    for lengths in draw(st.lists(st.lists(st.integers(1, 5), max_size=5), min_size=1, max_size=5)):
        rows.append((sum(lengths), offsets_of(np.array(lengths, dtype=np.int64))[:-1].tolist()))
    width = max(tokens for tokens, _ in rows) + draw(st.integers(0, 4))
    return rows, width


def lay_out(rows: Rows, width: int):
    lengths = np.array([tokens for tokens, _ in rows], dtype=np.int64)
    return boundaries_from_starts([starts for _, starts in rows], lengths).segments(width)


def reference(rows: Rows, width: int) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Positions, segment numbers and cu_seqlens, token by token: padding is one more segment."""
    positions, segments, cu_seqlens = [], [], []
    for r, (tokens, starts) in enumerate(rows):
        row_positions: list[int] = []
        row_segments: list[int] = []
        for t in range(width):
            if t in starts or t == tokens or t == 0:
                cu_seqlens.append(r * width + t)
                row_positions.append(0)
                row_segments.append(row_segments[-1] + 1 if row_segments else 0)
            else:
                row_positions.append(row_positions[-1] + 1)
                row_segments.append(row_segments[-1])
        positions.append(row_positions)
        segments.append(row_segments)
    return positions, segments, [*cu_seqlens, len(rows) * width]


@given(packed_rows())
def test_all_forms_equal_the_token_by_token_reference(case: tuple[Rows, int]) -> None:
    rows, width = case
    positions, segments, cu_seqlens = reference(rows, width)
    laid = lay_out(rows, width)
    assert laid.position_ids.tolist() == positions
    assert laid.seq_idx.tolist() == segments
    assert laid.cu_seqlens().tolist() == cu_seqlens
    assert laid.max_seqlen == max(np.diff(cu_seqlens), default=0)


@given(packed_rows())
def test_joined_rows_are_one_row_with_all_documents(case: tuple[Rows, int]) -> None:
    rows, _ = case
    lengths = np.array([tokens for tokens, _ in rows], dtype=np.int64)
    joined = boundaries_from_starts([starts for _, starts in rows], lengths).joined()
    expected, before = [], 0
    for tokens, starts in rows:
        expected += [before + start for start in starts]
        before += tokens
    assert joined.starts.tolist() == expected
    assert joined.lengths.tolist() == [before]
    assert joined.counts.tolist() == [len(expected)]


@given(packed_rows(), st.integers(1, 12))
def test_a_cut_drops_the_starts_beyond_it(case: tuple[Rows, int], most: int) -> None:
    rows, _ = case
    lengths = np.array([tokens for tokens, _ in rows], dtype=np.int64)
    cut = boundaries_from_starts([starts for _, starts in rows], lengths).cut(most)
    assert cut.lengths.tolist() == [min(tokens, most) for tokens, _ in rows]
    assert cut.starts.tolist() == [s for _, starts in rows for s in starts if s < most]
    assert cut.counts.tolist() == [sum(s < most for s in starts) for _, starts in rows]


@given(st.lists(st.lists(st.integers(0, 3), max_size=8), min_size=1, max_size=4), st.booleans())
def test_boundaries_from_a_token(rows: list[list[int]], after: bool) -> None:
    found = boundaries_from_token([np.array(row, dtype=np.int64) for row in rows], 2, after=after)
    expected = [[t for t in range(len(row)) if t == 0 or (row[t - 1] == 2 if after else row[t] == 2)] for row in rows]
    assert found.starts.tolist() == [t for row in expected for t in row]
    assert found.counts.tolist() == [len(row) for row in expected]


def test_first_tokens_of_later_documents() -> None:
    boundaries = boundaries_from_starts([[0, 2], [0], [0, 1, 4]], np.array([3, 3, 5]))
    assert boundaries.later_documents(6).tolist() == [2, 13, 16]
    assert whole_rows(np.array([3, 0])).later_documents(6).tolist() == []


def test_cu_seqlens_of_a_fixed_size_repeat_the_last_value() -> None:
    laid = lay_out([(3, [0, 2]), (4, [0])], 5)
    assert laid.cu_seqlens().tolist() == [0, 2, 3, 5, 9, 10]
    padded = laid.cu_seqlens(9)
    assert padded.tolist() == [0, 2, 3, 5, 9, 10, 10, 10, 10]
    assert padded.dtype == np.int32
    with pytest.raises(DataError, match=r"5 segments.*6 cu_seqlens.*cu_seqlens_size is 5"):
        laid.cu_seqlens(5)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([[0, 2], [1, 3]], r"row 1: entry 0 is 1; the first entry must be 0"),
        ([[0, 2], [0, 3, 3]], r"row 1: entry 2 is 3; entries must increase"),
        ([[0, 2, 1], [0]], r"row 0: entry 2 is 1; entries must increase"),
        ([[0], [0, 4]], r"row 1: entry 1 is 4; entries must lie inside the row \(the row has 4 tokens"),
        ([[0], [0, -1]], r"row 1: entry 1 is -1; entries must increase"),
        ([[0], []], r"row 1 is empty, but the row has 4 tokens"),
        ([[0], [0.0, 1.5]], r"row 1 must be a flat list of integers"),
        ([[0], [[0, 1]]], r"row 1 must be a flat list of integers"),
        ([[0]], r"has 1 rows, but the batch has 2"),
        (np.array([[0, -1, 2], [0, 1, -1]]), r"row 0: entry 1 is -1"),
        (np.array([[0, -1, -1], [-1, -1, -1]]), r"row 1 is empty"),
    ],
)
def test_wrong_starts_are_refused_with_row_and_value(starts: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        boundaries_from_starts(starts, np.array([5, 4]))  # type: ignore[arg-type]
    assert isinstance(caught.value, ChatmillError)


def test_starts_may_be_a_matrix_padded_with_minus_one() -> None:
    padded = boundaries_from_starts(np.array([[0, 2, -1], [0, 1, 3]]), np.array([5, 4]))
    assert padded.starts.tolist() == [0, 2, 0, 1, 3]
    assert padded.counts.tolist() == [2, 3]
