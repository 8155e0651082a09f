"""Batches as DataLoaders give them: padding, positions, offsets and masks over pairs of tokens are read right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from chatmill import audit
from chatmill.errors import DataError
from tests.audit.sets import Row, bound_template, clean_rows, edit_spans, trained_of

BOUND = bound_template("llama3")
"""A template with a bos: documents that run into each other are found."""
EOS = BOUND.tokenizer.control("<|eot_id|>")
Batch = dict[str, Any]


def padded(rows: Sequence[Row], *, left: bool = False) -> Batch:
    """Rows of one width, filled up with the stop token: only the attention mask says what is padding."""
    width = max(len(row["input_ids"]) for row in rows)
    batch: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for row in rows:
        size, room = len(row["input_ids"]), width - len(row["input_ids"])
        for name, values, fill in (
            ("input_ids", row["input_ids"], EOS),
            ("labels", row["labels"], -100),
            ("attention_mask", [1] * size, 0),
        ):
            batch[name].append([fill] * room + values if left else values + [fill] * room)
    return {name: np.array(values) for name, values in batch.items()}


def flat(rows: Sequence[Row], fill: int = 0) -> tuple[Batch, list[int]]:
    """All rows as one, with some tokens after them, and their lengths."""
    lengths = [len(row["input_ids"]) for row in rows]
    ids = [one for row in rows for one in row["input_ids"]] + [EOS] * fill
    labels = [one for row in rows for one in row["labels"]] + [-100] * fill
    return {"input_ids": np.array([ids]), "labels": np.array([labels])}, lengths


def positions(lengths: Sequence[int], fill: int = 0) -> Any:
    return np.array([[n for length in lengths for n in range(length)] + [0] * fill])


def pairs(documents: Any, live: Any) -> Any:
    """What every token sees: its own document, up to itself."""
    places = np.arange(documents.shape[1])
    same = documents[:, :, None] == documents[:, None, :]
    return (same & (places[:, None] >= places) & live[:, None, :])[:, None]


def as_offsets(name: str) -> Callable[[Sequence[Row]], Batch]:
    def make(rows: Sequence[Row]) -> Batch:
        batch, lengths = flat(rows, fill=3)
        return batch | {name: np.cumsum([0, *lengths])}

    return make


def of_two_rows(rows: Sequence[Row]) -> Batch:
    """Offsets over both rows of a batch, which are as long as each other."""
    half = len(rows) // 2
    sizes = [sum(len(row["input_ids"]) for row in part) for part in (rows[:half], rows[half:])]
    parts = [flat(part, max(sizes) - size) for part, size in zip((rows[:half], rows[half:]), sizes, strict=True)]
    batch = {name: np.concatenate([one[name] for one, _ in parts]) for name in ("input_ids", "labels")}
    starts = [max(sizes) * n + one for n, (_, lengths) in enumerate(parts) for one in np.cumsum([0, *lengths]).tolist()]
    return batch | {"cu_seqlens": np.unique([*starts, 2 * max(sizes)])}


def listed_offsets(rows: Sequence[Row]) -> Batch:
    """A list of offsets a row, filled up with -1."""
    batch, lengths = flat(rows)
    return batch | {"cu_seqlens": np.array([[*np.cumsum([0, *lengths]).tolist(), -1, -1]])}


def with_positions(rows: Sequence[Row]) -> Batch:
    batch, lengths = flat(rows, fill=4)
    return batch | {"position_ids": positions(lengths, 4)}


def packed_pairs(rows: Sequence[Row]) -> Batch:
    """Positions that do not begin anew, and a mask that keeps documents apart."""
    batch, lengths = flat(rows)
    documents = np.repeat(np.arange(len(lengths)), lengths)[None]
    mask = pairs(documents, np.ones_like(documents, dtype=bool))
    return batch | {"attention_mask": mask, "position_ids": np.arange(documents.size)[None]}


def padded_pairs(left: bool, added: bool) -> Callable[[Sequence[Row]], Batch]:
    def make(rows: Sequence[Row]) -> Batch:
        batch = padded(rows, left=left)
        live = batch["attention_mask"] > 0
        mask = pairs(np.zeros_like(batch["input_ids"]), live)
        mask |= ~mask.any(axis=3, keepdims=True)  # attention fails on rows that see nothing
        return batch | {"attention_mask": np.where(mask, 0.0, -1e9) if added else mask}

    return make


BATCHES: dict[str, Callable[[Sequence[Row]], Batch]] = {
    "padding on the right": padded,
    "padding on the left": lambda rows: padded(rows, left=True),
    "cu_seqlens": as_offsets("cu_seqlens"),
    "cu_seq_lens_q": as_offsets("cu_seq_lens_q"),
    "cu_seqlens of two rows": of_two_rows,
    "cu_seqlens filled up": listed_offsets,
    "position_ids": with_positions,
    "packed pairs": packed_pairs,
    "pairs, right": padded_pairs(left=False, added=False),
    "pairs, left": padded_pairs(left=True, added=False),
    "added pairs, left": padded_pairs(left=True, added=True),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_are_read_right(name: str) -> None:
    torch = pytest.importorskip("torch")
    rows = clean_rows(BOUND)[:4]
    tensors = {key: torch.from_numpy(value) for key, value in BATCHES[name](rows).items()}
    report = audit([tensors], BOUND)
    assert report.findings == ()
    assert report.documents == len(rows)
    assert report.tokens == sum(len(row["input_ids"]) for row in rows)
    assert report.trained == sum(int(trained_of(row).sum()) for row in rows)
    lost = edit_spans(lambda mask, first, last: mask.__setitem__(last - 1, False), which=lambda number: number == 1)
    report = audit([BATCHES[name](lost(rows, BOUND))], BOUND)
    assert [(one.code, one.count) for one in report.findings] == [("stop_untrained", 2)]


def test_documents_without_boundaries_are_found_in_batches() -> None:
    batch, _ = flat(clean_rows(BOUND)[:4])
    width = batch["input_ids"].shape[1]
    for more in ({}, {"position_ids": np.arange(width)[None]}, {"attention_mask": np.ones((1, width), dtype=int)}):
        assert [one.code for one in audit([batch | more], BOUND).findings] == ["unbounded"]


def test_a_mask_over_pairs_of_another_width_is_one_clear_error() -> None:
    batch = padded(clean_rows(BOUND)[:2]) | {"attention_mask": np.ones((2, 1, 3, 3))}
    with pytest.raises(DataError, match=r"attention_mask has the shape \(2, 1, 3, 3\)"):
        audit([batch], BOUND)
