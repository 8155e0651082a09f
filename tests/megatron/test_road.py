"""The whole road: rows of query, reasoning and answer, Harmony shards, Megatron files, samples, loss."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from chatmill.compiler.run import run_build
from chatmill.distill.run import build_synth_kd
from chatmill.distill.synth_harmony import write_synth_harmony
from chatmill.errors import FormatError
from chatmill.export.export import export_dataset
from chatmill.render.official_harmony import encoding
from chatmill.store.kd import synth_kd_blend
from chatmill.systems.synth_kd import KDSplit, synth_kd_split
from tests.conftest import DATA
from tests.distill.inputs import real_rows
from tests.megatron.kd_sets import EOD, Tokenizer
from tests.pages import DOCS, python_blocks

LENGTH = 256


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """SYNTH rows taken out of the real conversations."""
    table = pq.read_table(DATA / "synth_harmony" / "synth_harmony_shard_00.parquet").slice(0, 60).to_pylist()
    names = ("query", "reasoning", "answer")
    return [
        {"synth_id": row["synth_id"]}
        | dict(
            zip(names, (m["content"][0]["text"] for m in json.loads(row["messages_json"])["messages"][2:]), strict=True)
        )
        for row in table
    ]


@pytest.fixture(scope="module")
def root(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("road")
    for name, some in (("a", rows[:40]), ("b", rows[40:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    write_synth_harmony([folder / "a.jsonl", folder / "b.jsonl"], folder / "harmony")
    build_synth_kd(folder / "harmony", folder / "kd", valid_fraction=0.2, workers=0)
    return folder / "kd"


def test_samples_hold_the_conversations(root: Path, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """One epoch trains every token of every assistant message, wrappers included, exactly once."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    from chatmill.megatron import SynthKDDataset

    seen: dict[int, int] = {1: 0, 2: 0}
    for split in ("train", "valid"):
        for prefix in synth_kd_blend(root, split).prefixes:
            config = GPTDatasetConfig(
                random_seed=1, sequence_length=LENGTH, blend_per_split=[([prefix], None), None, None],
                path_to_cache=str(tmp_path), tokenizer=Tokenizer(), reset_position_ids=False,
                reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
                drop_last_partial_validation_sequence=False,
            )  # fmt: skip
            low = SynthKDDataset.build_low_level_dataset(prefix, config)
            everything = np.arange(len(low.sequence_lengths), dtype=np.int32)
            # As validation, so that the last, partial sample is served too.
            dataset = SynthKDDataset(low, prefix, everything, None, Split.valid, config)
            spans = torch.cat([dataset[i]["span_id"] for i in range(len(dataset))])
            masks = torch.cat([dataset[i]["loss_mask"] for i in range(len(dataset))])
            assert torch.equal(masks > 0, spans > 0)
            for span in seen:
                seen[span] += int((spans == span).sum())
    wanted = {1: 0, 2: 0}
    for row in rows:
        for span, text in ((1, row["reasoning"]), (2, row["answer"])):
            # <|start|>assistant<|channel|>NAME<|message|> ... <|end|> or <|return|>: six tokens around each text.
            wanted[span] += len(encoding().encode(text, disallowed_special=())) + 6
    assert seen == wanted


def test_an_export_of_the_same_conversations_has_the_same_bytes(root: Path, tmp_path: Path) -> None:
    """`build` with template harmony and policy synth_kd, exported with EOD, is what `synth-kd` makes."""
    source = root.parent / "harmony"
    recipe = {
        "sources": [{"path": str(path)} for path in sorted(source.glob("*.parquet"))],
        "tokenizer": "o200k",
        "template": "harmony",
        "policy": "synth_kd",
    }
    run_build(recipe, tmp_path / "built", workers=0)
    export_dataset(tmp_path / "built", "megatron", tmp_path / "out", eod_id=EOD)
    build_synth_kd(source, tmp_path / "kd", valid_fraction=0.0, workers=0)
    shards = synth_kd_blend(tmp_path / "kd").prefixes
    assert len(shards) == 2
    for column in ("tokens", "lossmask", "span"):
        joined = b"".join(Path(f"{prefix.removesuffix('tokens')}{column}.bin").read_bytes() for prefix in shards)
        assert (tmp_path / "out" / "train" / f"shard_00_{column}.bin").read_bytes() == joined


def test_files_that_are_not_those_of_the_manifest_are_refused(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "kd")
    with (tmp_path / "kd" / "valid" / "shard_01_span.bin").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(FormatError, match=r"shard_01_span.bin: .* bytes, but the manifest says"):
        synth_kd_blend(tmp_path / "kd")


# The code of docs/megatron.md is that of the examples.


EXAMPLES = DOCS.parent / "examples" / "megatron"


def test_the_snippets_of_the_megatron_page_are_those_of_the_examples() -> None:
    """Their functions are run by test_training.py, on ranks and in one process, and by test_sidecars.py."""
    blocks = python_blocks("megatron.md")
    assert len(blocks) >= 7
    sources = [path.read_text() for path in sorted(EXAMPLES.glob("*.py"))]
    for block in blocks:
        indented = [textwrap.indent(block, " " * width) for width in (0, 4)]
        assert any(text in source for text in indented for source in sources), block


def test_the_share_of_the_page_gives_both_splits() -> None:
    """Of the bundled rows, which is what a reader tries first; the default gives no `valid` there, as the page says."""
    ids = [row["synth_id"] for row in real_rows()]
    assert {synth_kd_split(one) for one in ids} == {KDSplit.TRAIN}
    for text in ((DOCS / "megatron.md").read_text(), (EXAMPLES / "pretrain_synth_kd.py").read_text()):
        shares = re.findall(r"synth-kd .*--valid-fraction ([\d.]+)", text)
        assert shares
        assert all({synth_kd_split(one, float(share)) for one in ids} == set(KDSplit) for share in shares)
