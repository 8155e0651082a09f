"""Chunk borders of Parquet files from the sizes of row groups alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chatmill.compiler.cuts import ROW_LIMIT, SKIP_LIMIT, row_cuts, skips_too_much

GROUPS = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 1 << 20)), max_size=12)


@given(groups=GROUPS, chunk_bytes=st.integers(1, 1 << 20))
def test_rows_are_cut_without_gaps_and_evenly(groups: list[tuple[int, int]], chunk_bytes: int) -> None:
    cuts = row_cuts(groups, chunk_bytes)
    total = sum(rows for rows, _ in groups)
    assert [row for cut in cuts for row in (cut.start, cut.stop)][1:-1:2] == [cut.start for cut in cuts[1:]]
    assert (cuts[0].start, cuts[-1].stop) == (0, total) if total else not cuts
    assert all(cut.first == cut.start + 1 and cut.count == cut.stop - cut.start > 0 for cut in cuts)
    largest = max((size / rows for rows, size in groups if rows), default=0)
    position = 0
    for rows, size in groups:
        inside = [cut for cut in cuts if position <= cut.start and cut.stop <= position + rows and cut.count < rows]
        for cut in inside:  # a part of one row group
            assert cut.count * size / rows <= chunk_bytes + largest
            assert cut.count >= rows // len(inside)
        position += rows


def test_small_row_groups_share_a_chunk_up_to_both_limits() -> None:
    assert [cut.count for cut in row_cuts([(10, 40)] * 6, 100)] == [20, 20, 20]
    assert [cut.count for cut in row_cuts([(10, 40), (10, 500), (10, 40), (10, 40)], 100)] == [10, 2, 2, 2, 2, 2, 20]
    assert [cut.count for cut in row_cuts([(ROW_LIMIT // 2 + 1, 1)] * 3, 100)] == [ROW_LIMIT // 2 + 1] * 3
    assert max(cut.count for cut in row_cuts([(10 * ROW_LIMIT + 5, 1)], 1 << 30)) <= ROW_LIMIT
    assert row_cuts([], 100) == row_cuts([(0, 0)], 100) == []


def test_far_jumps_into_row_groups_are_noticed() -> None:
    one, several = [(1000, 1000)], [(100, 100)] * 10
    assert SKIP_LIMIT == 4  # n chunks of one row group skip it (n - 1) / 2 times over
    assert not skips_too_much(one, row_cuts(one, 1000 // 8))
    assert skips_too_much(one, row_cuts(one, 1000 // 10))
    assert not skips_too_much(several, row_cuts(several, 1000 // 50))
    assert not skips_too_much([], [])
