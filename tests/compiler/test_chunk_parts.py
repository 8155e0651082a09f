"""The parts of the work on a chunk, each by itself against a slow and obvious reference."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.compiler.accounts import ROLES, empty_answers, reasoning_of, sum_lengths, sum_turns
from chatmill.compiler.chunk_output import ChunkOutput
from chatmill.compiler.cuts import ROW_LIMIT, SKIP_LIMIT, row_cuts, skips_too_much
from chatmill.compiler.first_recipe import _lengths
from chatmill.compiler.pairs import margins_of
from chatmill.compiler.pipeline import Pipeline
from chatmill.compiler.recipe import Source, recipe_of
from chatmill.compiler.sources import LARGEST, SMALLEST, chunk_size, shared_chunks
from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.conversations import Conversations
from chatmill.core.kinds import Part, RoleCode, kind, part_of, role_of
from chatmill.core.sides import Side
from chatmill.read.preferences import MARGIN_FIELDS
from tests.compiler.builds import CHATML
from tests.pack.letter_chats import tokens_of

RECIPE = {"sources": [{"path": "a"}], **CHATML}


def piece(size: int, digest: str, weight: float) -> Any:
    return SimpleNamespace(range=SimpleNamespace(bytes=size, digest=digest), rules=SimpleNamespace(weight=weight))


FILES = st.lists(
    st.tuples(st.lists(st.integers(1, 40), max_size=3), st.integers(0, 1), st.integers(0, 200)), max_size=12
)


@given(FILES, st.sampled_from([0.5, 1.0, 3.0]))
@settings(max_examples=200)
def test_small_neighbours_of_one_source_share_a_chunk(files: list[tuple[list[int], int, int]], weight: float) -> None:
    pieces = [[piece(size, f"{mark << 64:032x}", weight) for size in sizes] for sizes, _, mark in files]
    owners = sorted(owner for _, owner, _ in files)
    wanted: list[list[Any]] = []
    room, filled_by = 0.0, -1
    for own, owner in zip(pieces, owners, strict=True):
        if len(own) > 1:
            wanted += [[one] for one in own]
            room = 0.0
        for one in own if len(own) == 1 else ():
            size = one.range.bytes * max(1.0, weight)
            if filled_by == owner and size <= room:
                wanted[-1].append(one)
            else:
                wanted.append([one])
                room = 100.0
            is_last = int(one.range.digest[:16], 16) % 100 < size
            room, filled_by = 0.0 if is_last else room - size, owner
    assert [list(chunk) for chunk in shared_chunks(pieces, owners, 100)] == wanted


@pytest.mark.parametrize("added", [0, 1])
def test_a_file_in_the_middle_shifts_few_groups(added: int) -> None:
    """One that is added, or taken away."""
    rng = random.Random(added)

    def file() -> Any:
        return [piece(100, f"{rng.getrandbits(128):032x}", 1.0)]

    def groups(files: list[Any]) -> set[Any]:
        return {tuple(map(id, chunk)) for chunk in shared_chunks(files, [0] * len(files), 350)}

    files = [file() for _ in range(80)]
    old = groups(files)
    assert len(old) > 30
    for place in range(80):
        new = groups([*files[:place], *(file() for _ in range(added)), *files[place + 1 - added :]])
        assert len(new - old) <= 6


def test_chunks_use_the_cores_and_a_little_more_input_changes_no_border() -> None:
    assert chunk_size(1) == chunk_size(31_000_000) == SMALLEST
    assert 31_000_000 // chunk_size(31_000_000) >= 16
    assert chunk_size(10**10) == chunk_size(10**13) == LARGEST
    for size in (100 << 20, 400 << 20, 900 << 20, 1700 << 20):
        assert 64 <= size // chunk_size(size) <= 128
        assert chunk_size(size) == chunk_size(size * 101 // 100)


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


def test_answers_that_hold_nothing_and_characters_of_reasoning_and_margins_of_pairs() -> None:
    call, conversations = ToolCall("f", "{}"), []
    choices = itertools.product((Role.USER, Role.ASSISTANT), ("", "x"), (None, "", "é?"), ((), (call,)), (None, (1, 2)))
    for role, content, reasoning, calls, ids in choices:
        made = Message(role, content, reasoning, calls, token_ids=ids if role is Role.ASSISTANT else None)
        conversations.append(Conversation((Message(Role.USER, "q"), made, Message(Role.ASSISTANT, ""))))
    batch = Conversations.of(conversations)
    assert reasoning_of(batch).tolist() == [len(one.messages[1].reasoning or "") for one in conversations]
    assert empty_answers(batch).tolist() == [
        sum(
            one.role is Role.ASSISTANT and not (one.content or one.reasoning or one.tool_calls or one.token_ids)
            for one in conversation.messages
        )
        for conversation in conversations
    ]
    sides = [(Side.CHOSEN, 0.5), (Side.REJECTED, 0.5), (Side.LIKED, None)]
    batch = Conversations.of([conversations[0]._replace(side=side, margin=margin) for side, margin in sides])
    assert [one.margin for one in batch] == [0.5, 0.5, None]
    for several, wanted in ((batch, "[0.5, nan, 0.5]"), (Conversations.joined([batch, batch]), "[0.5, nan, 0.5]")):
        margins = margins_of(several, np.array([0, 2, len(several) - 2]))
        assert str(margins if margins is None else margins.tolist()) == wanted
    without = Conversations.of([conversations[0]._replace(side=Side.CHOSEN)])
    assert without.margins is None
    assert Conversations.joined([without, batch]).margins.tolist()[1:3] == [0.5, 0.5]  # type: ignore[union-attr]


def test_what_a_first_recipe_says_of_lengths() -> None:
    look: Any = SimpleNamespace(
        lengths=np.arange(1, 1001), recipe=recipe_of({**RECIPE, "packing": {"max_length": 900}})
    )
    assert _lengths(look) == (
        "50% have 500 or fewer, 90% have 900 or fewer, 99% have 990 or fewer; the longest has 1,000; "
        "100 are longer than the row"
    )


def test_fields_and_columns_are_those_that_a_recipe_asks_for(tmp_path: Path) -> None:
    for preferences in (None, "chosen", "pairs"):
        pipeline = Pipeline(recipe_of({**RECIPE, "preferences": preferences, "store_images": True}))
        with ChunkOutput(tmp_path / str(preferences), pipeline, Source(path="a")) as output:
            assert (output.fields_read >= set(MARGIN_FIELDS)) == (preferences == "pairs")
            output.receipt(0)
        names = {path.name for path in (tmp_path / str(preferences) / "train").iterdir()}
        assert ("side.u8" in names) == (preferences == "pairs")
        assert "image_bytes.bin" not in names  # the model takes no pictures


HEADER, CONTENT, END = (kind(RoleCode.ASSISTANT, part) for part in (Part.HEADER, Part.CONTENT, Part.TERMINATOR))
USER = kind(RoleCode.USER, Part.CONTENT)
Run = tuple[int, int, int, float]
"""Kind, length, message and weight."""

KINDS = [HEADER, CONTENT, END, CONTENT + 64, END + 128, USER, kind(RoleCode.NONE, Part.DOCUMENT)]
WEIGHTS = st.sampled_from([0.0, 0.5, 1.0])
RUNS = st.tuples(st.sampled_from(KINDS), st.sampled_from([0, 1, 7]), st.integers(-1, 3), WEIGHTS)


def counted(conversation: list[Run]) -> tuple[int, int, int, int]:
    """Trained tokens, turns, and turns without a trained terminator, by the rule and by themselves, run by run."""
    filled = [run for run in conversation if run[1]]
    turns: list[list[tuple[int, Run]]] = []
    for place, run in enumerate(filled):
        if role_of(run[0]) is RoleCode.ASSISTANT:
            if not turns or turns[-1][-1][1][2] != run[2]:
                turns.append([])
            turns[-1].append((place, run))
    unended = endless = 0
    for turn, following in itertools.zip_longest(turns, turns[1:]):
        trained = [run for _, run in turn if run[3] > 0]
        goes_on = bool(following) and following[0][0] == turn[-1][0] + 1
        has_no_end = bool(trained) and all(part_of(run[0]) is not Part.TERMINATOR for run in trained)
        endless += has_no_end
        unended += has_no_end and not goes_on
    return sum(run[1] for run in filled if run[3] > 0), len(turns), unended, endless


@settings(max_examples=300)
@given(st.lists(st.lists(RUNS, max_size=12), max_size=5), st.data())
def test_sums_are_those_of_a_loop(conversations: list[list[Run]], data: st.DataObject) -> None:
    tokens = tokens_of([[run[:3] for run in own] for own in conversations], [5] * len(conversations))
    weights = np.array([run[3] for own in conversations for run in own], dtype=np.float32)
    wanted = [list(column) for column in zip(*map(counted, conversations), strict=True)] or [[], [], [], []]
    assert [column.tolist() for column in sum_turns(tokens, weights)] == wanted
    codes = np.array([data.draw(st.integers(0, 2)) for _ in conversations], dtype=np.int64)
    lengths = tokens.run_lengths // 2
    sums = Counter[tuple[int, int, int]]()
    for code, conversation in zip(codes.tolist(), conversations, strict=True):
        for run in conversation:
            sums[code, int(role_of(run[0])), int(run[3] > 0)] += run[1] // 2
    found = sum_lengths(tokens, lengths, weights, codes, 3)
    assert found.shape == (3, ROLES, 2)
    assert {tuple(place): int(found[tuple(place)]) for place in np.argwhere(found)} == +sums
