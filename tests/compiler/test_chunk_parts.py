"""The parts of the work on a chunk, each by itself against a slow and obvious reference."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.compiler import chunk_job
from chatmill.compiler.accounts import empty_answers, reasoning_of
from chatmill.compiler.chunk_job import ChunkPiece
from chatmill.compiler.chunk_output import ChunkOutput
from chatmill.compiler.finish import PlannedBuild
from chatmill.compiler.first_recipe import FEW_FILES, FileLook, _lengths, _sources
from chatmill.compiler.pairs import margins_of
from chatmill.compiler.pipeline import Pipeline
from chatmill.compiler.recipe import Source, recipe_of
from chatmill.compiler.repairs import _end_earlier
from chatmill.compiler.run import _check_finished
from chatmill.compiler.sources import shared_chunks
from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.conversations import Conversations
from chatmill.core.ledger import Ledger
from chatmill.core.sides import Side
from chatmill.errors import ConfigError
from chatmill.read.picks import Pick
from chatmill.read.preferences import MARGIN_FIELDS
from chatmill.store.episode_manifest import BRANCHES, EpisodeManifest, ShardRecord, StoredFile
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
        read = list(chunk_job._read(piece, itertools.repeat(300)))
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


def test_what_a_first_recipe_says_of_files_and_lengths() -> None:
    for count in (FEW_FILES, FEW_FILES + 1):
        looked = [FileLook(f"{n}.jsonl", "openai", (), Counter(), True) for n in range(count)]
        assert len(_sources(looked)) == (count if count <= FEW_FILES else 1)
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


def test_a_dataset_says_how_many_branches_a_split_has(tmp_path: Path) -> None:
    files = {BRANCHES.file: StoredFile(72, "0" * 32)}
    shard = ShardRecord(name="", episodes=2, tokens=30, files=files)
    split = EpisodeManifest(split="train", columns={BRANCHES.name: BRANCHES}, shards=(shard,))
    recipe, nothing = recipe_of(RECIPE), cast(Any, None)
    _, held = PlannedBuild(tmp_path, recipe, nothing, nothing, "")._with_rows({"train": split})
    assert held == {"train": {"episodes": 2, "tokens": 30, "branches": 9}}
