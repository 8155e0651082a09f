"""`verify`: sound datasets pass the slow derivation of every record; every kind of damage is found and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from chatmill.compiler import chunk_job, scan_jobs
from chatmill.core.kinds import REPEATED, Part, RoleCode, kind, parts_of, roles_of
from chatmill.core.tokens import Tokens
from chatmill.errors import ConfigError, FormatError
from chatmill.label.policy import Policy
from chatmill.prove.columns import check_columns
from chatmill.prove.report import VerifyReport
from chatmill.prove.verify import verify
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.receipts import receipt_bytes
from chatmill.tokenizer.byte_level import ByteTokenizer
from tests.compiler.builds import OPEN_GATES, write_jsonl
from tests.compiler.verify_sets import (
    build_into,
    command_says,
    files_named,
    recipe,
    records,
    rehash,
    small_recipe,
    write_inputs,
)
from tests.damage import flip
from tests.data.tokenizer_files import unpacked
from tests.load.sets import Item, write_set


@pytest.fixture(scope="module")
def source(fast_module: Path) -> Path:
    """Forty good records, and one that is refused."""
    return write_jsonl(fast_module / "chats.jsonl", [*records("oasst_en100", 40), {"id": "bad", "messages": []}])


@pytest.fixture(scope="module")
def inputs(fast_module: Path) -> Path:
    return write_inputs(fast_module / "inputs", count=3)


def cut(length: int, overflow: str = "windows", **more: Any) -> dict[str, Any]:
    return {"packing": {"max_length": length, "overflow": overflow}, **more}


SETS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "harmony": ("o200k", "harmony", cut(512, pack={"length": 700})),
    "chatml_o200k": ("o200k", "chatml", {"keep_kinds": False, "policy": "last_turn"}),
    "qwen3": ("qwen3", "qwen3", {"policy": "trl"}),
    "qwen3_training": ("bytes", "qwen3_training", cut(3000)),
    "token_native": ("bytes", "token_native", cut(900, "drop_oldest_turns", pack={"strategy": "greedy"})),
    "markers": ("bytes", "markers", cut(1500, "drop")),
    "llama3": ("bytes", "llama3", {"policy": "per_message"}),
    "words": ("tiny_torchtune", "chatml", cut(400)),
}


@pytest.mark.parametrize("name", SETS)
def test_sound_datasets_are_derived_again_without_a_difference(name: str, inputs: Path, fast: Path) -> None:
    tokenizer, template, more = SETS[name]
    named = tokenizer if tokenizer in ("o200k", "bytes") else str(unpacked(tokenizer))
    folder = build_into(fast / "out", recipe(inputs, named, template, **more))
    report = verify(folder, deep=True)
    assert [str(finding) for finding in report.findings] == []
    assert (report.differences, report.blocked, report.passed, report.exit_status) == (0, "", True, 0)
    manifest, counts = json.loads((folder / "manifest.json").read_text()), report.counts
    assert set(manifest["splits"]) == {"train", "val"}
    stored = sum(split["episodes"] for split in manifest["splits"].values())
    assert counts["episodes_compared"] == counts["episodes"] == stored > 100
    assert counts["records_rejected"] > 10
    # Every answer of every row, by plain Jinja; one nasty text spells a mark that a template looks for.
    not_checked = counts.get("answers_not_checked", 0)
    assert counts["answers_proved"] + not_checked == counts["trained_messages"] >= 100
    assert not_checked == len(report.unchecked) == (template == "qwen3_training")


def test_a_sample_is_of_whole_chunks_and_the_ledger_of_the_others_is_taken_as_stated(inputs: Path, fast: Path) -> None:
    folder = build_into(fast / "out", recipe(inputs, "bytes", "qwen3_training", **cut(1000)))
    chunks = len((folder / "chunks.jsonl").read_bytes().splitlines())
    report = verify(folder, deep=True, sample=3)
    assert report.passed
    assert report.counts["chunks_derived"] == 3 < chunks
    assert 0 < report.counts["episodes_compared"] < report.counts["episodes"]
    assert any(f"of 3 of {chunks} chunks" in sentence for sentence in report.compared)
    flip(EpisodeDataset(folder).shards[0].folder / "mask.bin", 0)
    rehash(folder)
    assert not verify(folder, deep=True, sample=1).passed, "the first chunk is in every sample"
    for deep, sample in ((True, 0), (True, -1), (False, 10)):
        with pytest.raises(ConfigError, match="goes with deep"):
            verify(folder, deep=deep, sample=sample)


@pytest.mark.parametrize("lost", ["first", "middle", "last"])
def test_a_line_that_the_cutter_loses_is_found(lost: str, fast: Path) -> None:
    """Build and proof cut alike, so the proof counts lines in another way too."""
    source, scan = write_jsonl(fast / "chats.jsonl", records("oasst_en100", 20)), scan_jobs._numbered

    def loses(*given: Any) -> Any:
        cuts = scan(*given)
        at = {"first": 0, "middle": len(cuts) // 2, "last": len(cuts) - 1}[lost]
        start = cuts[at].start
        length = len(source.read_bytes()[start:].splitlines(keepends=True)[0])
        cut = replace(cuts[at], start=start + length, first=cuts[at].first + 1, count=cuts[at].count - 1)
        return [*cuts[:at], cut, *cuts[at + 1 :]]

    with mock.patch.object(scan_jobs, "_numbered", loses):
        folder = build_into(fast / "out", small_recipe(source))
        (found,) = verify(folder, deep=True).findings
    assert (found.file, "was cut wrongly" in found.message) == ("chunks.jsonl", True)
    (found,) = verify(folder, deep=True).findings
    assert found.file == "chunks.jsonl"


SEVERAL_TURNS = [record for record in records("oasst_en100", 60) if len(record["messages"]) > 2][:12]


@pytest.fixture(scope="module")
def sound(fast_module: Path) -> Path:
    """Packed rows under a template that changes earlier turns: rows with answers that are context."""
    source = write_jsonl(fast_module / "turns.jsonl", [*SEVERAL_TURNS, {"id": "bad", "messages": []}])
    packed: dict[str, Any] = {"packing": {"overflow": "windows"}, "pack": {"length": 9000}, "gates": OPEN_GATES}
    folder = build_into(fast_module / "sound", small_recipe(source, template="qwen3", shard_bytes=8000, **packed))
    assert len(EpisodeDataset(folder).shards) > 3
    report = verify(folder, deep=True)
    assert report.passed
    assert report.counts["answers_proved"] == report.counts["trained_messages"] > 20
    held = json.loads((folder / "manifest.json").read_bytes())["splits"]["train"]
    assert (report.counts["rows"], report.counts["padding"]) == (held["rows"], held["padding"])
    assert any(f"{held['rows']:,} packed rows of train with those" in line for line in report.compared)
    return folder


@pytest.fixture
def damaged(sound: Path, fast: Path) -> Path:
    return Path(shutil.copytree(sound, fast / "damaged"))


def test_workers_find_what_one_process_finds(damaged: Path) -> None:
    for shard in EpisodeDataset(damaged).shards[1:]:
        flip(shard.folder / "tokens.bin", 40)
    one, two = (verify(damaged, deep=True, workers=workers).as_json() | {"seconds": 0} for workers in (0, 2))
    assert one == two
    assert one["differences"] > 3


@pytest.mark.parametrize("is_rehashed", [False, True], ids=["flipped", "built_wrong"])
@pytest.mark.parametrize(("name", "size"), [("tokens.bin", 4), ("mask.bin", 1), ("kinds.u8", 1)])
def test_a_changed_byte_is_found_in_its_record(name: str, size: int, is_rehashed: bool, damaged: Path) -> None:
    dataset, number, token = EpisodeDataset(damaged), 17, 30
    shards, starts, _ = dataset.locate(np.array([number]))
    file = f"train/shard_{shards[0]:05d}/{name}"
    flip(damaged / file, (int(starts[0]) + token) * size)
    if is_rehashed:
        rehash(damaged)
    report = verify(damaged, deep=True)
    assert files_named(report) - {"manifest.json"} >= {file}
    (found,) = [finding for finding in report.findings if finding.file == file and finding.token is not None]
    record = dataset[number].record_id
    assert (found.episode, found.token, found.record) == (number, token, record)
    line = [one["id"] for one in SEVERAL_TURNS].index(record) + 1
    assert found.where.endswith(f"turns.jsonl:{line}")
    assert all(part in str(found) for part in (file, f"episode {number}", str(record)))
    assert ("stored: " in str(found)) == (name == "tokens.bin")
    assert any("was changed" in finding.message for finding in report.findings) != is_rehashed


Damage = Callable[[Path], Any]


def stated(place: str, value: Any) -> Damage:
    """Another value in a manifest."""

    def damage(path: Path) -> None:
        content = json.loads(path.read_bytes())
        *keys, last = place.split(".")
        reduce(dict.__getitem__, keys, content)[last] = value
        path.write_bytes(receipt_bytes(content))

    return damage


def built_wrong(places: Callable[[Any, Any], Any]) -> Damage:
    """Places of a shard changed, as a build might have stored them; they are chosen by its mask and its kinds."""

    def damage(path: Path) -> None:
        mask, kinds = (np.fromfile(path.with_name(name), dtype=np.uint8) for name in ("mask.bin", "kinds.u8"))
        for place in np.flatnonzero(places(mask, kinds)).tolist():
            flip(path, place * path.stat().st_size // len(mask))

    return damage


RECEIPT, PLAN, SHARD = "manifest.json", "train/episodes.json", "train/shard_00000"
TOKENS, MASK, INDEX = (f"{SHARD}/{name}" for name in ("tokens.bin", "mask.bin", "episodes.idx"))
FAULTS: list[tuple[str, str, Damage, str]] = [
    ("hashes", TOKENS, lambda path: path.write_bytes(bytes(99)), "was changed: it has 99 bytes"),
    ("hashes", MASK, Path.unlink, "missing"),
    ("hashes", f"{SHARD}/notes.txt", Path.touch, "not in"),
    ("hashes", "val/tokens.bin", Path.touch, "not in the manifest"),
    ("hashes", INDEX, lambda path: flip(path, 24, 255), "was changed"),
    ("hashes", "rejected.jsonl", lambda path: path.write_bytes(b""), "was changed"),
    ("columns", TOKENS, lambda path: flip(path, 403, 255), "no id of the vocabulary"),
    ("columns", RECEIPT, stated("ledger.tokens.oasst_en100.assistant.trained", 5), "trained tokens; the files have"),
    ("columns", RECEIPT, stated("ledger.records.oasst_en100.built.", 1), "does not balance"),
    ("columns", RECEIPT, stated("splits.train.rows", 1), "rows in train; the planner gives"),
    ("columns", PLAN, stated("rows.count", 1), "states 1 packed rows"),
    ("inputs", RECEIPT, stated("ledger.notes.oasst_en100.lost_content", 7), "its ledger says 7"),
    ("inputs", RECEIPT, stated("ledger.records.turns.quarantined", {"another_reason": 1}), "its ledger says 1"),
    ("inputs", MASK, built_wrong(lambda mask, kinds: mask != np.roll(mask, 1)), "weights is"),
    ("inputs", MASK, built_wrong(lambda mask, kinds: mask * (parts_of(kinds) == Part.TERMINATOR)), "must be 1"),
    ("inputs", MASK, built_wrong(lambda mask, kinds: kinds & REPEATED), "must be 0"),
    ("inputs", TOKENS, built_wrong(lambda mask, kinds: np.arange(len(mask)) == np.argmax(mask) - 20), "the id is"),
]
"""What finds a fault, its file, how it is made, and what is said; all but the hashes are made right again."""


@pytest.mark.parametrize(("found_by", "file", "damage", "sentence"), FAULTS)
def test_faults_are_found_and_named(found_by: str, file: str, damage: Damage, sentence: str, damaged: Path) -> None:
    (damaged / "val").mkdir()
    damage(damaged / file)
    if found_by != "hashes":
        rehash(damaged)
    report = verify(damaged)
    if found_by == "inputs":
        assert not any(sentence in finding.message for finding in report.findings)
        report = verify(damaged, deep=True)
    assert file in files_named(report)
    assert any(sentence in finding.message and finding.file == file for finding in report.findings), report.findings


def test_what_is_no_dataset_is_said(fast: Path, sound: Path) -> None:
    with pytest.raises(FormatError, match="no such folder"):
        verify(fast / "nothing")
    with pytest.raises(FormatError, match="no dataset that a build has finished"):
        verify(fast)
    manifest = json.loads((sound / "manifest.json").read_text())
    for content, says in (({}, "'format' is missing"), (manifest | {"files": {"x": {}}}, "was edited or damaged")):
        (fast / "manifest.json").write_text(json.dumps(content))
        with pytest.raises(FormatError, match=says):
            verify(fast)


def test_what_a_build_read_may_be_gone_or_changed(fast: Path) -> None:
    source = write_jsonl(fast / "chats.jsonl", records("oasst_en100", 10))
    folder = build_into(fast / "out", small_recipe(source))
    said = command_says(0, folder, "--deep")
    assert "10 records derived from their source by the slow path (UTF-8)" in said
    assert "0 differences" in said
    whole = source.read_bytes()
    for changed in (whole.replace(b"a", b"b", 1), whole[:-10]):
        source.write_bytes(changed)
        report = verify(folder, deep=True)
        assert files_named(report) == {str(source)}
        assert "1 of 1 inputs have changed" in report.blocked
    source.unlink()
    report = verify(folder, deep=True)
    assert (report.exit_status, report.passed, report.differences) == (2, False, 0)
    assert str(source) in report.blocked
    assert "chats.jsonl is not here" in command_says(2, folder, "--deep")
    command_says(0, folder)
    source.write_bytes(whole)
    flip(folder / "train/shard_00000/tokens.bin", 400)
    as_json = json.loads(command_says(1, folder, "--deep", "--json"))
    assert as_json["differences"] == len(as_json["findings"]) > 1
    assert not as_json["passed"]
    assert "train/shard_00000/tokens.bin" in command_says(1, folder)


def test_a_shape_and_a_policy_of_ones_own_are_read_again(fast: Path) -> None:
    """The policy trains questions too, but only after the last of them: build and slow derivation agree."""
    shape = {"messages": "dialog", "role": "speaker", "content": "text", "id": "ticket"}
    chats = [
        {"ticket": number, "dialog": [{"speaker": m["role"], "text": m["content"]} for m in record["messages"]]}
        for number, record in enumerate(SEVERAL_TURNS[:6])
    ]
    path, policy = write_jsonl(fast / "talks.jsonl", chats), fast / "late.json"
    parts = ("header", "content", "terminator", "separator")
    weights = {f"{role}.{part}": 1 for role in ("user", "assistant") for part in parts}
    policy.write_text(json.dumps({"weights": weights, "scope": "last_turn"}))
    sources = [{"path": str(path), "shape": shape}]
    folder = build_into(fast / "out", small_recipe(path, sources=sources, policy=str(policy)))
    (file,) = json.loads((folder / "manifest.json").read_text())["inputs"]
    assert json.loads(file["shape"])["messages"] == "dialog"
    report = verify(folder, deep=True)
    assert [str(finding) for finding in report.findings] == []
    assert report.counts["records_derived"] == 6
    episodes: list[Any] = list(EpisodeDataset(folder))
    assert [episode.record_id for episode in episodes] == ["0", "1", "2", "3", "4", "5"]
    for episode in episodes:
        assert set(roles_of(episode.kinds[episode.weights > 0]).tolist()) == {RoleCode.ASSISTANT}


OWN_TEMPLATE = """{#-
chatmill: template
tokens: <|bos|> <|eos|>
stops: <|eos|>
bos: <|bos|>
-#}
{{- '<|bos|>' -}}
{%- for message in messages -%}{{- message.role ~ ': ' ~ message.content ~ '<|eos|>' -}}{%- endfor -%}
{%- if add_generation_prompt %}{{- 'assistant: ' -}}{% endif -%}
"""


def test_a_tokenizer_and_a_template_of_ones_own_are_files(fast: Path, source: Path) -> None:
    tokenizer, own, twice = fast / "tokenizer", fast / "own.jinja", fast / "twice.jinja"
    shutil.copytree(unpacked("tiny_torchtitan"), tokenizer)
    own.write_text(OWN_TEMPLATE)
    folder = build_into(fast / "out", small_recipe(source, tokenizer=str(tokenizer), template=str(own)))
    report = verify(folder, deep=True)
    assert report.passed
    assert report.counts["answers_proved"] > 50
    assert not report.unchecked
    own.write_text(OWN_TEMPLATE.replace("assistant: ", "model: "))
    assert files_named(verify(folder)) == {str(own)}
    own.write_text(OWN_TEMPLATE)
    file = tokenizer / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))
    report = verify(folder, deep=True)
    assert files_named(report) == {str(file)}
    assert "tokenizer has changed since the build" in report.findings[0].message
    assert "not derived again" in report.blocked
    file.write_text("{")
    assert files_named(verify(folder)) == {str(file)}
    shutil.rmtree(tokenizer)
    report = verify(folder)
    assert report.passed
    assert any("is not here" in sentence for sentence in report.unchecked)
    assert verify(folder, deep=True).exit_status == 2
    twice.write_text(OWN_TEMPLATE.replace("'<|bos|>'", "'<|bos|><|bos|>'"))
    report = verify(build_into(fast / "twice", small_recipe(source, template=str(twice))))
    assert report.counts["double_bos"] == report.counts["episodes"] == 40
    assert report.findings[0].message == "256: one BOS token follows another"


WEIGHTS, ENCODED = Policy.run_weights, ByteTokenizer.encode_batch


def headers_too(policy: Policy, tokens: Tokens) -> Any:
    is_header = tokens.run_kinds == kind(RoleCode.ASSISTANT, Part.HEADER)
    return np.where(is_header, np.float32(1), WEIGHTS(policy, tokens))


def p_for_q(tokenizer: ByteTokenizer, texts: list[str]) -> Any:
    ids, offsets = ENCODED(tokenizer, texts)
    return np.where(ids == ord("q"), ord("p"), ids), offsets


@pytest.mark.parametrize(
    ("owner", "name", "wrong", "column"),
    [(Policy, "run_weights", headers_too, "mask.bin"), (ByteTokenizer, "encode_batch", p_for_q, "tokens.bin")],
)
def test_a_build_that_goes_wrong_is_caught(
    owner: type, name: str, wrong: Any, column: str, fast: Path, source: Path
) -> None:
    with mock.patch.object(owner, name, wrong):
        folder = build_into(fast / "out", small_recipe(source))
    assert verify(folder).passed
    report = verify(folder, deep=True)
    assert report.differences > 20
    of_tokens = [finding for finding in report.findings if finding.token is not None]
    assert {Path(finding.file).name for finding in of_tokens} == {column}
    assert all(finding.record and finding.where for finding in of_tokens)


BOS = 7


def test_an_episode_that_ends_with_bos_before_one_that_begins_with_it_is_no_double(tmp_path: Path) -> None:
    """GPT-2 has one token for both ends: only two of them in one episode are a mistake."""
    sound = [[BOS, 1, 2, BOS], [BOS, 3, BOS], [BOS], [BOS, 1, BOS]]
    items = [Item(ids=ids, weights=[1] * len(ids)) for ids in (*sound, [BOS, BOS, 3, BOS], [BOS, 2, BOS, BOS])]
    report = VerifyReport(directory=write_set(tmp_path, items))
    check_columns(EpisodeDataset(tmp_path), report, vocab_size=9, bos_id=BOS)
    found = [(finding.episode, finding.token, finding.message) for finding in report.findings]
    assert found == [(4, 1, "7: one BOS token follows another")]
    assert (report.counts["double_bos"], report.counts["episodes"]) == (2, 6)


def test_episodes_that_no_input_gives_are_found(fast: Path) -> None:
    """A build that writes its last record three times stores more than its inputs give."""
    rows = records("oasst_en100", 12)
    path = write_jsonl(fast / "chats.jsonl", rows)
    more = cut(6000, "cut", sources=[{"path": str(path), "weight": 1.000001}])  # not 1: copies are counted
    with mock.patch.object(chunk_job, "copies_of", lambda key, weight: 3 if key == rows[-1]["id"] else 1):
        folder = build_into(fast / "out", small_recipe(path, **more))
    assert len(EpisodeDataset(folder)) == 14
    assert verify(folder).passed
    found = [finding for finding in verify(folder, deep=True).findings if "its ledger says" not in finding.message]
    surplus = "has 2 episodes more than its input gives, from 12 on"
    assert [(finding.file, finding.message) for finding in found] == [("train/shard_00001", surplus)]
