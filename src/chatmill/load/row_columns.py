"""Columns of packed rows: where documents begin, in the three forms that trainers know, and checks of lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.blocks import boundaries_from_starts, starts_of_lengths
from chatmill.core.shift import IGNORE_INDEX
from chatmill.errors import DataError, UnknownNameError

STARTS, LENGTHS, POSITIONS = "document_starts", "seq_lengths", "position_ids"
"""The columns that say where the documents of a row begin; transformers' Trainer keeps the last one."""
ENDS = "ends"
"""Beside `position_ids`, for rows of trees: token q of a row sees token k when `k <= q < ends[k]`."""


def trainer_columns(features: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Packed rows as columns that transformers' `Trainer` keeps with its default `remove_unused_columns=True`.

    For `rows.map(trainer_columns, batched=True)`: `position_ids` say what `document_starts` or `seq_lengths` said, and
    `labels` are -100 where a `loss_mask` is 0. Columns that no model reads would be gone before the collator sees them.
    """
    if STARTS not in features and LENGTHS not in features:
        raise UnknownNameError("column", STARTS, sorted(map(str, features)), "These rows say nothing of documents.")
    rows = [np.asarray(row, dtype=np.int64) for row in features["input_ids"]]
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    if STARTS in features:
        starts = [np.asarray(row) for row in features[STARTS]]
    else:
        starts = starts_of_lengths([np.asarray(row, dtype=np.int64) for row in features[LENGTHS]], lengths)
    boundaries = boundaries_from_starts(starts, lengths)
    positions = boundaries.segments(int(lengths.max(initial=0))).position_ids
    labels = [np.asarray(row, dtype=np.int64) for row in features.get("labels") or rows]
    if "loss_mask" in features:
        masks = [np.asarray(mask) for mask in features["loss_mask"]]
        check_lengths("loss_mask", masks, rows)
        labels = [np.where(mask != 0, row, IGNORE_INDEX) for mask, row in zip(masks, labels, strict=True)]
    return {
        "input_ids": [row.tolist() for row in rows],
        "labels": [row.tolist() for row in labels],
        POSITIONS: [row[:length].tolist() for row, length in zip(positions, lengths, strict=True)],
    }


def starts_of_positions(rows: list[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """Where the documents of rows begin: where positions are 0; positions that do not count up are refused."""
    found = []
    for number, row in enumerate(rows):
        starts = np.flatnonzero(row == 0)
        counted = np.arange(len(row)) - np.repeat(starts, np.diff(starts, append=len(row))) if len(starts) else row + 1
        if len(row) and (not len(starts) or starts[0] or (counted != row).any()):
            raise DataError(
                f"position_ids of row {number} do not count 0, 1, 2, ... from the start of each document. Rows of "
                "trees carry ends too, which transformers' Trainer removes: set remove_unused_columns=False"
            )
        found.append(starts)
    return found


def check_lengths(name: str, values: list[NDArray[Any]], rows: list[NDArray[np.int64]]) -> None:
    """Refuse a column whose rows do not have a value for each token."""
    for row, (own, ids) in enumerate(zip(values, rows, strict=True)):
        if own.shape != ids.shape:
            raise DataError(f"{name} of row {row} has the shape {own.shape}, but the row has {len(ids)} tokens")
