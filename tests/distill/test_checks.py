"""What a build refuses or puts aside, and what `verify`, `diff` and exports say of a distillation dataset."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from chatmill import build_synth_kd, diff_datasets, export_dataset, load_tokenizer, verify_synth_kd
from chatmill.compiler.run import Outcome
from chatmill.distill.input_shards import read_input
from chatmill.errors import ConfigError, DataError, FormatError, RecordError
from chatmill.prove.compare.diff import Change
from chatmill.store.documents import open_dataset
from chatmill.store.kd import O200K_FINGERPRINT
from chatmill.store.kd_shard import KDShard
from chatmill.store.receipts import receipt_bytes, sealed
from chatmill.systems.synth_kd import synth_kd_split
from tests.cli.run import here
from tests.compiler.builds import digest
from tests.damage import flip
from tests.distill.inputs import REAL, chat, in_chunks_of, listed_files, manifest_of, row, small, text, write_input

START = 200006
OPTIONS: dict[str, Any] = {"workers": 0, "valid_fraction": 0.3}
ROWS = [row(f"id-{n}", chat(f"question {n}", "x" * n)) for n in range(24)]
USED = {
    3: row("odd", [{"role": "user", "content": "plain"}, *chat()[1:]]),
    7: row("first", [text("assistant", "a", channel="final"), *chat()]),
}
GOOD = [USED.get(n, one) for n, one in enumerate(ROWS)]
TWO_TEXTS = text("user", "x")["content"] * 2
BAD = {
    "no_synth_id": (row(None, chat()), "has no synth_id"),
    "unknown_role": (row("bad", [text("tool", "x"), *chat()]), r"messages\[0\].role: role 'tool'"),
    "unknown_channel": (row("bad", [*chat()[:1], text("assistant", "x", channel="commentary")]), "'commentary'"),
    "no_assistant": (row("bad", chat()[:1]), "no assistant message"),
    "no_messages": (row("bad", []), "no messages"),
    "invalid_json": (row("bad", '{"messages": ['), "not JSON"),
    "several_contents": (row("bad", [{"role": "user", "content": TWO_TEXTS}, *chat()]), r"messages\[0\].content"),
    "harmony_refused": (row("bad", [{"role": "user", "content": None}, *chat()]), "the Harmony renderer takes"),
}


@pytest.fixture(scope="module")
def source(fast_module: Path) -> Path:
    """Two shards with rows of several forms; rows 4 and following of the first cannot be used."""
    first = [*GOOD[:3], *(bad for bad, _ in BAD.values()), *GOOD[3:12]]
    return write_input(fast_module / "in", [first, GOOD[12:]], group=5)


@pytest.fixture(scope="module")
def built(source: Path, fast_module: Path) -> Path:
    (fast_module / "out").mkdir()  # an empty folder is fine
    return in_chunks_of(5, source, fast_module / "out", on_error="quarantine", **OPTIONS).root


def test_bad_rows_fail_with_their_ids_or_are_put_aside(source: Path, built: Path, fast: Path) -> None:
    with pytest.raises(RecordError, match="has no synth_id") as caught:
        in_chunks_of(3, source, fast / "out", **OPTIONS)
    assert caught.value.code == "no_synth_id"
    assert "synth_harmony_shard_00.parquet:row 4" in str(caught.value)
    assert "--on-error quarantine" in str(caught.value)
    assert not (fast / "out" / "manifest.json").exists()
    assert len(list((fast / "out/.build/dataset/.build/receipts").glob("*.json"))) == 1, "finished chunks are kept"
    with pytest.raises(ConfigError, match="holds an unfinished build: nothing is ever overwritten"):
        build_synth_kd(source, fast / "out", **OPTIONS)
    clean = write_input(fast / "in", [GOOD[:12], GOOD[12:]])
    with pytest.raises(ConfigError, match="an unfinished build of something else"):
        build_synth_kd(clean, fast / "out", resume=True, **OPTIONS)
    result = in_chunks_of(3, source, fast / "out", on_error="quarantine", resume=True, **OPTIONS)
    assert digest(result.root) == digest(built)
    assert result.manifest["failed"]["reasons"] == dict.fromkeys(BAD, 1)
    lines = [json.loads(line) for line in (result.root / "quarantine.jsonl").read_text().splitlines()]
    for place, (entry, (code, (bad, message))) in enumerate(zip(lines, BAD.items(), strict=True), 4):
        assert entry["where"].endswith(f"synth_harmony_shard_00.parquet:row {place}")
        assert (entry["id"], entry["reason"]) == (bad["synth_id"] or "", code)
        assert re.search(message, f"{entry['field']}: {entry['message']}")
    build_synth_kd(clean, fast / "clean", **OPTIONS)
    for name in listed_files(fast / "clean"):
        assert (built / name).read_bytes() == (fast / "clean" / name).read_bytes(), "the others are as ever"


LISTED = [{"path": f"data/synth_harmony_shard_{number:02}.parquet"} for number in range(4)]
SHARD = "synth_harmony_shard_02.parquet"


def states(**content: Any) -> Callable[[Path], object]:
    """Give the input another manifest."""
    text = json.dumps({"schema_version": "synth_harmony_v1", **content})
    return lambda source: (source / "manifest.json").write_text(text)


def without_ids(source: Path) -> None:
    pq.write_table(pq.read_table(source / SHARD).drop(["synth_id"]), source / SHARD)


INPUTS: list[tuple[Callable[[Path], object], str]] = [
    (lambda source: (source / "manifest.json").unlink(), r"there is no .*manifest\.json.*synth_harmony_v1"),
    (states(schema_version="v0"), "schema_version 'v0'; this build reads 'synth_harmony_v1'"),
    (lambda source: (source / SHARD).write_bytes(b"PAR1 no more"), "cannot be read as Parquet"),
    (lambda source: [path.unlink() for path in source.glob("*.parquet")], "has no shards"),
    (without_ids, "has no column 'synth_id'"),
    (states(total_rows=31), "says 31 total_rows, but the 3 shards next to it have 30"),
    (states(shards=LISTED), r"synth_harmony_shard_03.parquet is in one of them only"),
    (states(storage={"shards": LISTED}), r"synth_harmony_shard_03.parquet is in one of them only"),
    (states(shards=LISTED[:2]), r"synth_harmony_shard_02.parquet is in one of them only"),
    (lambda source: (source / SHARD).rename(source / "synth_harmony_shard_2.parquet"), "shard_2.parquet, .* left out"),
]


@pytest.mark.parametrize("case", range(len(INPUTS)))
def test_an_input_that_is_not_what_it_says_is_refused(fast: Path, case: int) -> None:
    source, (damage, message) = small(fast / "in", shards=3), INPUTS[case]
    states(total_rows=30, shards=LISTED[:3])(source)
    assert len(read_input(source).shards) == 3
    damage(source)
    with pytest.raises(DataError, match=message):
        build_synth_kd(source, fast / "out")
    assert not (fast / "out").exists(), "mistakes are told before anything is made"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_error": "skip"}, "unknown on_error 'skip'"),
        ({"engine": "dask"}, "unknown engine 'dask'"),
        ({"audit": 2}, "audit is 2"),
        *(({"valid_fraction": share}, rf"valid_fraction is {share}.*from 0 to 1") for share in (-0.1, 1.5, math.nan)),
        ({"max_rows": 0}, "max_rows is 0"),
        ({"max_tokens_per_shard": 0}, "max_tokens_per_shard is 0"),
        ({"max_tokens": 3}, "no row fits"),
    ],
)
def test_wrong_options(fast: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_synth_kd(REAL, fast / "out", **options)
    assert not (fast / "out").exists()


def test_an_existing_root_is_refused_or_continued(source: Path, built: Path, fast: Path) -> None:
    before = digest(built)
    with pytest.raises(ConfigError, match=r"holds a finished dataset: nothing is ever overwritten.*--resume"):
        build_synth_kd(source, built, **OPTIONS)
    again = build_synth_kd(source, built, resume=True, **OPTIONS)
    assert (again.outcome, again.manifest) == (Outcome.ALREADY_BUILT, manifest_of(built))
    with pytest.raises(ConfigError, match="holds another dataset"):
        build_synth_kd(source, built, resume=True, workers=0)
    assert digest(built) == before
    (fast / "thesis.txt").write_text("keep")
    for resume in (False, True):
        with pytest.raises(ConfigError, match=r"not empty \(thesis.txt\) and holds no build"):
            build_synth_kd(source, fast, resume=resume, **OPTIONS)


def test_training_on_such_a_root_is_one_clear_error(built: Path, fast: Path) -> None:
    recipe = {"out": str(fast / "run"), "model": "tiny", "dataset_dir": str(built), "batch_size": 1, "block_size": 64}
    (fast / "train.yaml").write_text(json.dumps(recipe))
    done = here("train", str(fast / "train.yaml"))
    assert done.returncode == 2
    assert "Megatron's indexed datasets" in done.stderr


# `verify`.


@pytest.mark.parametrize("sample", [None, 5, 1000])
def test_a_good_dataset_passes(built: Path, sample: int | None) -> None:
    report = verify_synth_kd(built, True, sample)
    assert report.passed, report.findings
    assert report.counts["records_derived"] == (sample if sample == 5 else 24 + len(BAD))
    with pytest.raises(ConfigError, match="goes with deep"):
        verify_synth_kd(built, sample=5)


def edit(root: Path, change: Callable[[dict[str, Any]], object] = lambda manifest: None) -> None:
    """Write the manifest anew with the hashes of the files as they are now, so that only the rows themselves tell."""
    manifest = manifest_of(root)
    files = [file for split in manifest["splits"].values() for shard in split["shards"] for file in shard["files"]]
    for file in [*files, manifest["failed"]["file"]]:
        content = (root / file["path"]).read_bytes()
        file |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    change(manifest)
    (root / "manifest.json").write_bytes(receipt_bytes(sealed(manifest)))


def beyond_the_sample(root: Path) -> None:
    """Many documents, of which opening looks at 64; another row has another mask."""
    shutil.rmtree(root)
    build_synth_kd(REAL, root, workers=0, max_rows_per_shard=100, audit=0)
    flip(root / MASK, KDShard.open(root / "train/shard_00_tokens").place(2).start + 300)


def another_line(root: Path) -> None:
    path = root / "quarantine.jsonl"
    path.write_bytes(path.read_bytes().replace(b":row 5", b":row 3"))
    edit(root)


def ledger(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda root: edit(root, lambda manifest: change(manifest["ledger"]))


def one_more_user_token(found: dict[str, Any]) -> None:
    user = found["tokens"]["shard_00"]["user"]
    user |= {fate: count + 1 for fate, count in user.items()}


def other_input(root: Path) -> None:
    source = shutil.copytree(manifest_of(root)["input"]["path"], root.parent / "other")
    states(more=1)(source)
    edit(root, lambda manifest: manifest["input"].update(path=str(source)))


SPAN, MASK = "train/shard_00_span.bin", "train/shard_00_lossmask.bin"
DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda root: flip(root / SPAN, 3), "train/shard_00_span.bin: was changed"),
    (lambda root: flip(root / MASK, 3), "document 0 has the mask"),
    (beyond_the_sample, "train episode 2, token 300: lossmask is not 1 exactly where"),
    (lambda root: (root / SPAN).write_bytes((root / SPAN).read_bytes()[:-1]), "the file was cut"),
    (lambda root: (root / MASK).unlink(), "missing; the manifest names it"),
    (lambda root: (root / "train" / "more.bin").write_bytes(b"x"), "not in the manifest"),
    (lambda root: edit(root, lambda m: m["splits"]["train"].update(trained_tokens=1)), "train: trained_tokens is 1,"),
    (another_line, r"has a row that can be used(.|\n)*lacks a row that cannot be used: .*\(unknown_role\)"),
    (another_line, r"tokens are there where \d+ must be(.|\n)*must have a document of this row, and ends before"),
    (ledger(one_more_user_token), "the files have"),
    (ledger(lambda found: found["records"]["shard_00"].update(built={"": 2})), "does not balance"),
    (lambda root: edit(root, lambda m: m["input"].update(path="gone")), "were not rendered again: there is no gone"),
    (other_input, "the input has changed"),
]


@pytest.mark.parametrize("case", range(len(DAMAGES)))
def test_verify_finds_what_was_changed(built: Path, fast: Path, case: int) -> None:
    root, (damage, message) = Path(shutil.copytree(built, fast / "root")), DAMAGES[case]
    damage(root)
    report = verify_synth_kd(root, True)
    assert re.search(message, "\n".join([*map(str, report.findings), report.blocked]))
    assert report.exit_status == (2 if message.startswith("were not") else 1)
    (root / "manifest.json").unlink()
    with pytest.raises(FormatError, match="holds no finished distillation dataset"):
        verify_synth_kd(root)


def test_a_changed_token_is_found_with_its_record(built: Path, fast: Path) -> None:
    """A token of a text: no rule of the format is broken, and all hashes are right."""
    root = shutil.copytree(built, fast / "root")
    shard = KDShard.open(root / "train/shard_01_tokens")
    assert shard.document(2)[0][4] < 199_000, "an ordinary token"
    flip(root / "train/shard_01_tokens.bin", 4 * (shard.place(2).start + 4))
    edit(root)
    assert verify_synth_kd(root).passed, "only the input can tell"
    (finding,) = verify_synth_kd(root, True).findings
    assert (finding.file, finding.split, finding.episode, finding.token) == ("train/shard_01_tokens.bin", "train", 2, 4)
    assert (
        finding.record
        == [name for name in (f"id-{n}" for n in range(12, 24)) if synth_kd_split(name, 0.3) == "train"][2]
    )
    assert finding.stored != finding.derived


def test_the_command(built: Path) -> None:
    shown = here("verify", built, "--deep", "--sample", "4")
    assert shown.returncode == 0, shown.stderr
    assert f"4 of {24 + len(BAD)} rows rendered again by openai-harmony" in shown.stdout


# What reads any dataset reads this one.


def test_documents_are_read_as_those_of_any_dataset(built: Path) -> None:
    opened = open_dataset(built)
    assert list(opened.splits) == ["train", "valid"]
    for split, documents in opened.splits.items():
        shards = [KDShard.open(built / split / f"shard_0{n}_tokens") for n in range(2)]
        slow = [shard.document(number) for shard in shards for number in range(len(shard))]
        order = np.arange(len(documents))[::-1].copy()
        found = documents.gather(order)
        assert documents.facts("record_id", order) is documents.facts("turns", order) is None
        assert found.weights is not None
        assert found.kinds is not None
        for place, (ids, mask, span) in enumerate(reversed(slow)):
            own = slice(int(found.offsets[place]), int(found.offsets[place + 1]))
            assert found.ids[own].tolist() == ids.tolist()
            assert found.weights[own].tolist() == [0, *mask.tolist()[:-1]]
            assert found.kinds[own].tolist() == [{0: 0, 1: 35, 2: 34}[value] for value in [0, *span.tolist()[:-1]]]
    assert load_tokenizer("o200k").fingerprint == O200K_FINGERPRINT


def test_diff_and_export(built: Path, fast: Path) -> None:
    build_synth_kd(write_input(fast / "in", [ROWS[:12], ROWS[12:]], group=5), fast / "other", **OPTIONS)
    found = diff_datasets(built, fast / "other")
    assert found.counts[Change.EQUAL] == 22, "all but the two that are other rows there"
    assert (found.counts[Change.ONLY_IN_A], found.counts[Change.ONLY_IN_B]) == (2, 2)
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
