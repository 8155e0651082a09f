"""Builds with `expand: tree` train what builds with `expand: turns` train, behind the same tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.compiler.run import run_build
from chatmill.core.ledger import Ledger
from chatmill.errors import FormatError
from chatmill.load.token_stream import GPTDataLoader
from chatmill.prove.verify import verify
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.builds import write_jsonl
from tests.compiler.tree_rows import targets, thinking_chats


def recipe_of(path: Path, **changes: Any) -> dict[str, Any]:
    recipe = {"sources": [{"path": str(path)}], "tokenizer": "bytes", "template": "qwen3", "add_control_tokens": True}
    return {**recipe, **changes}


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "chats.jsonl", thinking_chats(60))


@pytest.mark.parametrize("policy", ["assistant", "all", "trl", "post_training"])
def test_trees_train_what_rows_per_turn_train(tmp_path: Path, chats: Path, policy: str) -> None:
    rows = run_build(recipe_of(chats, policy=policy), tmp_path / "rows", workers=0).manifest
    trees = run_build(recipe_of(chats, policy=policy, expand="tree"), tmp_path / "trees", workers=0).manifest
    wanted = targets(tmp_path / "rows")
    assert targets(tmp_path / "trees") == wanted
    assert set(wanted.values()) == {1}
    was, now = Ledger.from_json(rows["ledger"]), Ledger.from_json(trees["ledger"])
    assert trees["splits"]["train"]["tokens"] == was.total_notes("tokens_as_trees") < rows["splits"]["train"]["tokens"]
    assert trees["splits"]["train"]["branches"] == now.total_notes("branches") == now.total_notes("rows_added")
    assert now.total("trained") == was.total("trained")
    assert now.total("rendered") == was.total("rendered")
    assert now.total("injected") == trees["splits"]["train"]["branches"]
    assert not now.imbalance(trees["splits"]["train"]["tokens"])
    assert len(EpisodeDataset(tmp_path / "trees")) == 60


def test_the_sentence_about_the_cost_has_all_three_counts(tmp_path: Path, chats: Path) -> None:
    built = [
        Ledger.from_json(run_build(recipe_of(chats, **more), tmp_path / name, workers=0).manifest["ledger"])
        for name, more in (
            ("rows", {}),
            ("trees", {"expand": "tree"}),
            ("whole", {"expand": "none", "gates": {"max_lost_reasoning": None}}),
        )
    ]
    rows, trees, whole = (ledger.cost_of_turns() for ledger in built)
    assert "--expand tree" in rows
    assert "As rows per turn" in trees
    assert whole == ""
    for count in (
        built[0].total("rendered"),
        built[1].stored,
        built[0].total("rendered") - built[0].total_notes("tokens_in_added_rows"),
    ):
        assert f"{count:,}" in rows
        assert f"{count:,}" in trees


@pytest.mark.parametrize("overflow", ["cut", "drop", "windows", "drop_oldest_turns"])
@pytest.mark.parametrize("longest", [150, 260, 500])
def test_overflow_and_splits_lose_what_rows_lose_and_no_more(
    tmp_path: Path, chats: Path, overflow: str, longest: int
) -> None:
    packing = {"max_length": longest, "overflow": overflow}
    open_gates = {"records_without_trained_tokens": None, "records_left_out": None, "max_lost_reasoning": None}
    for name, expand in (("rows", "turns"), ("trees", "tree")):
        made = run_build(
            recipe_of(chats, expand=expand, packing=packing, gates=open_gates), tmp_path / name, workers=0
        ).manifest
    ledger = Ledger.from_json(made["ledger"])
    split = EpisodeDataset(tmp_path / "trees")
    trained, wanted = targets(tmp_path / "trees"), targets(tmp_path / "rows")
    highest: dict[tuple[str, int, int], float] = {}
    for *target, weight in wanted:  # windows may come out alike where an answer is cut
        key = (str(target[0]), int(target[1]), int(target[2]))
        highest[key] = max(weight, highest.get(key, 0.0))
    assert {key[:3]: key[3] for key in trained} == highest
    assert set(trained.values()) == {1}
    assert ledger.total("trained") + ledger.total("shared_trained") == wanted.total()
    assert split.lengths.max() <= longest
    assert not ledger.imbalance(split.tokens)
    if longest < 500 and overflow == "drop":
        assert ledger.total_notes("tokens_repeated_by_splits") > 0, "no tree was split"


def test_bytes_do_not_depend_on_workers_or_chunks(tmp_path: Path, chats: Path) -> None:
    one = run_build(recipe_of(chats, expand="tree", shard_bytes=2000), tmp_path / "one", workers=0)
    two = run_build(recipe_of(chats, expand="tree", shard_bytes=2000), tmp_path / "two", workers=2)
    assert one.manifest["files"] == two.manifest["files"]
    split = EpisodeDataset(tmp_path / "one")
    assert len(split.shards) > 2
    order = np.random.RandomState(0).permutation(len(split))
    some = split.branches(order)
    for place, number in enumerate(order.tolist()):
        own = slice(some.offsets[place], some.offsets[place + 1])
        assert np.array_equal(some.starts[own], split[number].branches.starts)
        assert np.array_equal(some.depths[own], split[number].branches.depths)


@pytest.mark.parametrize("more", [{}, {"packing": {"max_length": 260, "overflow": "windows"}}, {"policy": "all"}])
def test_verify_derives_every_tree_again(tmp_path: Path, chats: Path, more: dict[str, Any]) -> None:
    run_build(recipe_of(chats, expand="tree", **more), tmp_path / "trees", workers=0)
    report = verify(tmp_path / "trees", deep=True)
    assert report.passed, [finding.message for finding in report.findings]
    assert report.counts["rows_of_trees"] > 100
    assert any("rows of trees" in sentence for sentence in report.compared)
    assert verify(tmp_path / "trees", deep=True, sample=5).passed


def test_verify_sees_a_branch_that_is_not_where_it_was(tmp_path: Path, chats: Path) -> None:
    run_build(recipe_of(chats, expand="tree"), tmp_path / "trees", workers=0)
    path = tmp_path / "trees" / "train" / "branches.u32"
    values = np.fromfile(path, dtype="<u4").reshape(-1, 2)
    for change, words in (((0, 1), "no copy of the token"), ((1, 0), "no copy|does not fit"), ((0, 2**30), "fit")):
        (values + np.eye(len(values), 1, dtype="<u4") * np.array(change, dtype="<u4")).astype("<u4").tofile(path)
        messages = [finding.message for finding in verify(tmp_path / "trees", deep=True).findings]
        assert any("branches" in message or "branch" in message for message in messages), messages
        assert any(re.search(words, message) for message in messages), messages
    values.tofile(path)
    assert verify(tmp_path / "trees", deep=True).passed


def test_nobody_reads_branches_as_one_text(tmp_path: Path, chats: Path) -> None:
    run_build(recipe_of(chats, expand="tree"), tmp_path / "trees", workers=0)
    with pytest.raises(FormatError, match="trees"):
        GPTDataLoader({"batch_size": 2, "block_size": 8}, dataset_dir=tmp_path / "trees").get_batch()
    manifest = tmp_path / "trees" / "train" / "episodes.json"
    told = json.loads(manifest.read_text())
    del told["columns"]["branches"]
    manifest.write_text(json.dumps(told))
    with pytest.raises(FormatError, match="its episodes are trees"):
        EpisodeDataset(tmp_path / "trees")
    manifest.unlink()
    with pytest.raises(FormatError, match="its episodes are trees"):
        EpisodeDataset(tmp_path / "trees")
