"""A record in several rows, or in a tree of them: whatever is trained is trained once, after the same tokens."""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from collections import Counter
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
from tests.cli.run import here
from tests.compiler.builds import (
    OPEN_GATES,
    apart,
    plain_recipe,
    proved,
    talk,
    thinking_chat,
    thinking_chats,
    write_jsonl,
)

POWERS = np.random.RandomState(7).randint(1, 2**62, size=1 << 17).astype(np.uint64) | np.uint64(1)


def targets(built: Path, split: str = "train") -> Counter[tuple[str, int, int, float]]:
    """Record, hash of a target and all before it, its id and its weight: how often each is trained."""
    found: Counter[tuple[str, int, int, float]] = Counter()
    for episode in EpisodeDataset(built, split):
        for ids, weights, older in apart(episode):
            hashes = np.cumsum(ids.astype(np.uint64) * POWERS[: len(ids)], dtype=np.uint64)
            for at in (np.flatnonzero(weights[older:]) + older).tolist():
                found[str(episode.record_id), int(hashes[at]), int(ids[at]), float(weights[at])] += 1
    return found


def recipe_of(path: Path, **changes: Any) -> dict[str, Any]:
    return plain_recipe(path, **{"template": "qwen3", "gates": {}, **changes})


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("chats") / "chats.jsonl", thinking_chats(60))


@pytest.mark.parametrize("policy", ["assistant", "all", "trl", "post_training"])
def test_trees_train_what_rows_per_turn_train(tmp_path: Path, chats: Path, policy: str) -> None:
    rows, trees, whole = (
        run_build(recipe_of(chats, policy=policy, expand=expand, **more), tmp_path / expand, workers=0).manifest
        for expand, more in (("turns", {}), ("tree", {}), ("none", {"gates": {"max_lost_reasoning": None}}))
    )
    wanted = targets(tmp_path / "turns")
    assert targets(tmp_path / "tree") == wanted
    assert set(wanted.values()) == {1}
    was, now = Ledger.from_json(rows["ledger"]), Ledger.from_json(trees["ledger"])
    split = trees["splits"]["train"]
    assert 0 < was.total_notes("tokens_saved_by_trees") == rows["splits"]["train"]["tokens"] - split["tokens"]
    assert split["branches"] == now.total_notes("branches") == now.total_notes("rows_added") == now.total("injected")
    assert now.total("trained") == was.total("trained")
    assert now.total("rendered") == was.total("rendered")
    assert not now.imbalance(split["tokens"])
    assert len(EpisodeDataset(tmp_path / "tree")) == 60
    assert "--expand tree" in was.cost_of_turns()
    assert "As rows per turn" in now.cost_of_turns()
    assert Ledger.from_json(whole["ledger"]).cost_of_turns() == ""
    for count in (was.total("rendered"), now.stored, was.total("rendered") - was.total_notes("tokens_in_added_rows")):
        assert f"{count:,}" in was.cost_of_turns()
        assert f"{count:,}" in now.cost_of_turns()


@pytest.mark.parametrize(
    ("overflow", "longest"),
    [
        ("windows", 40),
        ("drop_oldest_turns", 40),
        *((name, 150) for name in ("cut", "drop", "windows", "drop_oldest_turns", "turns", "last_turns")),
        ("turns", 500),
    ],
)
def test_overflow_and_splits_lose_what_rows_lose_and_no_more(
    tmp_path: Path, chats: Path, overflow: str, longest: int
) -> None:
    more = {"packing": {"max_length": longest, "overflow": overflow}, "gates": OPEN_GATES}
    apart = Ledger.from_json(run_build(recipe_of(chats, **more), tmp_path / "rows", workers=0).manifest["ledger"])
    made = run_build(recipe_of(chats, expand="tree", **more), tmp_path / "trees", workers=0).manifest
    ledger, split = Ledger.from_json(made["ledger"]), EpisodeDataset(tmp_path / "trees")
    wanted = targets(tmp_path / "rows")  # windows may begin alike, where each trains an answer of its own
    assert targets(tmp_path / "trees") == wanted
    assert ledger.total("shared_trained") == 0
    assert ledger.total("trained") == wanted.total()
    assert split.lengths.max() <= longest
    assert not ledger.imbalance(split.tokens)
    in_rows, added = EpisodeDataset(tmp_path / "rows").tokens, apart.total_notes("tokens_in_added_rows")
    assert apart.total("rendered") > in_rows > added > 0, "overflow takes something away"
    assert f"rows per turn are {in_rows:,} tokens" in apart.cost_of_turns()
    assert f"these trees would be {in_rows:,} tokens" in ledger.cost_of_turns()
    assert f"stored are {split.tokens:,} (" in ledger.cost_of_turns()
    for one in (apart, ledger):
        assert one.total_notes("tokens_in_added_rows") == added
        assert one.total_notes("tokens_saved_by_trees") == in_rows - split.tokens
        assert f" the {in_rows - added:,} of the conversations" in one.cost_of_turns()
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


@pytest.mark.parametrize(
    ("more", "moved"),
    [({}, (0, 1)), ({"packing": {"max_length": 260, "overflow": "windows"}}, (1, 0)), ({"policy": "all"}, (0, 2**30))],
)
def test_verify_derives_every_tree_again_and_sees_a_branch_that_is_not_where_it_was(
    tmp_path: Path, more: dict[str, Any], moved: tuple[int, int]
) -> None:
    few = write_jsonl(tmp_path / "chats.jsonl", thinking_chats(20))
    run_build(recipe_of(few, expand="tree", **more), tmp_path / "trees", workers=0)
    report = verify(tmp_path / "trees", deep=True)
    assert report.passed, report.findings
    assert report.counts["rows_of_trees"] > 30
    assert any("rows of trees" in sentence for sentence in report.compared)
    path = tmp_path / "trees" / "train" / "branches.u32"
    values = np.fromfile(path, dtype="<u4").reshape(-1, 2)
    values[0] += np.array(moved, dtype="<u4")
    values.tofile(path)
    messages = [finding.message for finding in verify(tmp_path / "trees", deep=True).findings]
    assert any("a branch begins at" in message for message in messages), messages


def test_nobody_reads_branches_as_one_text(tmp_path: Path, chats: Path) -> None:
    run_build(recipe_of(chats, expand="tree"), tmp_path / "trees", workers=0)
    with pytest.raises(FormatError, match="trees"):
        GPTDataLoader({"batch_size": 2, "block_size": 8}, dataset_dir=tmp_path / "trees").get_batch()
    manifest = tmp_path / "trees" / "train" / "episodes.json"
    told = json.loads(manifest.read_text())
    del told["columns"]["branches"]
    manifest.write_text(json.dumps(told))
    for _ in ("not named", "not there"):
        with pytest.raises(FormatError, match="its episodes are trees"):
            EpisodeDataset(tmp_path / "trees")
        manifest.unlink(missing_ok=True)


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
    kept = {(one["prompt"], one["source"]) for number, one in enumerate(samples) if number != 7}
    options: dict[str, Any] = {"on_error": "quarantine", "gates": OPEN_GATES}
    run_build(recipe_of(path, **options), tmp_path / "rows", workers=0)
    alone = {episode.ids.tobytes() for episode in EpisodeDataset(tmp_path / "rows")}
    longest = {one for one in alone if not any(other.startswith(one) and other != one for other in alone)}
    for size in (700, 1 << 20):
        recipe, built = recipe_of(path, expand="tree", tree={"group": "prompt"}, **options), tmp_path / str(size)
        manifest = run_build({**recipe, "shard_bytes": size}, built, workers=0).manifest
        split = EpisodeDataset(built)
        assert (len(split.shards) > 2) == (size < 10_000)
        assert len(split) == len(kept)
        assert not Ledger.from_json(manifest["ledger"]).imbalance(split.tokens)
        if size == 700 or path.suffix == ".jsonl":  # the slow reference takes a second
            report = verify(built, deep=True)
            assert report.passed, report.findings
        rows = {ids.tobytes() for episode in split for ids, _, _ in apart(episode)}
        assert longest <= rows <= alone


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
    known = [group for n, group in enumerate(groups) if n not in lost]
    runs = [key for key, _ in itertools.groupby(known)]
    options: dict[str, Any] = {"tree": {"group": "of"}, "shard_bytes": size, "gates": OPEN_GATES}
    with tempfile.TemporaryDirectory() as temporary:
        path, built = write_jsonl(Path(temporary, "chats.jsonl"), records), Path(temporary, "built")
        try:
            recipe = recipe_of(path, expand="tree", on_error="quarantine", **options)
            ledger = Ledger.from_json(run_build(recipe, built, workers=0).manifest["ledger"])
        except DataError as error:
            assert ("sort the input by of" in str(error) and len(runs) > len(set(runs))) or not known  # noqa: PT017
            return
        assert len(EpisodeDataset(built)) == len(set(known))
        refused = len(groups) - len(known)
        assert ledger.reasons("quarantined") == ({"no_group": refused} if refused else {})
        assert verify(built, deep=True).passed


SAID = ["first question", "first answer", "second question", "second answer", "third question", "third answer"]
SHORT = ["one", "first", "two", "second", "three", "third"]


def _record(*more: str) -> dict[str, Any]:
    messages = [{**message, "weight": 1} for message in talk(*SAID, *more)]
    for message in messages[1::2]:
        message["reasoning_content"] = f"reasons of the {message['content']}"
    return {"id": "one", "messages": messages}


def _built(home: Path, records: list[dict[str, Any]], name: str = "built", **recipe: Any) -> tuple[Ledger, list[str]]:
    """The ledger, and what each episode trains, as text; control tokens are `#`."""
    ledger = proved(plain_recipe(write_jsonl(home / "chats.jsonl", records), **recipe), home / name)
    trained = [episode.ids[episode.weights > 0] for episode in EpisodeDataset(home / name)]  # type: ignore[operator]
    return ledger, ["".join(chr(id) if id < 256 else "#" for id in ids.tolist()) for ids in trained]


@pytest.mark.parametrize("policy", ["all", "per_message", "trl", "post_training", "assistant"])
def test_what_several_rows_have_is_trained_in_one(tmp_path: Path, policy: str) -> None:
    ledger, trained = _built(tmp_path, [_record(), _record()], template="qwen3", policy=policy)
    assert (ledger.total_notes("rows_added"), ledger.total_notes("untrained_terminators")) == (4, 0)
    everything = "".join(trained[:3])
    for i, text in enumerate(SAID):
        assert everything.count(text) == (2 if i % 2 else policy in ("all", "per_message")), text  # answer and reasons
    assert everything.count("#assistant\n") == (3 if policy in ("all", "post_training") else 0)
    assert everything.count("#user\n") == (3 if policy == "all" else 0)
    shown = here("inspect", tmp_path / "chats.jsonl", "-t", "bytes", "-T", "qwen3", "-p", policy, "-n", "1", "--json")
    assert sum(json.loads(line)["trained"] for line in shown.stdout.splitlines()) == len(everything)


@pytest.mark.parametrize(("template", "answers"), [("qwen3", 2), ("chatml", 1)])
@pytest.mark.parametrize("policy", ["all", "per_message"])
def test_what_others_say_after_the_last_answer_is_trained_too(
    tmp_path: Path, policy: str, template: str, answers: int
) -> None:
    _, trained = _built(tmp_path, [_record("fourth question")], template=template, policy=policy)
    for i, text in enumerate([*SAID, "fourth question"]):
        assert "".join(trained).count(text) == (answers if i % 2 else 1), text


@pytest.mark.parametrize("template", ["token_native", "markers", "chatml"])
def test_expand_last_trains_the_last_answer_alone(tmp_path: Path, template: str) -> None:
    records = [{"messages": talk(*SHORT)} for _ in range(2)]
    records[1]["messages"][-1]["train"] = False
    for expand, wanted in (("last", ["third", "second"]), ("turns", ["firstsecondthird", "firstsecond"])):
        _, trained = _built(tmp_path, records, expand, template=template, expand=expand)
        assert [one.replace("#", "") for one in trained] == wanted


@pytest.mark.parametrize("template", ["token_native", "chatml"])
def test_options_of_records_that_a_template_does_not_read_are_refused(tmp_path: Path, template: str) -> None:
    options: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {}, {"effort": "high"}, {}]
    records = [{"id": str(i), "messages": talk(*SHORT), "chat_template_kwargs": one} for i, one in enumerate(options)]
    ledger, _ = _built(tmp_path, records, template=template, on_error="quarantine")
    assert ledger.reasons("quarantined") == {"unknown_option": 2}
    assert [episode.record_id for episode in EpisodeDataset(tmp_path / "built", "train")] == ["0", "2", "4"]
    rejected = (tmp_path / "built" / "rejected.jsonl").read_text().splitlines()
    assert "'enable_thinking'" in rejected[0]
    assert "'effort'" in rejected[1]
