"""Sets for models with recurrent layers: keys that batches lack are named, and padding on the left is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill import audit
from chatmill.render.model_template import ModelTemplate
from chatmill.render.registry import bind, find_template
from chatmill.tokenizer.load import load_tokenizer
from tests.audit.sets import clean_rows, joined, write_tokenizer


def folder_of(folder: Path, **config: Any) -> tuple[str, ModelTemplate]:
    """A model folder, and the template of it."""
    write_tokenizer(folder, **config)
    return str(folder), bind(find_template(folder), load_tokenizer(folder))


def batches(bound: ModelTemplate, *keys: str) -> list[dict[str, Any]]:
    """A packed batch, which has these keys besides positions."""
    rows = joined(clean_rows(bound)[:6], 3, boundaries="position_ids")
    more = {name: np.zeros(1) for name in keys if name not in ("seq_idx", "attention_mask")}
    made: list[dict[str, Any]] = [{name: np.array([values]) for name, values in row.items()} | more for row in rows]
    for batch in made:
        if "seq_idx" in keys:
            batch["seq_idx"] = np.cumsum(batch["position_ids"] == 0, axis=1) - 1
        if "attention_mask" in keys:
            batch["attention_mask"] = np.ones_like(batch["input_ids"])
    return made


@pytest.mark.parametrize(
    ("kind", "given", "missing"),
    [
        ("qwen3_5_text", [], "cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, seq_idx"),
        ("nemotron_h", ["use_cache"], "seq_idx"),
        ("nemotron_h", ["seq_idx"], None),
        ("kimi_linear", ["seq_idx", "max_length_q"], "cu_seqlens"),
        ("granitemoehybrid", ["seq_idx", "attention_mask"], "attention_mask"),
        ("jamba", ["seq_idx"], "Nothing keeps documents apart in jamba"),
        ("qwen3", [], None),
    ],
)
def test_batches_without_what_the_model_reads(kind: str, given: list[str], missing: str | None, tmp_path: Path) -> None:
    folder, bound = folder_of(tmp_path / "model", model_type=kind)
    report = audit(batches(bound, *given), folder)
    assert [finding.code for finding in report.findings] == ([] if missing is None else ["keys_missing"])
    if missing is not None:
        assert missing in report.findings[0].detail
        assert report.findings[0].count == 2


def test_of_stored_rows_the_keys_are_named(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_5",
        "text_config": {"model_type": "qwen3_5_text", "layer_types": ["linear_attention"]},
    }
    folder, bound = folder_of(tmp_path / "model", **config)
    rows = joined(clean_rows(bound)[:6], 3, boundaries="seq_lengths")
    report = audit(rows, folder)
    assert report.passed
    told = report.notes[0]
    assert (told.code, told.count) == ("keys_needed", 2)
    assert "qwen3_5_text reads cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, seq_idx" in told.detail
    assert told.detail.endswith("DataCollatorForCausalLM(tokenizer, model=model) adds it, and so does TRL "
                                "with padding_free=True")  # fmt: skip
    kimi, _ = folder_of(tmp_path / "kimi", model_type="kimi_linear")
    assert "reads seq_idx, cu_seqlens" in audit(rows, kimi).notes[0].detail
    assert audit(rows, kimi).notes[0].detail.endswith("; TRL does not")
    numbered = [
        {**{name: row[name] for name in ("input_ids", "labels")}, "seq_idx": np.repeat([0, 1, 2], row["seq_lengths"])}
        for row in rows
    ]
    scan, _ = folder_of(tmp_path / "scan", model_type="lfm2_moe")
    assert audit(rows, scan).notes
    said = audit(numbered, scan)
    assert (said.boundaries, said.documents, said.notes) == ("seq_idx", 6, ()), "all that this one reads"
    other, _ = folder_of(tmp_path / "other", model_type="new_hybrid", layer_types=["retention", "full_attention"])
    assert any("recurrent layers of new_hybrid" in told for told in audit(rows, other).unknown)
    nothing, _ = folder_of(tmp_path / "nothing", model_type="minimax")
    assert [finding.code for finding in audit(rows, nothing).findings] == ["keys_missing"]
    assert audit(clean_rows(bound), nothing).passed, "one document a row"


@pytest.mark.parametrize(("kind", "found"), [("falcon_h1", ["padding_left"]), ("llama", [])])
def test_padding_on_the_left_of_a_recurrent_layer(kind: str, found: list[str], tmp_path: Path) -> None:
    folder, bound = folder_of(tmp_path / "model", model_type=kind)
    rows = clean_rows(bound)
    width = max(len(row["input_ids"]) for row in rows)
    left = [
        {
            "input_ids": [0] * (width - len(row["input_ids"])) + row["input_ids"],
            "labels": [-100] * (width - len(row["input_ids"])) + row["labels"],
            "attention_mask": [0] * (width - len(row["input_ids"])) + [1] * len(row["input_ids"]),
        }
        for row in rows
    ]
    eos = [bound.tokenizer.eos_id] * 2
    bare = [{"input_ids": eos + row["input_ids"], "labels": [-100, -100, *row["labels"]]} for row in rows]
    codes = [finding.code for finding in audit(bare, folder).findings]
    assert ("padding_left" in codes) == bool(found), "without a mask, by the token"
    report = audit(left, folder)
    assert [finding.code for finding in report.findings] == found
    if found:
        assert report.findings[0].count == sum(len(row["input_ids"]) < width for row in rows)
