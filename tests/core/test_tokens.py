"""The ragged batch: offsets, ranges, and spreading values of runs over tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.kinds import (
    KINDS,
    PARTS,
    Part,
    RoleCode,
    kind,
    kind_name,
    part_of,
    parts_of,
    role_of,
    roles_of,
)
from chatmill.core.tokens import Tokens, offsets_of, ranges

LENGTHS = st.lists(st.integers(0, 5), max_size=8)


@given(lengths=LENGTHS)
def test_offsets_are_running_sums(lengths: list[int]) -> None:
    offsets = offsets_of(np.array(lengths, dtype=np.int64))
    assert offsets.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert offsets.dtype == np.int64


@given(pieces=st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 5)), max_size=8))
def test_ranges_are_aranges_one_after_the_other(pieces: list[tuple[int, int]]) -> None:
    starts, lengths = (np.array([piece[i] for piece in pieces], dtype=np.int64) for i in (0, 1))
    assert ranges(starts, lengths).tolist() == [s + i for s, n in pieces for i in range(n)]


def test_ranges_take_narrow_starts() -> None:
    assert ranges(np.array([250], dtype=np.uint8), np.array([10], dtype=np.uint8)).tolist() == list(range(250, 260))


# --- kinds ---------------------------------------------------------------------------------------------------------


def test_kinds_are_different_small_and_come_back() -> None:
    codes = {kind(role, part) for role in RoleCode for part in Part}
    assert len(codes) == len(RoleCode) * len(Part) == KINDS == 56
    assert max(codes) < KINDS <= 256
    assert len(Part) == PARTS
    for role in RoleCode:
        for part in Part:
            code = kind(role, part)
            assert (role_of(code), part_of(code)) == (role, part)
    every = np.arange(KINDS, dtype=np.uint8)
    assert roles_of(every).tolist() == [role_of(int(code)) for code in every]
    assert parts_of(every).tolist() == [part_of(int(code)) for code in every]
    assert roles_of(every).dtype == parts_of(every).dtype == np.uint8


def test_kind_names() -> None:
    assert kind_name(0) == "pad"
    assert kind_name(kind(RoleCode.ASSISTANT, Part.TOOL_CALL)) == "assistant.tool_call"
    assert len({kind_name(code) for code in range(KINDS)}) == KINDS


# --- Tokens --------------------------------------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tokens, list[list[tuple[int, int, list[int]]]]]:
    """A batch and the same as plain lists: conversations of runs (kind, message, ids)."""
    plain: list[list[tuple[int, int, list[int]]]] = []
    counts, fresh = [], 0
    for _ in range(draw(st.integers(0, 4))):
        count = draw(st.integers(0, 3))
        runs = []
        for _ in range(draw(st.integers(0, 4))):
            length = draw(st.integers(0, 3))
            runs.append(
                (draw(st.integers(0, KINDS - 1)), draw(st.integers(-1, count - 1)), list(range(fresh, fresh + length)))
            )
            fresh += length
        plain.append(runs)
        counts.append(count)
    flat = [run for runs in plain for run in runs]
    run_offsets = offsets_of(np.array([len(run[2]) for run in flat], dtype=np.int64))
    document_runs = offsets_of(np.array([len(runs) for runs in plain], dtype=np.int64))
    message_offsets = offsets_of(np.array(counts, dtype=np.int64))
    tokens = Tokens(
        ids=np.arange(fresh, dtype=np.int32),
        offsets=run_offsets[document_runs],
        run_offsets=run_offsets,
        run_kinds=np.array([run[0] for run in flat], dtype=np.uint8),
        run_messages=np.array([run[1] for run in flat], dtype=np.int32),
        document_runs=document_runs,
        message_offsets=message_offsets,
        message_weights=np.arange(message_offsets[-1], dtype=np.float32),
    )
    return tokens, plain


@given(batch=batches())
@settings(max_examples=100)
def test_values_of_runs_spread_over_their_tokens(batch: tuple[Tokens, list[list[tuple[int, int, list[int]]]]]) -> None:
    tokens, plain = batch
    flat = [run for runs in plain for run in runs]
    assert len(tokens) == len(plain)
    assert tokens.lengths.tolist() == [sum(len(ids) for _, _, ids in runs) for runs in plain]
    assert tokens.run_lengths.tolist() == [len(ids) for _, _, ids in flat]
    assert tokens.kinds.tolist() == [code for code, _, ids in flat for _ in ids]
    assert tokens.messages.tolist() == [message for _, message, ids in flat for _ in ids]
    numbers = np.arange(len(flat))
    assert tokens.per_token(numbers).tolist() == [number for number, (_, _, ids) in enumerate(flat) for _ in ids]


@given(batch=batches())
@settings(max_examples=100)
def test_one_conversation_is_a_batch_of_its_own(batch: tuple[Tokens, list[list[tuple[int, int, list[int]]]]]) -> None:
    tokens, plain = batch
    for number, runs in enumerate(plain):
        one = tokens.conversation(number)
        assert len(one) == 1
        assert one.ids.tolist() == [token for _, _, ids in runs for token in ids]
        assert one.offsets.tolist() == [0, len(one.ids)]
        assert one.run_offsets.tolist() == [0, *np.cumsum([len(ids) for _, _, ids in runs], dtype=int)]
        assert one.kinds.tolist() == [code for code, _, ids in runs for _ in ids]
        assert one.messages.tolist() == [message for _, message, ids in runs for _ in ids]
        assert one.document_runs.tolist() == [0, len(runs)]
        first, last = tokens.message_offsets[number : number + 2].tolist()
        assert one.message_offsets.tolist() == [0, last - first]
        assert one.message_weights.tolist() == list(range(first, last))
