"""Where records and tokens go: the ledger balances against the files, gates hold, quarantine, weights, caps, splits."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from chatmill.compiler.gates import GateError, gates_of
from chatmill.compiler.recipe import Gates
from chatmill.compiler.run import BuildProgress, Outcome, run_build
from chatmill.core.checksums import TREE_BLOCK
from chatmill.core.hash_shares import hash_limit, hash_of, hashes_below
from chatmill.core.ledger import TOKEN_FATES, Ledger
from chatmill.core.texts import Texts
from chatmill.errors import ConfigError, DataError, FormatError, RecordError
from chatmill.read.picks import Pick
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.builds import (
    CHATML,
    chats,
    digest,
    leftovers,
    mixed_recipe,
    plain_recipe,
    proved,
    write_inputs,
    write_jsonl,
)
from tests.hashes import file_entry


def build(recipe: dict[str, Any], out: Path, **options: Any) -> dict[str, Any]:
    return run_build(recipe, out, workers=0, **options).manifest


def pair(name: str, question: str = "q", answer: str = "a", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]
    return {"id": name, "messages": messages}


def record_ids(out: Path, split: str = "train") -> list[str | None]:
    return [episode.record_id for episode in EpisodeDataset(out, split)]


@pytest.mark.parametrize("overflow", ["drop", "drop_oldest_turns", "windows", "cut", "turns", "last_turns"])
def test_the_ledger_is_what_the_files_hold(fast: Path, overflow: str) -> None:
    packing = {"max_length": 250, "overflow": overflow}
    manifest = build(mixed_recipe(write_inputs(fast / "in"), packing=packing), fast / "out")
    ledger = Ledger.from_json(manifest["ledger"])
    assert ledger.imbalance() == []
    assert ledger.as_json() == manifest["ledger"]
    fates = {fate: ledger.total(fate) for fate in TOKEN_FATES}
    assert ledger.total("rendered") == sum(fates.values()) - fates["injected"]
    lost = {"drop": "dropped_trained", "windows": "injected"}.get(overflow, "cut_trained")
    assert fates[lost] > 0, "this input has nothing to lose"
    tokens = trained = stored = 0
    for split, held in manifest["splits"].items():
        for episode in EpisodeDataset(fast / "out", split):
            tokens += len(episode)
            trained += int((episode.weights > 0).sum())
        stored += 250 * held["rows"]
        assert held["fill"] == held["tokens"] / (250 * held["rows"])
    assert trained == fates["trained"]
    assert stored == ledger.stored == fates["trained"] + fates["context"] + fates["injected"] + ledger.padding
    assert ledger.padding == stored - tokens == sum(held["padding"] for held in manifest["splits"].values()) > 0
    read = ledger.total_records("read")
    assert read == sum(ledger.total_records(what) for what in ("built", "skipped", "quarantined")) > 100


def test_the_ledger_by_source_and_role(fast: Path) -> None:
    records = [pair("one", "abc", "de"), {**pair("two", "f", "ghij"), "source": "book"}]
    ledger = build(plain_recipe(write_jsonl(fast / "chats.jsonl", records)), fast / "out")["ledger"]
    assert set(ledger["tokens"]) == {"chats", "book"}
    # <|im_start|> user \n abc <|im_end|> \n, and <|im_start|> assistant \n de <|im_end|> \n
    assert ledger["tokens"]["chats"] == {
        "user": {"rendered": 11, "context": 11},
        "assistant": {"rendered": 15, "trained": 3, "context": 12},
    }
    assert ledger["tokens"]["book"]["assistant"]["trained"] == 5
    assert ledger["records"]["book"] == {"read": {"": 1}, "built": {"": 1}}


counts = st.integers(0, 50)


@given(st.tuples(*[counts] * len(TOKEN_FATES)), st.tuples(counts, counts, counts), st.integers(-3, 3), counts)
def test_any_wrong_count_is_found(fates: tuple[int, ...], outcomes: Any, error: int, padding: int) -> None:
    ledger = Ledger(padding=padding)
    for fate, count in zip(TOKEN_FATES, fates, strict=True):
        ledger.tokens["s", "user", fate] = count
    ledger.tokens["s", "user", "rendered"] = sum(fates[:-1]) + error
    assert bool(ledger.imbalance()) == (error != 0)
    ledger.tokens["s", "user", "rendered"] -= error
    for what, count in zip(("built", "skipped", "quarantined"), outcomes, strict=True):
        ledger.records["s", what, "x"] = count
    ledger.records["s", "read", ""] = sum(outcomes) + error
    assert bool(ledger.imbalance()) == (error != 0)
    ledger.records["s", "read", ""] -= error
    stored = fates[0] + fates[1] + fates[-1] + padding
    assert ledger.stored == stored
    assert bool(ledger.imbalance(stored + error)) == (error != 0)
    assert Ledger.from_json(ledger.as_json()).as_json() == ledger.as_json()
    doubled = Ledger()
    doubled.add(ledger)
    doubled.add(ledger)
    assert doubled.stored == 2 * stored


def test_what_is_no_ledger_is_refused() -> None:
    for wrong in ({}, {"tokens": {}, "records": {}, "notes": {}}, {"tokens": 5}):
        with pytest.raises(FormatError, match="not a ledger"):
            Ledger.from_json(wrong)


def test_a_ledger_that_does_not_balance_ends_the_build(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(fast / "chats.jsonl", chats(5))
    monkeypatch.setattr(Ledger, "stored", property(lambda self: 1))
    with pytest.raises(FormatError, match="the ledger does not balance"):
        build(plain_recipe(path), fast / "out")
    with pytest.raises(FormatError, match="unfinished build"):
        EpisodeDataset(fast / "out")


OPEN = dict.fromkeys(Gates.__struct_fields__)
UNTRAINED, LEFT_OUT = {"records_without_trained_tokens": 0}, {"records_left_out": 0}
CUT, DROP = ({"packing": {"max_length": 100, "overflow": overflow}} for overflow in ("cut", "drop"))
GATES: list[Any] = [
    ({"trained_tokens_lost": 0.1}, CUT, r"442 of \d+ trained tokens are lost", ["long", "long2"]),
    (UNTRAINED, {}, "1 record trains nothing", ["nothing"]),
    (UNTRAINED, DROP, "1 record trains nothing", ["nothing"]),  # a dropped record is not one of these
    ({"untrained_terminators": 0}, CUT, "2 trained turns have an end that is not trained", ["long", "long2"]),
    (LEFT_OUT, {}, r"1 of 5 records are left out \(20.0%\)", []),
    (LEFT_OUT, DROP, r"3 of 5 records are left out \(60.0%\)", ["long"]),
    (UNTRAINED | LEFT_OUT, {}, r"records_without_trained_tokens(.|\n)*\ngate records_left_out", ["nothing"]),
]


@pytest.mark.parametrize(("gates", "changes", "message", "named"), GATES)
def test_a_gate_publishes_nothing_and_a_changed_gate_goes_on(
    fast: Path, gates: dict[str, Any], changes: dict[str, Any], message: str, named: list[str]
) -> None:
    """Two long answers, a record that trains nothing, and one that is broken; what the error asks for is enough."""
    answer, nothing = "x" * (80 + 221 - 1), pair("nothing", train=False)
    records = [pair("long", answer=answer), pair("long2", answer=answer), pair("short"), nothing, "{"]
    path = write_jsonl(fast / "chats.jsonl", records)
    recipe = plain_recipe(path, on_error="quarantine", gates=OPEN | gates, **changes)
    with pytest.raises(GateError, match=message) as caught:
        build(recipe, fast / "out")
    assert "the limit is" in str(caught.value)
    assert re.findall(r"chats.jsonl:\d \((\w+)\)", str(caught.value)) == named
    assert not (fast / "out" / "manifest.json").exists(), "something was published"
    with pytest.raises(GateError, match=message):
        build(recipe, fast / "out", resume=True)
    states: list[Any] = []
    asked = re.findall(r"--set gates\.(\w+)=(\S+) ", str(caught.value))
    enough = OPEN | {name: json.loads(value) for name, value in asked}
    manifest = build({**recipe, "gates": enough}, fast / "out", resume=True, on_progress=states.append)
    assert states[0].chunks_done == states[0].chunks == 1, "the chunks were built a second time"
    assert manifest["recipe"]["gates"] == enough
    assert leftovers(fast / "out") == []
    before = digest(fast / "out")
    with pytest.raises(GateError, match=message):
        build(recipe, fast / "out")
    assert digest(fast / "out") == before, "a finished dataset was touched"


def test_lost_tokens_are_those_cut_and_those_dropped() -> None:
    ledger = Ledger()
    for fate, count in {"trained": 6, "cut_trained": 1, "dropped_trained": 3, "context": 50, "cut_context": 9}.items():
        ledger.tokens["s", "assistant", fate] = count
    (gate,) = (gate for gate in gates_of(Gates(trained_tokens_lost=0.4), ledger) if gate.name == "trained_tokens_lost")
    assert (gate.found, gate.passed) == (0.4, True)
    assert gate.sentence == "4 of 10 trained tokens are lost (40.0000%)"


def test_left_out_records_have_a_limit_by_default_and_the_error_says_why(fast: Path) -> None:
    """One in ten is too many: reasons with counts, the first record of each, and the option that accepts it."""
    records: list[Any] = [*(pair(f"r{i}") for i in range(18)), pair("long", answer="x" * 300)]
    records += [{"id": "pope", "messages": [{"role": "pope", "content": "x"}]}, pair("thin")]
    path = write_jsonl(fast / "a.jsonl", records)
    recipe = plain_recipe(path, on_error="quarantine", gates={}, **DROP)
    with pytest.raises(GateError) as caught:
        build(recipe, fast / "out")
    said = str(caught.value)
    assert "2 of 21 records are left out (9.5%), the limit is 0.05" in said
    assert f"\n  unknown_role 1, the first: {path}:20 (pope): " in said
    assert f"\n  overflow_drop 1, the first: {path}:19 (long)" in said
    assert "--set gates.records_left_out=0.1 " in said


def test_bad_records_go_to_quarantine_with_place_and_reason_or_the_first_ends_the_build(fast: Path) -> None:
    tools = {"id": "tools", "messages": pair("")["messages"], "tools": [{"type": "function"}]}
    pope = {"id": "pope", "messages": [{"role": "pope", "content": "ü"}]}
    path = write_jsonl(fast / "chats.jsonl", [pair("good"), "{broken", pope, [], "", {"messages": []}, tools])
    with pytest.raises(RecordError, match=r"chats\.jsonl:2"):
        build(plain_recipe(path), fast / "failed")
    assert not list(fast.glob("failed/*.json*")), "neither a manifest nor rejected.jsonl"
    recipe = plain_recipe(path, on_error="quarantine", shard_bytes=40)
    manifest = build(recipe, fast / "out")
    data = (fast / "out" / "rejected.jsonl").read_bytes()
    lines = [json.loads(line) for line in data.splitlines()]
    assert [(line["where"].removeprefix(str(path)), line["id"], line["field"], line["reason"]) for line in lines] == [
        (":2", "", "", "invalid_json"),
        (":3", "pope", "messages[0].role", "unknown_role"),
        (":4", "", "", "record_type"),
        (":6", "", "messages", "no_messages"),
        (":7", "tools", "tools", "not_shown"),
    ]
    assert all(line["message"] and set(line) == {"where", "id", "field", "reason", "message"} for line in lines)
    records = manifest["ledger"]["records"]["chats"]
    assert records["read"] == {"": 6}, "a blank line is no record"
    assert records["quarantined"] == Counter(line["reason"] for line in lines)
    assert records["built"] == {"": 1}
    assert manifest["files"]["rejected.jsonl"] == file_entry(data)
    with pytest.raises(ConfigError, match="5 records were put aside"):
        build({**recipe, "on_error": "fail"}, fast / "out")
    write_jsonl(path, ["{", "["])
    with pytest.raises(DataError, match=r"no record .* could be built.*\n  invalid_json 2, the first: .*:1: "):
        build(recipe, fast / "nothing")
    assert not (fast / "nothing" / "manifest.json").exists()


def hash_share(text: str) -> float:
    """Written out a second time: blake2b of 8 bytes, big-endian, as a share of 2**64."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


@pytest.mark.parametrize("weight", [0, 0.3, 1, 2, 2.5])
def test_weights_repeat_and_thin_out_by_a_hash_of_the_record_id(fast: Path, weight: float) -> None:
    """Not the hash of the split: else a thinned-out source would keep what goes into val."""
    names = ["löwe", *(f"r{i}" for i in range(199))]
    kept = write_jsonl(fast / "kept.jsonl", [pair("kept")])
    path = write_jsonl(fast / "chats.jsonl", [pair(name) for name in names])
    sources = [{"path": str(path), "weight": weight}, {"path": str(kept)}]
    manifest = build(plain_recipe(path, sources=sources, gates={}), fast / "out")
    found = Counter(record_ids(fast / "out"))
    del found["kept"]
    wanted = {name: int(weight) + (hash_share(f"weight\0{name}") < weight % 1) for name in names}
    assert found == +Counter(wanted)
    total = sum(found.values())
    assert abs(total - 200 * weight) < 25
    records = manifest["ledger"]["records"]["chats"]
    assert records.get("skipped", {}).get("weight", 0) == 200 - len(found)
    assert records["read"].get("repeated", 0) == total - len(found)


def test_splits_go_by_the_hash_of_the_record_id(fast: Path) -> None:
    names = [f"r{i}" for i in range(400)]
    path = write_jsonl(fast / "chats.jsonl", [pair(name) for name in names])
    build(plain_recipe(path, split={"val_fraction": 0.25}), fast / "out")
    expected = [name for name in names if hash_share(name) < 0.25]
    assert record_ids(fast / "out", "val") == expected
    assert record_ids(fast / "out", "train") == [name for name in names if name not in set(expected)]
    assert 60 < len(expected) < 140


@given(fraction=st.floats(0, 1), keys=st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_hashes_below(fraction: float, keys: list[str]) -> None:
    texts, limit = Texts.of(["other", *keys]).take(np.arange(1, len(keys) + 1)), hash_limit(fraction)
    assert hashes_below(texts, limit).tolist() == [hash_of(key.encode()) < limit for key in keys]
    assert not hashes_below(texts, hash_limit(0.0)).any()
    assert hashes_below(texts, hash_limit(1.0)).all()
    more = hashes_below(texts, hash_limit(min(1.0, float(np.nextafter(fraction, 2)))))
    assert (hashes_below(texts, limit) <= more).all()


@pytest.mark.parametrize("cap", [7, 30, 31])
def test_caps_count_over_the_files_of_a_source(fast: Path, cap: int) -> None:
    names = [[f"{file}-{i}" for i in range(15)] for file in "ab"]
    paths = [write_jsonl(fast / f"{own[0]}.jsonl", [pair(name) for name in own]) for own in names]
    sources = [{"path": [str(path) for path in paths], "name": "both", "max_records": cap}]
    manifest = build(plain_recipe(paths[0], sources=sources, shard_bytes=300), fast / "out")
    assert record_ids(fast / "out") == [*names[0], *names[1]][:cap]
    assert manifest["ledger"]["notes"]["both"].get("records_beyond_max_records", 0) == max(0, 30 - cap)


def samples(seed: int) -> list[Any]:
    """Samples of prompts, those of a prompt next to each other; some have no group, no reward, or cannot be read."""
    rng, records = random.Random(seed), list[Any]()
    for prompt in range(25):
        count, is_alone = rng.randint(1, 5), rng.random() < 0.2
        for number in range(count + is_alone):
            record = pair(f"r{len(records)}", f"{prompt}?", "a" * rng.randint(1, 60))
            record |= {"info": {}, "done": rng.random() < 0.7}
            if number < count:
                record["prompt"] = prompt // 2
                record["source"] = "ab"[prompt % 2]
            if rng.random() < 0.8:
                record["info"] = {"reward": rng.choice([-1, 0.5, 1, True])}
            if rng.random() < 0.05:
                record["messages"] = "none"
            records.append("{broken" if rng.random() < 0.05 else record)
    return records


def picked(records: list[Any], best: bool, done: bool) -> list[str]:
    """The ids of the records that are used, by hand."""
    used: dict[Any, tuple[float, dict[str, Any]]] = {}
    for number, record in enumerate(records):
        if isinstance(record, str) or (done and not record["done"]):
            continue
        reward = record["info"].get("reward")
        score = reward if best and reward is not None and reward is not True else float("-inf")
        group = (record["source"], record["prompt"]) if "prompt" in record else f"alone {number}"
        if group not in used or score > used[group][0]:
            used[group] = score, record
    kept = {record["id"] for _, record in used.values() if record["messages"] != "none"}
    return [record["id"] for record in records if not isinstance(record, str) and record["id"] in kept]


@pytest.mark.parametrize("best", [True, False])
@pytest.mark.parametrize("done", [True, False])
def test_one_record_of_each_group_is_used(fast: Path, best: bool, done: bool) -> None:
    records = samples(4)
    parts = {"a": records[:40], "b": records[40:]}
    files = [str(write_jsonl(fast / f"{name}.jsonl", part)) for name, part in parts.items()]
    pick = {"group": "prompt", **({"best": "info.reward"} if best else {})}
    source = {"path": files, "name": "x", "pick": pick, **({"where": "done == true"} if done else {})}
    for size, most in ((200, None), (1 << 20, None), (1 << 20, 51), (200, 53)):
        sources, out = [source | {"max_records": most}], fast / f"{size} {most}"
        recipe = {"sources": sources, **CHATML, "gates": OPEN, "on_error": "quarantine", "shard_bytes": size}
        ledger = proved(recipe, out)
        assert record_ids(out) == picked(records[:most], best, done)
        assert ledger.reasons("skipped")["pick"] > 10
        assert not any("reward" in note or "prompt" in note for note in ledger.all_notes())


def test_scores_of_any_size_are_compared() -> None:
    scores = [
        Pick(group="g", best="r").score({"r": one}) for one in ("1", None, True, float("nan"), -1e308, 2, 10**400)
    ]
    assert scores[:4] == [-math.inf] * 4
    assert scores[3:] == sorted(scores[3:])
    assert scores[-1] > 1e308


def test_the_manifest_says_what_went_in_and_out_and_a_finished_build_is_left_alone(fast: Path) -> None:
    states: list[BuildProgress] = []
    recipe, out = mixed_recipe(write_inputs(fast / "in")), fast / "out"
    manifest = build(recipe, out, on_progress=states.append)
    last = states[-1]
    assert last.tokens == sum(split["tokens"] for split in manifest["splits"].values())
    assert last.records == Ledger.from_json(manifest["ledger"]).total_records("read")
    assert (last.chunks_done, last.bytes_done) == (last.chunks, last.bytes)
    assert manifest["format"] == "chatmill-dataset"
    assert len(manifest["inputs"]) == 4
    for entry in manifest["inputs"]:
        data = Path(entry["path"]).read_bytes()
        assert len(data) <= TREE_BLOCK
        assert (entry["bytes"], entry["tree-xxh128"]) == (len(data), xxh3_128_hexdigest(xxh3_128_digest(data)))
        assert (entry["lines"] is None) != (entry["records"] is None)
    assert {entry["shape"] for entry in manifest["inputs"]} == {"openai", "alpaca", "prompt_completion"}
    canonical = json.dumps(manifest["recipe"], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    assert manifest["recipe_sha256"] == hashlib.sha256(canonical.encode()).hexdigest()
    assert manifest["tokenizer"]["vocab_size"] == 261
    assert manifest["policy"]["name"] == "assistant"
    assert json.loads((out / "manifest.json").read_text()) == manifest
    docs = (Path(__file__).parents[2] / "docs" / "formats" / "dataset.md").read_text(encoding="utf-8")
    keys = {*manifest, *manifest["inputs"][0], *manifest["splits"]["train"], *manifest["ledger"], *TOKEN_FATES}
    for name in ("tokenizer", "template", "policy"):
        keys |= set(manifest[name])
    keys |= {note for notes in manifest["ledger"]["notes"].values() for note in notes}
    assert len(keys) > 40
    assert not {key for key in keys if f"`{key}`" not in docs}
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    for resume in (False, True):
        assert run_build(recipe, out, workers=0, resume=resume).outcome is Outcome.ALREADY_BUILT
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == times
