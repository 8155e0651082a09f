"""What a distillation dataset has as a build has it: `verify --deep`, `diff`, exports."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.distill.check import verify_synth_kd
from chatmill.distill.run import build_synth_kd
from chatmill.errors import ConfigError
from chatmill.export.export import export_dataset
from chatmill.prove.compare.diff import Change, diff_datasets
from chatmill.store.documents import open_dataset
from chatmill.store.kd import O200K_FINGERPRINT
from chatmill.store.kd_shard import KDShard
from chatmill.store.receipts import receipt_bytes, sealed
from chatmill.systems.synth_kd import synth_kd_split
from chatmill.tokenizer.load import load_tokenizer
from tests.cli.run import here
from tests.damage import flip
from tests.distill.inputs import chat, in_chunks_of, row, text, write_input

START = 200006


@pytest.fixture(scope="module")
def built(fast_module: Path) -> Path:
    """Two shards with rows of several forms, one of which cannot be used."""
    rows = [row(f"id-{n}", chat(f"question {n}", "x" * n)) for n in range(24)]
    rows[3] = row("odd", [{"role": "user", "content": "plain"}, *chat()[1:]])
    rows[5] = row("bad", [])
    rows[7] = row("first", [text("assistant", "a", channel="final"), *chat()])
    source = write_input(fast_module / "in", [rows[:12], rows[12:]], group=5)
    options: dict[str, Any] = {"workers": 0, "on_error": "quarantine", "valid_fraction": 0.3}
    in_chunks_of(5, source, fast_module / "out", **options)
    return fast_module / "out"


def with_right_hashes(root: Path, change: Callable[[dict[str, Any]], None] = lambda manifest: None) -> None:
    """Write the manifest anew, so that only the rows themselves can tell."""
    manifest = json.loads((root / "manifest.json").read_bytes())
    files = [file for split in manifest["splits"].values() for shard in split["shards"] for file in shard["files"]]
    for file in [*files, manifest["failed"]["file"]]:
        content = (root / file["path"]).read_bytes()
        file |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    change(manifest)
    del manifest["contents_sha256"]
    (root / "manifest.json").write_bytes(receipt_bytes(sealed(manifest)))


@pytest.mark.parametrize("sample", [None, 5, 1000])
def test_a_good_dataset_passes(built: Path, sample: int | None) -> None:
    report = verify_synth_kd(built, True, sample)
    assert report.passed, report.findings
    assert report.counts["records_derived"] == (sample if sample == 5 else 24)
    with pytest.raises(ConfigError, match="goes with deep"):
        verify_synth_kd(built, sample=5)


def test_a_changed_token_is_found_with_its_record(built: Path, fast: Path) -> None:
    """A token of a text: no rule of the format is broken, and all hashes are right."""
    root = shutil.copytree(built, fast / "root")
    shard = KDShard.open(root / "train/shard_01_tokens")
    place = shard.place(2)
    at = place.start + 4
    assert shard.document(2)[0][4] < 199_000, "an ordinary token"
    flip(root / "train/shard_01_tokens.bin", 4 * at)
    with_right_hashes(root)
    assert verify_synth_kd(root).passed, "only the input can tell"
    report = verify_synth_kd(root, True)
    (finding,) = report.findings
    assert (finding.file, finding.split, finding.episode, finding.token) == ("train/shard_01_tokens.bin", "train", 2, 4)
    in_train = [name for name in (f"id-{n}" for n in range(12, 24)) if synth_kd_split(name, 0.3) == "train"]
    assert finding.record == in_train[2]
    assert finding.stored != finding.derived


def test_what_else_the_rows_can_tell(built: Path, fast: Path) -> None:
    root = fast / "root"

    def findings(damage: Callable[[], object]) -> str:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(built, root)
        damage()
        report = verify_synth_kd(root, True)
        assert not report.passed
        return "\n".join([*map(str, report.findings), report.blocked])

    line = (built / "quarantine.jsonl").read_bytes()
    other = line.replace(b":row 6", b":row 7")
    assert other != line
    lacks = findings(lambda: ((root / "quarantine.jsonl").write_bytes(other), with_right_hashes(root)))
    assert "lacks a row that cannot be used: the row has no messages" in lacks
    assert "has a row that can be used" in lacks

    def ledger(change: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
        return lambda: with_right_hashes(root, lambda manifest: change(manifest["ledger"]))

    def one_more_user_token(found: dict[str, Any]) -> None:
        user = found["tokens"]["shard_00"]["user"]
        user |= {fate: count + 1 for fate, count in user.items()}

    assert "the files have" in findings(ledger(one_more_user_token))
    assert "does not balance" in findings(ledger(lambda found: found["records"]["shard_00"].update(built={"": 2})))


def test_without_the_input_it_says_so(built: Path, fast: Path) -> None:
    root = shutil.copytree(built, fast / "root")
    with_right_hashes(root, lambda manifest: manifest["input"].update(path=str(fast / "gone")))
    report = verify_synth_kd(root, True)
    assert report.exit_status == 2
    assert "the rows were not rendered again: there is no" in report.blocked
    source = shutil.copytree(built.parent / "in", fast / "in")
    (source / "manifest.json").write_text('{"schema_version": "synth_harmony_v1", "more": 1}')
    with_right_hashes(root, lambda manifest: manifest["input"].update(path=str(source)))
    report = verify_synth_kd(root, True)
    assert report.exit_status == 1
    assert "the input has changed" in str(report.findings[0])


def test_the_command(built: Path) -> None:
    shown = here("verify", built, "--deep", "--sample", "4")
    assert shown.returncode == 0, shown.stderr
    assert "4 of 24 rows rendered again by openai-harmony" in shown.stdout


def test_documents_are_read_as_those_of_any_dataset(built: Path) -> None:
    opened = open_dataset(built)
    assert list(opened.splits) == ["train", "valid"]
    for split, documents in opened.splits.items():
        shards = [KDShard.open(built / split / f"shard_0{n}_tokens") for n in range(2)]
        slow = [shard.document(number) for shard in shards for number in range(len(shard))]
        order = np.arange(len(documents))[::-1].copy()
        found = documents.gather(order)
        assert documents.facts("record_id", order) is documents.facts("turns", order) is None
        for place, (ids, mask, span) in enumerate(reversed(slow)):
            own = slice(int(found.offsets[place]), int(found.offsets[place + 1]))
            assert found.ids[own].tolist() == ids.tolist()
            assert found.weights is not None
            assert found.kinds is not None
            assert found.weights[own].tolist() == [0, *mask.tolist()[:-1]]
            assert found.kinds[own].tolist() == [{0: 0, 1: 35, 2: 34}[value] for value in [0, *span.tolist()[:-1]]]
    assert load_tokenizer("o200k").fingerprint == O200K_FINGERPRINT


def test_diff_and_export(built: Path, fast: Path) -> None:
    source = fast / "in"
    rows = [row(f"id-{n}", chat(f"question {n}", "x" * n)) for n in range(24)]
    write_input(source, [rows[:12], rows[12:]], group=5)
    build_synth_kd(source, fast / "other", workers=0, valid_fraction=0.3)
    found = diff_datasets(built, fast / "other")
    assert found.counts[Change.EQUAL] == 21, "all but the three that are other rows there"
    assert (found.counts[Change.ONLY_IN_A], found.counts[Change.ONLY_IN_B]) == (2, 3)
    assert any(item.what.startswith("recipe.input") for item in found.manifest)
    assert found.decoders[0] is not None
    assert "<|start|>" in found.decoders[0].decode(np.array([START]))
    export_dataset(built, "megatron", fast / "megatron", split="train")
    opened = open_dataset(fast / "megatron")
    assert opened.about == {name: value for name, value in open_dataset(built).about.items() if name in opened.about}
    assert diff_datasets(fast / "megatron", fast / "megatron").equal
    (prefix,) = (fast / "megatron").glob("train/*_tokens.idx")
    again = KDShard.open(prefix.with_suffix(""))
    assert again.document(0)[2].tolist() == KDShard.open(built / "train/shard_00_tokens").document(0)[2].tolist()
