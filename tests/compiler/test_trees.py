"""Builds with `expand: tree` train what builds with `expand: turns` train, after the same tokens."""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.compiler.run import run_build
from chatmill.core.ledger import Ledger
from chatmill.errors import DataError, FormatError
from chatmill.load.token_stream import GPTDataLoader
from chatmill.prove.verify import verify
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.builds import OPEN_GATES, plain_recipe, talk, write_jsonl
from tests.compiler.tree_rows import apart, targets, thinking_chat, thinking_chats


def recipe_of(path: Path, **changes: Any) -> dict[str, Any]:
    return plain_recipe(path, **{"template": "qwen3", "gates": {}, **changes})


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("chats") / "chats.jsonl", thinking_chats(60))


@pytest.mark.parametrize("policy", ["assistant", "all", "trl", "post_training"])
def test_trees_train_what_rows_per_turn_train(tmp_path: Path, chats: Path, policy: str) -> None:
    rows = run_build(recipe_of(chats, policy=policy), tmp_path / "rows", workers=0).manifest
    trees = run_build(recipe_of(chats, policy=policy, expand="tree"), tmp_path / "trees", workers=0).manifest
    wanted = targets(tmp_path / "rows")
    assert targets(tmp_path / "trees") == wanted
    assert set(wanted.values()) == {1}
    was, now = Ledger.from_json(rows["ledger"]), Ledger.from_json(trees["ledger"])
    saved = was.total_notes("tokens_saved_by_trees")
    assert 0 < saved == rows["splits"]["train"]["tokens"] - trees["splits"]["train"]["tokens"]
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


@pytest.mark.parametrize(
    ("overflow", "longest"),
    [*((name, 150) for name in ("cut", "drop", "windows", "drop_oldest_turns", "turns", "last_turns")), ("turns", 500)],
)
def test_overflow_and_splits_lose_what_rows_lose_and_no_more(
    tmp_path: Path, chats: Path, overflow: str, longest: int
) -> None:
    packing = {"max_length": longest, "overflow": overflow}
    for name, expand in (("rows", "turns"), ("trees", "tree")):
        made = run_build(
            recipe_of(chats, expand=expand, packing=packing, gates=OPEN_GATES), tmp_path / name, workers=0
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
    if overflow == "drop":
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
def test_verify_derives_every_tree_again(tmp_path: Path, more: dict[str, Any]) -> None:
    few = write_jsonl(tmp_path / "chats.jsonl", thinking_chats(20))
    run_build(recipe_of(few, expand="tree", **more), tmp_path / "trees", workers=0)
    report = verify(tmp_path / "trees", deep=True)
    assert report.passed, [finding.message for finding in report.findings]
    assert report.counts["rows_of_trees"] > 30
    assert any("rows of trees" in sentence for sentence in report.compared)
    assert verify(tmp_path / "trees", deep=True, sample=5).passed


def test_verify_sees_a_branch_that_is_not_where_it_was(tmp_path: Path) -> None:
    few = write_jsonl(tmp_path / "chats.jsonl", thinking_chats(8))
    run_build(recipe_of(few, expand="tree"), tmp_path / "trees", workers=0)
    path = tmp_path / "trees" / "train" / "branches.u32"
    values = np.fromfile(path, dtype="<u4").reshape(-1, 2)
    for change in ((0, 1), (1, 0), (0, 2**30)):
        (values + np.eye(len(values), 1, dtype="<u4") * np.array(change, dtype="<u4")).astype("<u4").tofile(path)
        messages = [finding.message for finding in verify(tmp_path / "trees", deep=True).findings]
        assert any("a branch begins at" in message for message in messages), messages
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


def _samples(count: int, seed: int) -> list[dict[str, Any]]:
    """Chats of which some answer the same question, under one number."""
    rng = random.Random(seed)
    chats: list[dict[str, Any]] = []
    for number in range(count):
        asked = thinking_chat(rng, f"q{number}", 3)
        for sample in range(rng.randint(1, 5)):
            answers = [*asked["messages"][:-1], {"role": "assistant", "content": f"answer {rng.randint(0, 2)}"}]
            source = "other" if rng.random() < 0.1 else None
            chats.append({"id": f"q{number}.{sample}", "prompt": number, "messages": answers, "source": source})
    return chats


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.jsonl.gz", "chats.json", "chats.parquet"])
def test_records_that_agree_in_a_field_share_a_tree_whatever_the_chunks(tmp_path: Path, name: str) -> None:
    samples = _samples(12, seed=3)
    samples[7]["messages"][-1]["content"] = None  # refused
    path = tmp_path / name
    if path.suffix == ".json":
        path.write_text(json.dumps(samples))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(samples), path, row_group_size=9)
    else:
        write_jsonl(path, samples)
    recipe = recipe_of(path, expand="tree", tree={"group": "prompt"}, on_error="quarantine", gates=OPEN_GATES)
    run_build(recipe_of(path, on_error="quarantine", gates=OPEN_GATES), tmp_path / "rows", workers=0)
    alone = [episode.ids.tobytes() for episode in EpisodeDataset(tmp_path / "rows")]
    longest = {one for one in alone if not any(other.startswith(one) and other != one for other in alone)}
    for size in (700, 1 << 20):
        built = tmp_path / str(size)
        manifest = run_build({**recipe, "shard_bytes": size}, built, workers=0).manifest
        split = EpisodeDataset(built)
        assert (len(split.shards) > 2) == (size < 10_000)
        kept = [one for number, one in enumerate(samples) if number != 7]
        assert len(split) == len({(one["prompt"], one["source"]) for one in kept})
        ledger = Ledger.from_json(manifest["ledger"])
        assert not ledger.imbalance(split.tokens)
        if size == 700 or path.suffix == ".jsonl":  # the slow reference takes a second
            report = verify(built, deep=True)
            assert report.passed, [finding.message for finding in report.findings]
        rows = sorted(ids.tobytes() for episode in split for ids, _, _ in apart(episode))
        assert set(rows) >= longest and set(rows) <= set(alone)  # noqa: PT018


@settings(max_examples=30, deadline=None)
@given(
    groups=st.lists(st.integers(0, 4), min_size=1, max_size=14),
    size=st.integers(1, 400),
    lost=st.sets(st.integers(0, 13), max_size=2),
)
def test_groups_stay_whole_or_the_build_says_where_not(groups: list[int], size: int, lost: set[int]) -> None:
    """Whatever the chunks: every record once, a tree for each group, or one error that names the second place."""
    records = [
        {"id": f"r{n}", "of": group if n not in lost else None, "messages": talk(f"question {group}", f"answer {n}")}
        for n, group in enumerate(groups)
    ]
    with tempfile.TemporaryDirectory() as temporary:
        path = write_jsonl(Path(temporary, "chats.jsonl"), records)
        recipe = recipe_of(path, expand="tree", tree={"group": "of"}, shard_bytes=size, on_error="quarantine")
        recipe["gates"] = OPEN_GATES
        known = [group for n, group in enumerate(groups) if n not in lost]
        runs = [key for key, _ in itertools.groupby(known)]
        refused = None
        try:
            manifest = run_build(recipe, Path(temporary, "built"), workers=0).manifest
        except DataError as error:
            refused = str(error)
        if refused is not None:
            assert ("sort the input by of" in refused and len(runs) > len(set(runs))) or not known
            return
        ledger = Ledger.from_json(manifest["ledger"])
        assert len(EpisodeDataset(Path(temporary, "built"))) == len(set(known))
        assert ledger.reasons("quarantined") == (
            {"no_group": len(groups) - len(known)} if len(known) < len(groups) else {}
        )
        assert verify(Path(temporary, "built"), deep=True).passed
