"""The ragged batch of tokens: kinds, offsets, values of runs spread over tokens, and rows that share beginnings."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.kinds import KINDS, REPEATED, Part, RoleCode, kind, kind_name, part_of, parts_of, role_of, roles_of
from chatmill.core.shared_rows import SharedRows
from chatmill.core.tokens import Tokens, offsets_of, ranges


@given(pieces=st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 5)), max_size=8))
def test_offsets_are_running_sums_and_ranges_are_aranges_one_after_the_other(pieces: list[tuple[int, int]]) -> None:
    starts, lengths = (np.array([piece[i] for piece in pieces], dtype=np.int64) for i in (0, 1))
    offsets = offsets_of(lengths)
    assert offsets.tolist() == [sum(lengths[:i]) for i in range(len(pieces) + 1)]
    assert offsets.dtype == np.int64
    assert ranges(starts, lengths).tolist() == [s + i for s, n in pieces for i in range(n)]


def test_ranges_take_narrow_starts() -> None:
    assert ranges(np.array([250], dtype=np.uint8), np.array([10], dtype=np.uint8)).tolist() == list(range(250, 260))


def test_kinds_are_different_small_and_come_back() -> None:
    every = {kind(role, part): (role, part) for role in RoleCode for part in Part}
    assert sorted(every) == list(range(KINDS)) == list(range(len(RoleCode) * len(Part)))
    assert KINDS == 56
    assert all((role_of(code), part_of(code)) == both for code, both in every.items())
    codes = np.arange(KINDS, dtype=np.uint8)
    assert roles_of(codes).tolist() == [role_of(code) for code in range(KINDS)]
    assert parts_of(codes).tolist() == [part_of(code) for code in range(KINDS)]
    assert roles_of(codes).dtype == parts_of(codes).dtype == np.uint8
    assert len({kind_name(code) for code in every}) == KINDS
    assert (kind_name(0), kind_name(kind(RoleCode.ASSISTANT, Part.TOOL_CALL))) == ("pad", "assistant.tool_call")


class Run(NamedTuple):
    kind: int
    message: int
    ids: list[int]


Row = tuple[list[Run], list[float]]
"""Runs, and weights of messages."""


def tokens_of(rows: list[Row]) -> Tokens:
    runs = [run for row, _ in rows for run in row]
    run_offsets = offsets_of(np.array([len(run.ids) for run in runs], dtype=np.int64))
    document_runs = offsets_of(np.array([len(row) for row, _ in rows], dtype=np.int64))
    return Tokens(
        ids=np.array([token for run in runs for token in run.ids], dtype=np.int32),
        offsets=run_offsets[document_runs],
        run_offsets=run_offsets,
        run_kinds=np.array([run.kind for run in runs], dtype=np.uint8),
        run_messages=np.array([run.message for run in runs], dtype=np.int32),
        document_runs=document_runs,
        message_offsets=offsets_of(np.array([len(weights) for _, weights in rows], dtype=np.int64)),
        message_weights=np.array([weight for _, weights in rows for weight in weights], dtype=np.float32),
    )


def assert_same(found: Tokens, wanted: Tokens) -> None:
    for name in Tokens.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), err_msg=name)


RUNS = st.builds(Run, st.integers(0, KINDS - 1), st.integers(-1, 2), st.lists(st.integers(0, 99), max_size=3))
ROWS = st.lists(st.tuples(st.lists(RUNS, max_size=4), st.lists(st.floats(0, 9, width=32), max_size=3)), max_size=4)


@given(rows=ROWS, data=st.data())
@settings(max_examples=200)
def test_values_of_runs_are_spread_and_conversations_chosen(rows: list[Row], data: st.DataObject) -> None:
    tokens = tokens_of(rows)
    runs = [run for row, _ in rows for run in row]
    assert len(tokens) == len(rows)
    assert tokens.lengths.tolist() == [sum(len(run.ids) for run in row) for row, _ in rows]
    assert tokens.run_lengths.tolist() == [len(run.ids) for run in runs]
    assert tokens.kinds.tolist() == [run.kind for run in runs for _ in run.ids]
    assert tokens.messages.tolist() == [run.message for run in runs for _ in run.ids]
    assert tokens.per_token(np.arange(len(runs))).tolist() == [n for n, run in enumerate(runs) for _ in run.ids]
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=4)) if rows else []
    taken = tokens.take(np.array(chosen, dtype=np.int64))
    assert_same(taken, tokens_of([rows[i] for i in chosen]))
    assert_same(Tokens.joined([tokens, taken]), tokens_of([*rows, *(rows[i] for i in chosen)]))
    for number in chosen[:1]:
        assert_same(tokens.conversation(number), tokens_of([rows[number]]))


@st.composite
def families(draw: st.DrawFn) -> tuple[list[Row], SharedRows]:
    """Rows as lists of runs, and as what they share."""
    rows: list[Row] = []
    paths: list[list[tuple[int, int]]] = []  # for each row, the number of each of its runs, and the row that has it
    own: list[Run] = []
    fresh: list[Row] = []
    parents, until, others = list[int](), list[int](), list[tuple[int, int, int]]()
    kinds = st.sampled_from([33, 33 | REPEATED])
    for row in range(draw(st.integers(1, 6))):
        before = draw(st.integers(-1, row - 1))
        kept = draw(st.integers(0, len(paths[before]))) if before >= 0 else 0
        path = paths[before][:kept] if kept else []
        parents.append(path[-1][1] if path else -1)
        until.append(path[-1][0] + 1 if path else 0)
        runs = [own[run]._replace(kind=draw(kinds)) for run, _ in path]
        others += [(row, run, one.kind) for (run, _), one in zip(path, runs, strict=True) if one.kind != own[run].kind]
        for _ in range(draw(st.integers(0, 3))):
            path = [*path, (len(own), row)]
            own.append(Run(draw(kinds), len(own), [100 * len(own) + k for k in range(draw(st.integers(0, 3)))]))
            runs.append(own[-1])
        rows.append((runs, [0.5]))
        paths.append(path)
        fresh.append((runs[kept:], [0.5]))
    numbers = {"parents": parents, "until": until}
    columns = {name: np.array(column, dtype=np.int64) for name, column in numbers.items()}
    shared = np.array(others, dtype=np.int64).reshape(-1, 3)
    return rows, SharedRows(own=tokens_of(fresh), others=shared, **columns)


@settings(max_examples=300)
@given(families())
def test_rows_are_what_they_share_and_their_own(family: tuple[list[Row], SharedRows]) -> None:
    rows, shared = family
    slow = tokens_of(rows)
    assert_same(shared.whole, slow)
    assert shared.lengths.tolist() == slow.lengths.tolist()
    for run, number in enumerate(shared.own.run_messages.tolist()):
        kinds = [one.kind for row, _ in rows for one in row if one.message == number]
        assert shared.times[run] == len(kinds)
        assert shared.unrepeated[run] == sum(not kind & REPEATED for kind in kinds)
        assert shared.merged.run_kinds[run] == np.bitwise_and.reduce(kinds)
