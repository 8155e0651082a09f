"""The parts of the work on a chunk, each by itself against a slow and obvious reference."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.compiler import chunk_job
from chatmill.compiler.accounts import ROLES, empty_answers, reasoning_of, sum_lengths, sum_turns
from chatmill.compiler.chunk_job import ChunkPiece
from chatmill.compiler.chunk_output import ChunkOutput
from chatmill.compiler.cuts import ROW_LIMIT, SKIP_LIMIT, row_cuts, skips_too_much
from chatmill.compiler.first_recipe import _lengths
from chatmill.compiler.pairs import margins_of
from chatmill.compiler.pipeline import Pipeline
from chatmill.compiler.recipe import Source, recipe_of
from chatmill.compiler.repairs import _end_earlier
from chatmill.compiler.run import _check_finished
from chatmill.compiler.sources import shared_chunks
from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.conversations import Conversations
from chatmill.core.kinds import Part, RoleCode, kind, part_of, role_of
from chatmill.core.ledger import Ledger
from chatmill.core.sides import Side
from chatmill.core.tokens import Tokens, offsets_of
from chatmill.errors import ConfigError
from chatmill.read.picks import Pick
from chatmill.read.preferences import MARGIN_FIELDS
from tests.compiler.builds import chats, write_jsonl
from tests.compiler.scanned import scan

RECIPE = {"sources": [{"path": "a"}], "tokenizer": "bytes", "template": "chatml", "add_control_tokens": True}


def unwanted_by_hand(records: list[Any], rules: Source, skip: int, end: int) -> dict[int, str]:
    """The records that are not asked for, by their number."""
    read = [n for n in range(skip, end) if isinstance(records[n], dict)]
    found = {n: "where" for n in read if rules.where and not records[n]["done"]}
    groups: dict[Any, list[int]] = {}
    for n in read:
        if n not in found and "prompt" in records[n]:
            groups.setdefault((records[n].get("source"), records[n]["prompt"]), []).append(n)
    for own in groups.values() if rules.pick else ():
        best = max(own, key=lambda n: (records[n]["reward"] if rules.pick and rules.pick.best else 0, -n))
        found |= dict.fromkeys(set(own) - {best}, "pick")
    return found


@pytest.mark.parametrize("best", [None, "reward"])
@pytest.mark.parametrize("where", [None, "done == true"])
@pytest.mark.parametrize("has_pick", [True, False])
def test_records_that_are_not_asked_for(tmp_path: Path, best: str | None, where: str | None, has_pick: bool) -> None:
    rng = random.Random(f"{best} {where}")
    rules = Source(path="a", where=where, pick=Pick(group="prompt", best=best) if has_pick else None)
    for number in range(12):
        records: list[Any] = []
        for chat in chats(10, number, turns=1, words=2):
            chat |= {"reward": rng.randint(0, 3), "done": rng.random() < 0.7}
            chat |= {"prompt": rng.randint(0, 2)} if rng.random() < 0.8 else {}
            records.append("{broken" if rng.random() < 0.2 else chat)
        path = write_jsonl(tmp_path / f"{number}.jsonl", records)
        (chunk,) = scan(path).chunks
        skip, end = sorted(rng.sample(range(11), 2))
        found = chunk_job._unwanted([ChunkPiece(chunk, rules, end, skip)])
        wanted = unwanted_by_hand(records, rules, skip, end)
        assert found == {f"{path}:{n + 1}": reason for n, reason in wanted.items()}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_piece_has_the_lines_or_rows_from_its_skip_to_its_end(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_job, "BATCH_BYTES", 300)
    records = chats(7, 1, turns=1, words=4)
    path = tmp_path / f"a.{ending}"
    if ending == "jsonl":
        write_jsonl(path, records)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    (chunk,) = scan(path).chunks
    for skip, end in itertools.combinations(range(8), 2):
        piece = ChunkPiece(chunk, Source(path="a"), end if end < 7 else None, skip)
        read = list(chunk_job._read(piece, itertools.repeat(300), lambda *rows: None))
        assert [name for batch, _ in read for name in batch.ids[:]] == [record["id"] for record in records[skip:end]]


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 40), max_size=3), st.integers(0, 1), st.integers(0, 200)), max_size=12),
    st.sampled_from([0.5, 1.0, 3.0]),
)
@settings(max_examples=200)
def test_small_neighbours_of_one_source_share_a_chunk(files: list[tuple[list[int], int, int]], weight: float) -> None:
    rules = SimpleNamespace(weight=weight)
    pieces: Any = [
        [SimpleNamespace(range=SimpleNamespace(bytes=size, digest=f"{mark:032x}"), rules=rules) for size in sizes]
        for sizes, _, mark in ((sizes, owner, mark << 64) for sizes, owner, mark in files)
    ]
    owners = sorted(owner for _, owner, _ in files)
    wanted: list[list[Any]] = []
    room, filled_by = 0.0, -1
    for own, owner in zip(pieces, owners, strict=True):
        if len(own) > 1:
            wanted += [[piece] for piece in own]
            room = 0.0
        for piece in own if len(own) == 1 else ():
            size = piece.range.bytes * max(1.0, weight)
            if filled_by == owner and size <= room:
                wanted[-1].append(piece)
            else:
                wanted.append([piece])
                room = 100.0
            is_last = int(piece.range.digest[:16], 16) % 100 < size
            room, filled_by = 0.0 if is_last else room - size, owner
    assert [list(chunk) for chunk in shared_chunks(pieces, owners, 100)] == wanted


@pytest.mark.parametrize("added", [0, 1])
def test_a_file_in_the_middle_shifts_few_groups(added: int) -> None:
    """One that is added, or taken away."""
    rng, rules = random.Random(added), SimpleNamespace(weight=1.0)

    def file() -> Any:
        return [SimpleNamespace(range=SimpleNamespace(bytes=100, digest=f"{rng.getrandbits(128):032x}"), rules=rules)]

    def groups(files: list[Any]) -> set[Any]:
        return {tuple(map(id, chunk)) for chunk in shared_chunks(files, [0] * len(files), 350)}

    files = [file() for _ in range(80)]
    old = groups(files)
    assert len(old) > 30
    for place in range(80):
        new = groups([*files[:place], *(file() for _ in range(added)), *files[place + 1 - added :]])
        assert len(new - old) <= 6


def test_answers_that_hold_nothing_and_characters_of_reasoning() -> None:
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


def test_margins_are_those_of_the_records_of_pairs() -> None:
    messages = (Message(Role.USER, "q"), Message(Role.ASSISTANT, "a"))
    sides = [(Side.CHOSEN, {"margin": 0.5}), (Side.REJECTED, {}), (Side.LIKED, {"margin": 2.0})]
    batch = Conversations.of([Conversation(messages, side=side, metadata=about) for side, about in sides])
    found = margins_of(batch, np.array([0, 1, 2, 0]))
    assert found is not None
    assert str(found.tolist()) == "[0.5, nan, nan, 0.5]"


@given(st.text("uat", max_size=7))
def test_a_record_ends_with_an_earlier_answer(letters: str) -> None:
    roles = {"u": Role.USER, "a": Role.ASSISTANT, "t": Role.TOOL}
    conversation = Conversation(tuple(Message(roles[letter], letter) for letter in letters))
    ends = [end for end in range(1, len(letters)) if letters[end - 1] == "a"]
    found = _end_earlier(conversation)
    assert (found and found[0].messages) == (conversation.messages[: ends[-1]] if ends else None)


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
            assert (output.fields_read >= MARGIN_FIELDS) == (preferences == "pairs")
            output.receipt(0)
        names = {path.name for path in (tmp_path / str(preferences) / "train").iterdir()}
        assert ("side.u8" in names) == (preferences == "pairs")
        assert "image_bytes.bin" not in names  # the model takes no pictures


def test_a_finished_build_with_records_aside_is_not_one_that_fails_on_them(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.records["a", "quarantined", "messages_type"] += 2
    ledger.records["a", "built", ""] += 98
    _check_finished(tmp_path, recipe_of({**RECIPE, "on_error": "quarantine"}), {"ledger": ledger.as_json()})
    with pytest.raises(ConfigError, match="2 records were put aside"):
        _check_finished(tmp_path, recipe_of(RECIPE), {"ledger": ledger.as_json()})


# Chunk borders of Parquet files from the sizes of row groups alone.


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


# What runs add up to, against sums that are written out.


HEADER, CONTENT, END = (kind(RoleCode.ASSISTANT, part) for part in (Part.HEADER, Part.CONTENT, Part.TERMINATOR))
USER = kind(RoleCode.USER, Part.CONTENT)
Run = tuple[int, int, int, float]
"""Kind, message, length and weight."""

KINDS = [HEADER, CONTENT, END, CONTENT + 64, END + 128, USER, kind(RoleCode.NONE, Part.DOCUMENT)]
RUNS = st.tuples(
    st.sampled_from(KINDS), st.integers(-1, 3), st.sampled_from([0, 1, 7]), st.sampled_from([0.0, 0.5, 1.0])
)


def tokens_of(conversations: list[list[Run]]) -> tuple[Tokens, np.ndarray]:
    runs = [run for conversation in conversations for run in conversation]
    kinds, messages, lengths, weights = zip(*runs, strict=True) if runs else ((), (), (), ())
    offsets = offsets_of(np.array(lengths, dtype=np.int64))
    bounds = offsets_of(np.array([len(conversation) for conversation in conversations], dtype=np.int64))
    tokens = Tokens(
        ids=np.zeros(int(offsets[-1]), dtype=np.int32),
        offsets=offsets[bounds],
        run_offsets=offsets,
        run_kinds=np.array(kinds, dtype=np.uint8),
        run_messages=np.array(messages, dtype=np.int32),
        document_runs=bounds,
        message_offsets=np.arange(len(conversations) + 1, dtype=np.int64) * 5,
        message_weights=np.full(5 * len(conversations), np.nan, dtype=np.float32),
    )
    return tokens, np.array(weights, dtype=np.float32)


def counted(conversation: list[Run]) -> tuple[int, int, int, int]:
    """Trained tokens, turns, and turns without a trained terminator, by the rule and by themselves, run by run."""
    filled = [run for run in conversation if run[2]]
    turns: list[list[tuple[int, Run]]] = []
    for place, run in enumerate(filled):
        if role_of(run[0]) is RoleCode.ASSISTANT:
            if not turns or turns[-1][-1][1][1] != run[1]:
                turns.append([])
            turns[-1].append((place, run))
    unended = endless = 0
    for turn, following in zip_longest(turns, turns[1:]):
        trained = [run for _, run in turn if run[3] > 0]
        goes_on = bool(following) and following[0][0] == turn[-1][0] + 1
        has_no_end = bool(trained) and all(part_of(run[0]) is not Part.TERMINATOR for run in trained)
        endless += has_no_end
        unended += has_no_end and not goes_on
    return sum(run[2] for run in filled if run[3] > 0), len(turns), unended, endless


@settings(max_examples=300)
@given(st.lists(st.lists(RUNS, max_size=12), max_size=5), st.data())
def test_sums_are_those_of_a_loop(conversations: list[list[Run]], data: st.DataObject) -> None:
    tokens, weights = tokens_of(conversations)
    wanted = [list(column) for column in zip(*map(counted, conversations), strict=True)] or [[], [], [], []]
    assert [column.tolist() for column in sum_turns(tokens, weights)] == wanted
    codes = np.array([data.draw(st.integers(0, 2)) for _ in conversations], dtype=np.int64)
    lengths = tokens.run_lengths // 2
    sums = Counter[tuple[int, int, int]]()
    for code, conversation in zip(codes.tolist(), conversations, strict=True):
        for run in conversation:
            sums[code, int(role_of(run[0])), int(run[3] > 0)] += run[2] // 2
    found = sum_lengths(tokens, lengths, weights, codes, 3)
    assert found.shape == (3, ROLES, 2)
    assert {tuple(place): int(found[tuple(place)]) for place in np.argwhere(found)} == +sums
