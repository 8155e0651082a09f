"""Rows that share their beginnings, against the same rows token by token."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.kinds import REPEATED
from chatmill.core.shared_rows import SharedRows
from chatmill.core.tokens import Tokens, offsets_of

Run = tuple[int, int, int]
"""The number of a run, which decides its ids, its kind, and its number of tokens."""


@st.composite
def families(draw: st.DrawFn) -> tuple[list[list[Run]], SharedRows]:
    """Rows as lists of runs, and as what they share."""
    rows: list[list[Run]] = []
    paths: list[list[tuple[int, int]]] = []  # for each row, the number of each of its runs, and the row that has it
    own: list[Run] = []
    counts, parents, until, others = list[int](), list[int](), list[int](), list[tuple[int, int, int]]()
    kinds = st.sampled_from([33, 33 | REPEATED])
    for row in range(draw(st.integers(1, 6))):
        before = draw(st.integers(-1, row - 1))
        kept = draw(st.integers(0, len(paths[before]))) if before >= 0 else 0
        path = paths[before][:kept] if kept else []
        parents.append(path[-1][1] if path else -1)
        until.append(path[-1][0] + 1 if path else 0)
        runs: list[Run] = []
        for run, _ in path:
            number, kind, size = own[run]
            runs.append((number, draw(kinds), size))
            if runs[-1][1] != kind:
                others.append((row, run, runs[-1][1]))
        for _ in range(draw(st.integers(0, 3))):
            path = [*path, (len(own), row)]
            own.append((len(own), draw(kinds), draw(st.integers(0, 3))))
            runs.append(own[-1])
        rows.append(runs)
        paths.append(path)
        counts.append(len(path) - kept)
    numbers = {"parents": parents, "until": until}
    columns = {name: np.array(column, dtype=np.int64) for name, column in numbers.items()}
    shared = np.array(others, dtype=np.int64).reshape(-1, 3)
    return rows, SharedRows(own=tokens_of(own, counts), others=shared, **columns)


def tokens_of(runs: list[Run], counts: list[int]) -> Tokens:
    document_runs, run_offsets = offsets_of(np.array(counts)), offsets_of(np.array([size for _, _, size in runs]))
    return Tokens(
        ids=np.array([100 * number + k for number, _, size in runs for k in range(size)], dtype=np.int32),
        offsets=run_offsets[document_runs],
        run_offsets=run_offsets,
        run_kinds=np.array([kind for _, kind, _ in runs], dtype=np.uint8),
        run_messages=np.array([number for number, _, _ in runs], dtype=np.int32),
        document_runs=document_runs,
        message_offsets=np.arange(len(counts) + 1),
        message_weights=np.full(len(counts), np.nan, dtype=np.float32),
    )


@settings(max_examples=300, deadline=None)
@given(families())
def test_rows_are_what_they_share_and_their_own(family: tuple[list[list[Run]], SharedRows]) -> None:
    rows, shared = family
    slow = tokens_of([run for row in rows for run in row], [len(row) for row in rows])
    for name in ("ids", "offsets", "run_offsets", "run_kinds", "run_messages", "document_runs", "message_offsets"):
        assert np.array_equal(getattr(shared.whole, name), getattr(slow, name)), name
    assert shared.lengths.tolist() == slow.lengths.tolist()
    for run, number in enumerate(shared.own.run_messages.tolist()):
        kinds = [kind for row in rows for one, kind, _ in row if one == number]
        assert shared.times[run] == len(kinds)
        assert shared.unrepeated[run] == sum(not kind & REPEATED for kind in kinds)
        assert shared.merged.run_kinds[run] == np.bitwise_and.reduce(kinds)
