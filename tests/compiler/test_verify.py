"""`verify`: sound datasets pass the slow derivation of every record; every kind of damage is found and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.compiler import inputs as inputs_module
from chatmill.errors import ConfigError, FormatError
from chatmill.prove.verify import verify
from chatmill.store.episodes import EpisodeDataset
from tests.cli.run import here
from tests.compiler.builds import write_jsonl
from tests.compiler.verify_sets import (
    build_into,
    edited,
    files_named,
    recipe,
    records,
    rehash,
    small_recipe,
    write_inputs,
    write_source,
)
from tests.damage import flip
from tests.data.tokenizer_files import unpacked


@pytest.fixture(scope="module")
def source(fast_module: Path) -> Path:
    return write_source(fast_module)


SETS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "harmony": (
        "o200k",
        "harmony",
        {"packing": {"max_length": 512, "overflow": "windows"}, "pack": {"length": 700}},
    ),
    "chatml_o200k": ("o200k", "chatml", {"keep_kinds": False, "policy": "last_turn"}),
    "qwen3": ("qwen3", "qwen3", {"policy": "trl"}),
    "qwen3_training": (
        "bytes",
        "qwen3_training",
        {"packing": {"max_length": 3000, "overflow": "windows"}},
    ),
    "token_native": (
        "bytes",
        "token_native",
        {"packing": {"max_length": 900, "overflow": "drop_oldest_turns"}, "pack": {"strategy": "greedy"}},
    ),
    "markers": ("bytes", "markers", {"packing": {"max_length": 1500, "overflow": "drop"}}),
    "llama3": ("bytes", "llama3", {"policy": "per_message"}),
    "words": ("tiny_torchtune", "chatml", {"packing": {"max_length": 400, "overflow": "windows"}}),
}


@pytest.fixture(scope="module")
def inputs(fast_module: Path) -> Path:
    return write_inputs(fast_module / "inputs", count=3)


@pytest.mark.parametrize("name", SETS)
def test_sound_datasets_are_derived_again_without_a_difference(name: str, inputs: Path, fast: Path) -> None:
    tokenizer, template, more = SETS[name]
    named = tokenizer if tokenizer in ("o200k", "bytes") else str(unpacked(tokenizer))
    folder = build_into(fast / "out", recipe(inputs, named, template, **more))
    report = verify(folder, deep=True)
    assert [str(finding) for finding in report.findings] == []
    assert (report.differences, report.blocked, report.passed, report.exit_status) == (0, "", True, 0)
    manifest = json.loads((folder / "manifest.json").read_text())
    stored = sum(split.get("episodes", split.get("documents")) for split in manifest["splits"].values())
    counts = report.counts
    assert counts["episodes_compared"] == counts["episodes"] == stored > 100
    assert set(manifest["splits"]) == {"train", "val"}
    assert counts["records_rejected"] > 10
    # Every answer of every row, by plain Jinja; one nasty text spells a mark that a template looks for.
    not_checked = counts.get("answers_not_checked", 0)
    assert counts["answers_proved"] + not_checked == counts["trained_messages"] >= 100
    assert not_checked == len(report.unchecked) == (template == "qwen3_training")


def test_a_sample_is_of_whole_chunks_and_the_ledger_of_the_others_is_taken_as_stated(inputs: Path, fast: Path) -> None:
    more = {"packing": {"max_length": 1000, "overflow": "windows"}}
    folder = build_into(fast / "out", recipe(inputs, "bytes", "qwen3_training", **more))
    chunks = len((folder / "chunks.jsonl").read_bytes().splitlines())
    report = verify(folder, deep=True, sample=3)
    assert report.passed
    assert report.counts["chunks_derived"] == 3 < chunks
    assert 0 < report.counts["episodes_compared"] < report.counts["episodes"]
    assert any(f"of 3 of {chunks} chunks" in sentence for sentence in report.compared)
    first = EpisodeDataset(folder).shards[0].folder
    flip(first / "mask.bin", 0)
    rehash(folder)
    assert not verify(folder, deep=True, sample=1).passed, "the first chunk is in every sample"
    for sample in (0, -1):
        with pytest.raises(ConfigError, match="goes with deep"):
            verify(folder, deep=True, sample=sample)
    with pytest.raises(ConfigError, match="goes with deep"):
        verify(folder, sample=10)


@pytest.mark.parametrize("lost", ["first", "middle", "last"])
def test_a_line_that_the_cutter_loses_is_found(lost: str, fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Build and proof cut alike, so the proof counts lines in another way too."""
    source, scan = fast / "chats.jsonl", inputs_module._cut_lines
    write_jsonl(source, records("oasst_en100", 20))

    def loses(*given: Any) -> Any:
        xxh128, path, cuts = scan(*given)
        at = {"first": 0, "middle": len(cuts) // 2, "last": len(cuts) - 1}[lost]
        start = cuts[at].start
        length = len(source.read_bytes()[start:].splitlines(keepends=True)[0])
        cut = replace(cuts[at], start=start + length, first=cuts[at].first + 1, count=cuts[at].count - 1)
        return xxh128, path, [*cuts[:at], cut, *cuts[at + 1 :]]

    monkeypatch.setattr(inputs_module, "_cut_lines", loses)
    folder = build_into(fast / "out", small_recipe(source))
    (found,) = verify(folder, deep=True).findings
    assert (found.file, "was cut wrongly" in found.message) == ("chunks.jsonl", True)
    monkeypatch.undo()
    (found,) = verify(folder, deep=True).findings
    assert found.file == "chunks.jsonl"


@pytest.fixture(scope="module")
def sound(fast_module: Path, source: Path) -> Path:
    folder = build_into(fast_module / "sound", small_recipe(source))
    assert len(EpisodeDataset(folder).shards) > 3
    assert verify(folder).passed
    return folder


@pytest.fixture
def damaged(sound: Path, fast: Path) -> Path:
    return Path(shutil.copytree(sound, fast / "damaged"))


def test_workers_find_what_one_process_finds(damaged: Path) -> None:
    for shard in EpisodeDataset(damaged).shards[1:]:
        flip(shard.folder / "tokens.bin", 40)
    found = []
    for workers in (0, 2):
        said = verify(damaged, deep=True, workers=workers).as_json()
        found.append({name: said[name] for name in said if name != "seconds"})
    assert found[0] == found[1]
    assert found[0]["differences"] > 3


@pytest.mark.parametrize("is_rehashed", [False, True], ids=["flipped", "built_wrong"])
@pytest.mark.parametrize(("name", "size"), [("tokens.bin", 4), ("mask.bin", 1), ("kinds.u8", 1)])
def test_a_changed_byte_is_found_in_its_record(name: str, size: int, is_rehashed: bool, damaged: Path) -> None:
    dataset = EpisodeDataset(damaged)
    number, token = 17, 30
    shards, starts, _ = dataset.locate(np.array([number]))
    place = int(starts[0]) + token
    file = f"train/shard_{shards[0]:05d}/{name}"
    flip(damaged / file, place * size)
    if is_rehashed:
        rehash(damaged)
    report = verify(damaged, deep=True)
    assert files_named(report) - {"manifest.json"} >= {file}
    found = [finding for finding in report.findings if finding.file == file and finding.token is not None]
    assert len(found) == 1
    record = dataset[number].record_id
    assert (found[0].episode, found[0].token) == (number, token)
    assert found[0].record == record
    assert found[0].where.endswith(f"chats.jsonl:{number + 1}")
    text = str(found[0])
    assert all(part in text for part in (file, f"episode {number}", str(record)))
    assert ("stored: " in text) == (name == "tokens.bin")
    assert any("was changed" in finding.message for finding in report.findings) != is_rehashed


def test_the_rows_of_a_plan_are_counted_and_compared(source: Path, fast: Path) -> None:
    more = {"packing": {"overflow": "windows"}, "pack": {"length": 6000}}
    folder = build_into(fast / "rows", small_recipe(source, **more))
    report = verify(folder)
    assert report.passed
    held = json.loads((folder / "manifest.json").read_bytes())["splits"]["train"]
    assert (report.counts["rows"], report.counts["padding"]) == (held["rows"], held["padding"])
    assert any(f"{held['rows']:,} packed rows of train with those" in line for line in report.compared)
    for manifest in edited(folder):
        manifest["splits"]["train"]["rows"] += 1
    assert any("rows in train; the planner gives" in finding.message for finding in verify(folder).findings)
    path = folder / "train" / "episodes.json"
    about = json.loads(path.read_bytes())
    path.write_text(json.dumps(about | {"rows": about["rows"] | {"count": 1}}))
    rehash(folder)
    assert any("states 1 packed rows" in finding.message for finding in verify(folder).findings)


def _truncate(folder: Path) -> None:
    with (folder / "train/shard_00001/tokens.bin").open("r+b") as file:
        file.truncate(100)


def _edit_ledger(folder: Path) -> None:
    for manifest in edited(folder):
        tokens = manifest["ledger"]["tokens"]["oasst_en100"]["assistant"]
        tokens["trained"], tokens["context"] = tokens["trained"] - 5, tokens["context"] + 5


def _unbalance(folder: Path) -> None:
    for manifest in edited(folder):
        manifest["ledger"]["records"]["oasst_en100"]["built"][""] += 1


def _write(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x")


SHARD = "train/shard_00000"
FAULTS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "truncated": (_truncate, "train/shard_00001/tokens.bin", "was changed: it has 100 bytes"),
    "missing": (lambda folder: (folder / SHARD / "kinds.u8").unlink(), f"{SHARD}/kinds.u8", "missing"),
    "extra": (lambda folder: _write(folder / SHARD / "notes.txt"), f"{SHARD}/notes.txt", "not in"),
    "extra_split": (lambda folder: _write(folder / "val/tokens.bin"), "val/tokens.bin", "not in the manifest"),
    "index": (lambda folder: flip(folder / SHARD / "episodes.idx", 24, 255), f"{SHARD}/episodes.idx", "was changed"),
    "vocabulary": (
        lambda folder: flip(folder / SHARD / "tokens.bin", 403, 255),
        f"{SHARD}/tokens.bin",
        "no id of the vocabulary",
    ),
    "ledger": (_edit_ledger, "manifest.json", "trained tokens; the files have"),
    "ledger_unbalanced": (_unbalance, "manifest.json", "does not balance"),
    "rejected": (lambda folder: (folder / "rejected.jsonl").write_text(""), "rejected.jsonl", "was changed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named_without_the_inputs(fault: str, damaged: Path) -> None:
    damage, file, sentence = FAULTS[fault]
    damage(damaged)
    report = verify(damaged)
    assert file in files_named(report)
    assert any(sentence in finding.message and finding.file == file for finding in report.findings), report.findings


def test_a_ledger_that_balances_is_still_compared_with_the_inputs(damaged: Path) -> None:
    for manifest in edited(damaged):
        ledger = manifest["ledger"]
        ledger["notes"]["oasst_en100"]["lost_content"] = 7
        ledger["records"]["chats"]["quarantined"] = {"another_reason": 1}
    assert verify(damaged).passed
    messages = [finding.message for finding in verify(damaged, deep=True).findings]
    assert len([message for message in messages if "its ledger says" in message]) == 3


def test_what_is_no_dataset_is_said(fast: Path, sound: Path) -> None:
    with pytest.raises(FormatError, match="no such folder"):
        verify(fast / "nothing")
    with pytest.raises(FormatError, match="no dataset that a build has finished"):
        verify(fast)
    (fast / "manifest.json").write_text("{}")
    with pytest.raises(FormatError, match="'format' is missing"):
        verify(fast)
    manifest = json.loads((sound / "manifest.json").read_text())
    (fast / "manifest.json").write_text(json.dumps({**manifest, "files": {"x": {}}}))
    with pytest.raises(FormatError, match="the file was edited or damaged"):
        verify(fast)
    (fast / "manifest.json").write_text(json.dumps({**manifest, "inputs": [1]}))
    assert "was changed after it was written" in verify(fast).findings[0].message


def test_the_command_line(fast: Path) -> None:
    source = write_jsonl(fast / "chats.jsonl", records("oasst_en100", 10))
    folder = build_into(fast / "out", small_recipe(source))

    def says(status: int, *options: str) -> str:
        done = here("verify", folder, *options)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    said = says(0, "--deep")
    assert "10 records derived from their source by the slow path (UTF-8)" in said
    assert "0 differences" in said
    shutil.move(source, fast / "elsewhere")
    assert "chats.jsonl is not here" in says(2, "--deep")
    shutil.move(fast / "elsewhere", source)
    flip(folder / "train/shard_00000/tokens.bin", 400)
    report = json.loads(says(1, "--deep", "--json"))
    assert report["differences"] == len(report["findings"]) > 1
    assert not report["passed"]
    assert "train/shard_00000/tokens.bin" in says(1)


def test_a_dataset_of_a_field_map_is_verified_by_it(tmp_path: Path) -> None:
    shape = {"messages": "dialog", "role": "speaker", "content": "text", "id": "ticket"}
    talk = [{"speaker": "user", "text": "Where is it?"}, {"speaker": "assistant", "text": "Here."}]
    write_jsonl(tmp_path / "talks.jsonl", [{"dialog": talk, "ticket": number} for number in range(5)])
    sources = [{"path": str(tmp_path / "talks.jsonl"), "shape": shape}]
    built = build_into(tmp_path / "out", small_recipe(tmp_path / "talks.jsonl", sources=sources))
    (file,) = json.loads((built / "manifest.json").read_text())["inputs"]
    assert json.loads(file["shape"])["messages"] == "dialog"
    assert [episode.record_id for episode in EpisodeDataset(built, "train")] == ["0", "1", "2", "3", "4"]
    report = verify(built, deep=True)
    assert (report.exit_status, report.passed, report.differences) == (0, True, 0)
