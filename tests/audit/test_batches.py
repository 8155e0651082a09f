"""Batches as DataLoaders give them are read right, and those for models with recurrent layers have what these read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill import audit
from chatmill.errors import DataError
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


def test_of_packed_rows_isolation_is_left_to_the_check_that_has_the_model(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "minimax", model_type="minimax")
    bound = bind(find_template(str(folder)), load_tokenizer(str(folder)))
    report = audit(joined(clean_rows(bound)[:6], 3, boundaries="seq_lengths"), str(folder))
    assert report.passed
    assert any("chatmill isolate MODEL SET" in sentence for sentence in report.unknown)
