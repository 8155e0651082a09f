"""Batches as DataLoaders give them are read right, and those for models with recurrent layers have what these read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill import audit
from chatmill.errors import DataError
from chatmill.render.model_template import ModelTemplate
from chatmill.render.registry import bind, find_template
from chatmill.tokenizer.load import load_tokenizer
from tests.audit.faults import masked
from tests.audit.sets import Row, bound_template, clean_rows, joined, padded, trained_of, write_tokenizer

BOUND = bound_template("llama3")
"""A template with a bos: documents that run into each other are found."""
EOS = BOUND.tokenizer.control("<|eot_id|>")
Batch = dict[str, Any]


def flat(rows: Sequence[Row], fill: int = 0) -> Batch:
    """All rows as one, with some tokens after them."""
    row = joined(rows, len(rows))[0]
    return {
        "input_ids": np.array([row["input_ids"] + [EOS] * fill]),
        "labels": np.array([row["labels"] + [-100] * fill]),
    }


def ends(rows: Sequence[Row]) -> list[int]:
    """Where the documents of a flat row begin, and where the last one ends."""
    return [0, *np.cumsum([len(row["input_ids"]) for row in rows]).tolist()]


def of_two_rows(rows: Sequence[Row]) -> Batch:
    """Offsets over both rows of a batch, which are as long as each other."""
    halves = (rows[: len(rows) // 2], rows[len(rows) // 2 :])
    width = max(ends(half)[-1] for half in halves)
    parts = [flat(half, width - ends(half)[-1]) for half in halves]
    batch = {name: np.concatenate([one[name] for one in parts]) for name in ("input_ids", "labels")}
    starts = [width * n + one for n, half in enumerate(halves) for one in ends(half)]
    return batch | {"cu_seqlens": np.unique([*starts, 2 * width])}


def with_positions(rows: Sequence[Row]) -> Batch:
    positions = joined(rows, len(rows), boundaries="position_ids")[0]["position_ids"]
    return flat(rows, fill=4) | {"position_ids": np.array([positions + [0] * 4])}


def pairs(documents: Any, live: Any) -> Any:
    """What every token sees: its own document, up to itself."""
    places = np.arange(documents.shape[1])
    same = documents[:, :, None] == documents[:, None, :]
    return (same & (places[:, None] >= places) & live[:, None, :])[:, None]


def packed_pairs(rows: Sequence[Row]) -> Batch:
    """Positions that do not begin anew, and a mask that keeps documents apart."""
    documents = np.repeat(np.arange(len(rows)), np.diff(ends(rows)))[None]
    mask = pairs(documents, np.ones_like(documents, dtype=bool))
    return flat(rows) | {"attention_mask": mask, "position_ids": np.arange(documents.size)[None]}


def padded_pairs(rows: Sequence[Row], *, left: bool, added: bool = False) -> Batch:
    batch = padded(rows, EOS, left=left)
    mask = pairs(np.zeros_like(batch["input_ids"]), batch["attention_mask"] > 0)
    mask |= ~mask.any(axis=3, keepdims=True)  # attention fails on rows that see nothing
    return batch | {"attention_mask": np.where(mask, 0.0, -1e9) if added else mask}


BATCHES: dict[str, Callable[[Sequence[Row]], Batch]] = {
    "padding on the right": lambda rows: padded(rows, EOS),
    "padding on the left": lambda rows: padded(rows, EOS, left=True),
    "cu_seqlens": lambda rows: flat(rows, fill=3) | {"cu_seqlens": np.array(ends(rows))},
    "cu_seq_lens_q": lambda rows: flat(rows, fill=3) | {"cu_seq_lens_q": np.array(ends(rows))},
    "cu_seqlens of two rows": of_two_rows,
    "cu_seqlens filled up": lambda rows: flat(rows) | {"cu_seqlens": np.array([[*ends(rows), -1, -1]])},
    "position_ids": with_positions,
    "packed pairs": packed_pairs,
    "pairs, right": lambda rows: padded_pairs(rows, left=False),
    "pairs, left": lambda rows: padded_pairs(rows, left=True),
    "added pairs, left": lambda rows: padded_pairs(rows, left=True, added=True),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_are_read_right(name: str) -> None:
    torch = pytest.importorskip("torch")
    rows = clean_rows(BOUND)[:4]
    tensors = {key: torch.from_numpy(value) for key, value in BATCHES[name](rows).items()}
    report = audit([tensors], BOUND)
    assert report.findings == ()
    assert (report.documents, report.tokens) == (len(rows), ends(rows)[-1])
    assert report.trained == sum(int(trained_of(row).sum()) for row in rows)
    rows[1] = masked(1, -1, 0, False)(rows[1], BOUND)
    report = audit([BATCHES[name](rows)], BOUND)
    assert [(one.code, one.count) for one in report.findings] == [("stop_untrained", 2)]


def test_documents_without_boundaries_are_found_in_batches() -> None:
    batch = flat(clean_rows(BOUND)[:4])
    width = batch["input_ids"].shape[1]
    for more in ({}, {"position_ids": np.arange(width)[None]}, {"attention_mask": np.ones((1, width), dtype=int)}):
        assert [one.code for one in audit([batch | more], BOUND).findings] == ["unbounded"]


def test_a_mask_over_pairs_of_another_width_is_one_clear_error() -> None:
    batch = padded(clean_rows(BOUND)[:2], EOS) | {"attention_mask": np.ones((2, 1, 3, 3))}
    with pytest.raises(DataError, match=r"attention_mask has the shape \(2, 1, 3, 3\)"):
        audit([batch], BOUND)


# ---- models with recurrent layers

Model = Callable[..., tuple[str, ModelTemplate]]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """Makes a model folder of this configuration, and the template of it."""

    def make(model_type: str, **config: Any) -> tuple[str, ModelTemplate]:
        folder = write_tokenizer(tmp_path / model_type, model_type=model_type, **config)
        return str(folder), bind(find_template(folder), load_tokenizer(folder))

    return make


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
def test_batches_without_what_the_model_reads(kind: str, given: list[str], missing: str | None, model: Model) -> None:
    folder, bound = model(kind)
    batches = []
    for row in joined(clean_rows(bound)[:6], 3, boundaries="position_ids"):
        batch: Batch = {name: np.array([values]) for name, values in row.items()}
        keys = {name: np.zeros(1) for name in given}
        numbers = {"seq_idx": np.cumsum(batch["position_ids"] == 0, axis=1) - 1}
        numbers["attention_mask"] = np.ones_like(batch["input_ids"])
        batches.append(batch | keys | {name: numbers[name] for name in given if name in numbers})
    found = audit(batches, folder).findings
    assert [(finding.code, finding.count) for finding in found] == ([] if missing is None else [("keys_missing", 2)])
    assert missing is None or missing in found[0].detail


def test_of_stored_rows_the_keys_are_named(model: Model) -> None:
    text = {"model_type": "qwen3_5_text", "layer_types": ["linear_attention"]}
    folder, bound = model("qwen3_5", text_config=text)
    rows = joined(clean_rows(bound)[:6], 3, boundaries="seq_lengths")
    report = audit(rows, folder)
    assert report.passed
    (told,) = report.notes
    assert (told.code, told.count) == ("keys_needed", 2)
    assert "qwen3_5_text reads cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, seq_idx" in told.detail
    assert told.detail.endswith("adds it, and so does TRL with padding_free=True")
    (told,) = audit(rows, model("kimi_linear")[0]).notes
    assert "reads seq_idx, cu_seqlens" in told.detail
    assert told.detail.endswith("; TRL does not")
    numbers = [np.repeat([0, 1, 2], row["seq_lengths"]).tolist() for row in rows]
    numbered = [
        row | {"seq_idx": seq_idx} for row, seq_idx in zip(joined(clean_rows(bound)[:6], 3), numbers, strict=True)
    ]
    scan, _ = model("lfm2_moe")
    assert audit(rows, scan).notes
    said = audit(numbered, scan)
    assert (said.boundaries, said.documents, said.notes) == ("seq_idx", 6, ()), "all that this one reads"
    other, _ = model("new_hybrid", layer_types=["retention", "full_attention"])
    assert any("recurrent layers of new_hybrid" in told for told in audit(rows, other).unknown)
    nothing, _ = model("minimax")
    assert [finding.code for finding in audit(rows, nothing).findings] == ["keys_missing"]
    assert audit(clean_rows(bound), nothing).passed, "one document a row"


@pytest.mark.parametrize(("kind", "found"), [("falcon_h1", ["padding_left"]), ("llama", [])])
def test_padding_on_the_left_of_a_recurrent_layer(kind: str, found: list[str], model: Model) -> None:
    folder, bound = model(kind)
    rows, eos = clean_rows(bound), [bound.tokenizer.eos_id] * 2
    bare = [{"input_ids": eos + row["input_ids"], "labels": [-100, -100, *row["labels"]]} for row in rows]
    codes = [finding.code for finding in audit(bare, folder).findings]
    assert ("padding_left" in codes) == bool(found), "without a mask, by the token"
    batch = padded(rows, 0, left=True)
    left = [{name: values[n].tolist() for name, values in batch.items()} for n in range(len(rows))]
    shorter = sum(0 in row["attention_mask"] for row in left)
    assert [(one.code, one.count) for one in audit(left, folder).findings] == [(code, shorter) for code in found]
