"""Shards of distillation sets: what is refused when they are opened, and the road from real rows to samples."""

from __future__ import annotations

import importlib
import json
import shlex
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill import build_synth_kd, export_dataset, synth_kd_blend, synth_kd_blends, verify_synth_kd
from chatmill.compiler.run import run_build
from chatmill.core.harmony_ids import EOD
from chatmill.errors import ConfigError, FormatError, UnknownNameError
from chatmill.export.check import verify_export
from chatmill.store.kd import blend_arguments
from chatmill.store.kd_shard import KDShard
from tests.distill.inputs import REAL
from tests.megatron import kd_sets
from tests.megatron.kd_sets import TRAIN, VALID, Document, dataset, write_root
from tests.pages import DOCS, python_blocks

NAME = "teacher_logprob"
EXAMPLES = DOCS.parent / "examples" / "megatron"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_root(tmp_path / "kd", {"train": TRAIN, "valid": VALID})


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real rows: the first 20 of each shard."""
    out = tmp_path_factory.mktemp("kd") / "root"
    build_synth_kd(REAL, out, workers=0, max_rows_per_shard=20, valid_fraction=0.3)
    return out


@pytest.fixture
def copied(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "root"))


# What is refused at opening, and found by `verify`.


def of_another_shard(train: Path) -> None:
    for kind in ("bin", "idx"):
        shutil.copy(train / f"shard_01_span.{kind}", train / f"shard_00_span.{kind}")


def rewritten(column: str, change: Callable[[list[list[int]]], Any]) -> Callable[[Path], None]:
    def rewrite(train: Path) -> None:
        values = kd_sets.on_disk(TRAIN[0])[column]
        for kind in ("bin", "idx"):
            (train / f"shard_00_{column}.{kind}").unlink()
        kd_sets.write_column(train / f"shard_00_{column}", change(values) or values, np.uint8)

    return rewrite


def border_moved(values: list[list[int]]) -> None:
    """The same number of documents and of values."""
    values[4], values[5] = values[4] + values[5][:1], values[5][1:]


def rolled(*columns: str) -> Callable[[Path], None]:
    """Moved by one: every document begins with a message that is not trained, so mask and span are token-aligned."""

    def roll(train: Path) -> None:
        for column in columns:
            path = train / f"shard_00_{column}.bin"
            np.roll(np.fromfile(path, dtype=np.int32 if column == "tokens" else np.uint8), 1).tofile(path)

    return roll


def all_trained(train: Path) -> None:
    for column, value in (("lossmask", 1), ("span", 2)):
        rewritten(column, lambda values, value=value: [[value] * len(one) for one in values])(train)  # type: ignore[misc]


OFF = "a span is not that of the message by its role and channel: document 0"
MISALIGNED: list[tuple[str, Callable[[Path], object], str]] = [
    ("root", kd_sets.swapped, r"document 0 has the mask 2 and the span 1 at position \d+"),
    ("root", of_another_shard, r"shard_00_span.idx: 11 sequences, but shard_00_tokens.idx next to it has 30"),
    ("root", rewritten("span", border_moved), r"span.idx: document 4 has the length \d+, but in shard_00_tokens.idx"),
    ("root", all_trained, r"the last value of lossmask is not 0 .*: document 0 has the mask 1"),
    (
        "root",
        rewritten("span", lambda values: [[3 if value else 0 for value in one] for one in values]),
        "document 0 has the mask 1 and the span 3",
    ),
    (
        "root",
        rewritten("lossmask", lambda values: values[0].__setitem__(0, values[0][0] ^ 1)),
        r"document 0 has the mask \d and the span \d at position 0 \(1 of its",
    ),
    ("copied", rolled("tokens"), "EOD inside of a document, or none at its end: document 0"),
    ("copied", rolled("lossmask", "span"), OFF),
    ("copied", lambda train: shutil.copy(train / "shard_00_lossmask.bin", train / "shard_00_span.bin"), OFF),
]


@pytest.mark.parametrize("case", range(len(MISALIGNED)))
def test_misaligned_sidecars_are_refused(case: int, request: pytest.FixtureRequest) -> None:
    name, damage, message = MISALIGNED[case]
    root = request.getfixturevalue(name)
    prefix = synth_kd_blend(root).prefixes[0]
    damage(root / "train")
    with pytest.raises(FormatError, match=message):
        KDShard.open(prefix)
    if name == "copied":
        assert any(message.split(":")[0] in str(finding) for finding in verify_synth_kd(root).findings)


def test_one_document_in_the_middle_is_found_by_verify(copied: Path) -> None:
    """Opening looks at a sample; `verify` looks at everything, also where a neighbour is no Harmony document."""
    prefix = synth_kd_blend(copied).prefixes[0]
    tokens = np.memmap(f"{prefix}.bin", dtype=np.int32, mode="r+")
    tokens[KDShard.open(prefix).place(2).start] = 17
    tokens.flush()
    assert any("does not begin with <|start|>" in str(finding) for finding in verify_synth_kd(copied).findings)


def test_an_export_whose_tokens_were_rolled_is_refused(tmp_path: Path) -> None:
    """All that is known of an export is its EOD."""
    documents = [Document(ids=[5, 6, 7, 2], spans=[0, 2, 2, 0])] * 3
    prefix = kd_sets.write_shard(tmp_path / "train" / "shard_00", documents)
    (tmp_path / "export.json").write_text(json.dumps({"options": {"eod_id": 2}}))
    assert len(KDShard.open(prefix)) == 3
    rolled("tokens")(tmp_path / "train")
    with pytest.raises(FormatError, match=r"none at its end: document 0 .* at position 3 .* the token is 7;"):
        KDShard.open(prefix)


def test_prefixes_and_roots_that_do_not_fit(root: Path, tmp_path: Path) -> None:
    blend = synth_kd_blend(root)
    assert [Path(prefix).name for prefix in blend.prefixes] == ["shard_00_tokens", "shard_01_tokens"]
    assert blend.weights == [float(sum(len(document.ids) for document in shard)) for shard in TRAIN]
    with pytest.raises(ConfigError, match=r"did you mean .*shard_00_tokens\?"):
        KDShard.open(root / "train" / "shard_00")
    with pytest.raises(UnknownNameError, match=r"unknown split 'val'.*Known: train, valid"):
        synth_kd_blend(root, "val")
    (root / "manifest.json").unlink()
    with pytest.raises(FormatError, match="not finished"):
        synth_kd_blend(root)
    with pytest.raises(FormatError, match="no such folder"):
        synth_kd_blend(tmp_path / "nowhere")


def test_verify_passes_after_megatron_wrote_its_index_cache_and_not_after_others(copied: Path) -> None:
    dataset(synth_kd_blend(copied).prefixes[0])
    assert list(copied.rglob("*.npy"))
    report = verify_synth_kd(copied)
    assert report.passed
    assert any("index cache" in sentence for sentence in report.unchecked)
    (copied / "train" / "stray.npy").write_bytes(b"")
    assert not verify_synth_kd(copied).passed
    (copied / "train" / "stray.npy").unlink()
    with (copied / "valid" / "shard_01_span.bin").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(FormatError, match=r"shard_01_span.bin: .* bytes, but the manifest says"):
        synth_kd_blend(copied)


# What needs no Megatron.


def test_blend_arguments_are_what_megatron_lm_reads(tmp_path: Path) -> None:
    """Parsed as `get_blend_and_blend_per_split` of Megatron-LM does it, from a folder with a space in its name."""
    from megatron.core.datasets.utils import get_blend_from_list

    root = write_root(tmp_path / "my data" / "kd", {"train": TRAIN})
    name, *words = shlex.split(blend_arguments(root))
    assert name == "--train-data-path"
    assert get_blend_from_list(words) == tuple(synth_kd_blend(root))
    assert synth_kd_blends(root) == [synth_kd_blend(root), None, None]


# The whole road: real rows, Megatron files, samples; an export of the same; the page.


def test_an_export_of_the_same_conversations_has_the_same_bytes(built: Path, tmp_path: Path) -> None:
    """`build` with template harmony and policy synth_kd, exported with EOD, is what `synth-kd` makes."""
    sources = [{"path": str(path)} for path in sorted(REAL.glob("*.parquet"))]
    recipe = {"sources": sources, "tokenizer": "o200k", "template": "harmony", "policy": "synth_kd"}
    run_build(recipe, tmp_path / "built", workers=0)
    result = export_dataset(tmp_path / "built", "megatron", tmp_path / "out", eod_id=EOD)
    build_synth_kd(REAL, tmp_path / "kd", valid_fraction=0.0, workers=0)
    shards = synth_kd_blend(tmp_path / "kd").prefixes
    assert len(shards) == 2
    for column in ("tokens", "lossmask", "span"):
        joined = b"".join(Path(f"{prefix.removesuffix('tokens')}{column}.bin").read_bytes() for prefix in shards)
        assert (tmp_path / "out" / "train" / f"shard_00_{column}.bin").read_bytes() == joined
    assert "--valid-data-path " in blend_arguments(built)
    assert shlex.split(result.config)[2::2] == synth_kd_blend(tmp_path / "out").prefixes
    assert verify_export(tmp_path / "out").passed
    dataset(synth_kd_blend(tmp_path / "out").prefixes[0])
    assert verify_export(tmp_path / "out").passed


def test_the_snippets_of_the_megatron_page_are_those_of_the_examples() -> None:
    """Their functions are run by test_training.py, on ranks and in one process, and above."""
    blocks = python_blocks("megatron.md")
    assert len(blocks) >= 7
    sources = [path.read_text() for path in sorted(EXAMPLES.glob("*.py"))]
    for block in blocks:
        indented = [textwrap.indent(block, " " * width) for width in (0, 4)]
        assert any(text in source for text in indented for source in sources), block


def test_the_example_adds_one_by_record_id(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("add_teacher_logprob")
    assert example.add_teacher(str(copied)) == 40
    shard = KDShard.open(synth_kd_blend(copied).prefixes[0], [NAME])
    ids, mask, _ = shard.document(3)
    found, everything = shard.values(NAME)[shard.place(3)], shard.values("tokens")
    at = int(np.flatnonzero(mask)[0])
    assert found[at] == pytest.approx(np.log((everything == ids[at + 1]).mean()), rel=1e-6)
    assert example.teacher_dataset().sidecars == (NAME,)
    sample = dataset(shard.prefix, NAME)[0]
    assert bool((sample[NAME][sample["loss_mask"] > 0] < 0).all())
    report = verify_synth_kd(copied)
    assert sum(NAME in sentence and "added later" in sentence for sentence in report.unchecked) == 4
    shutil.copy(copied / "train" / f"shard_01_{NAME}.bin", copied / "train" / f"shard_00_{NAME}.bin")
    assert not verify_synth_kd(copied).passed
