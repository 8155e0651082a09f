"""The inputs of the benchmarks: real records, changed in every copy, and the same at every run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.inputs import (
    FOLDER_VARIABLE,
    again,
    changed_pairs,
    exchanges,
    inputs_folder,
    records,
    without_control_text,
    write_chats,
    write_shards,
    write_tiled,
)

ORIGINALS = records()


def lines(path: Path) -> list[dict]:  # type: ignore[type-arg]
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_copies_are_changed_and_ids_are_unique(tmp_path: Path) -> None:
    few = ORIGINALS[:20]
    size = 3 * sum(len(json.dumps(record, ensure_ascii=False).encode()) for record in few)
    made = lines(write_tiled(tmp_path / "a.jsonl", size, originals=few))
    assert len(made) >= 2 * len(few)
    assert len({record["id"] for record in made}) == len(made)
    originals = {json.dumps(record["messages"]) for record in few}
    assert sum(json.dumps(record["messages"]) in originals for record in made) < len(made) / 4
    assert json.dumps(made[0]["messages"]) != json.dumps(made[len(few)]["messages"])
    again_made = lines(write_tiled(tmp_path / "b.jsonl", size, originals=few))
    assert again_made == made


def test_shards_have_changes_of_their_own_and_a_larger_input_begins_with_a_smaller_one(tmp_path: Path) -> None:
    few = ORIGINALS[:50]
    two = write_shards(tmp_path, 100_000, originals=few, shard_bytes=50_000)
    three = write_shards(tmp_path, 150_000, originals=few, shard_bytes=50_000)
    assert (len(two), len(three)) == (2, 3)
    assert two == three[:2]
    assert sum(path.stat().st_size for path in three) >= 150_000
    ids = [record["id"] for path in three for record in lines(path)]
    assert len(set(ids)) == len(ids)
    texts = [json.dumps(lines(path)[0]["messages"]) for path in three]
    assert len(set(texts)) == 3


def test_files_can_be_listed_again(tmp_path: Path) -> None:
    path = write_tiled(tmp_path / "a.jsonl", 1000, originals=ORIGINALS[:5])
    found = again([path], 3)
    assert len(found) == len(set(found)) == 3
    assert all(one.read_bytes() == path.read_bytes() for one in found)


def test_records_that_spell_control_tokens_are_left_out() -> None:
    kept = without_control_text(ORIGINALS, ["</think>"])
    assert 0 < len(ORIGINALS) - len(kept) < 10
    assert not any("</think>" in json.dumps(record["messages"]) for record in kept)
    assert without_control_text(ORIGINALS, []) == ORIGINALS


@pytest.mark.parametrize("turns", [2, 80])
def test_chats_of_any_length_hold_the_same_exchanges(tmp_path: Path, turns: int) -> None:
    pairs = changed_pairs(exchanges(ORIGINALS), 160)
    assert len(pairs) == 160
    made = lines(write_chats(tmp_path / "chats.jsonl", pairs, turns))
    assert len(made) == 160 // turns
    assert all(len(record["messages"]) == 2 * turns for record in made)
    flat = [message["content"] for record in made for message in record["messages"]]
    assert flat == [text for pair in pairs for text in pair]


def test_there_are_many_real_exchanges() -> None:
    pairs = exchanges(ORIGINALS)
    assert len(pairs) > 5_000
    assert all(asked and answered for asked, answered in pairs)


def test_the_folder_of_inputs_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "kept"))
    with inputs_folder() as folder:
        assert folder == tmp_path / "kept"
    assert folder.is_dir()
    monkeypatch.delenv(FOLDER_VARIABLE)
    with inputs_folder() as folder:
        assert folder.is_dir()
    assert not folder.exists()
