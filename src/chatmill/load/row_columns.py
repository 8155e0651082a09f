"""Columns of packed rows: where documents begin, in the forms that trainers know, and labels; with their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.blocks import Boundaries, boundaries_from_ends, boundaries_from_starts, starts_of_lengths
from chatmill.core.shift import IGNORE_INDEX
from chatmill.errors import DataError, UnknownNameError

STARTS, LENGTHS, POSITIONS = "document_starts", "seq_lengths", "position_ids"
"""The columns that say where the documents of a row begin; transformers' Trainer keeps the last one."""
ENDS = "ends"
"""Besides `position_ids`, for rows of trees: token q of a row sees token k when `k <= q < ends[k]`."""
Rows = list[NDArray[np.int64]]


def trainer_columns(features: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Packed rows as columns that transformers' `Trainer` keeps with its default `remove_unused_columns=True`.

    For `rows.map(trainer_columns, batched=True)`: `position_ids` say what `document_starts` or `seq_lengths` said, and
    `labels` are -100 where a `loss_mask` is 0. Columns that no model reads would be gone before the collator sees them.
    """
    said = {name: [np.asarray(row) for row in features[name]] for name in (STARTS, LENGTHS) if name in features}
    if not said:
        raise UnknownNameError("column", STARTS, sorted(map(str, features)), "These rows say nothing of documents.")
    rows = [np.asarray(row, dtype=np.int64) for row in features["input_ids"]]
    labels = [np.asarray(row, dtype=np.int64) for row in features.get("labels") or rows]
    if "loss_mask" in features:
        labels = masked(labels, [np.asarray(mask) for mask in features["loss_mask"]], rows, IGNORE_INDEX)
    boundaries = stated_boundaries(said, rows)
    positions = boundaries.segments(int(boundaries.lengths.max(initial=0))).position_ids
    return {
        "input_ids": [row.tolist() for row in rows],
        "labels": [row.tolist() for row in labels],
        POSITIONS: [row[: len(ids)].tolist() for row, ids in zip(positions, rows, strict=True)],
    }


def stated_boundaries(said: Mapping[str, Rows], rows: Rows) -> Boundaries:
    """Return the documents of rows, by the first column that says where they begin: one at least does."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    if ENDS in said:
        for name in (ENDS, POSITIONS):
            check_lengths(name, said[name], rows)
        return boundaries_from_ends(said[ENDS], said[POSITIONS])
    if STARTS in said:
        return boundaries_from_starts(said[STARTS], lengths)
    if LENGTHS in said:
        return boundaries_from_starts(starts_of_lengths(said[LENGTHS], lengths), lengths)
    check_lengths(POSITIONS, said[POSITIONS], rows)
    return boundaries_from_starts(_starts_of_positions(said[POSITIONS]), lengths)


def _starts_of_positions(rows: Rows) -> Rows:
    """Find where documents begin: where positions are 0; refuse positions that do not count up."""
    all_starts = []
    for number, row in enumerate(rows):
        starts = np.flatnonzero(row == 0)
        counted = np.arange(len(row)) - np.repeat(starts, np.diff(starts, append=len(row))) if len(starts) else row + 1
        if len(row) and (not len(starts) or starts[0] or (counted != row).any()):
            raise DataError(
                f"position_ids of row {number} do not count 0, 1, 2, ... from the start of each document. Rows of "
                "trees carry ends too, which transformers' Trainer removes: set remove_unused_columns=False"
            )
        all_starts.append(starts)
    return all_starts


def masked(labels: Rows, masks: list[NDArray[Any]], rows: Rows, ignore_index: int) -> Rows:
    """Labels that are `ignore_index` where the mask of a row is 0."""
    check_lengths("loss_mask", masks, rows)
    return [np.where(mask != 0, row, ignore_index) for mask, row in zip(masks, labels, strict=True)]


def check_lengths(name: str, values: list[NDArray[Any]], rows: Rows) -> None:
    """Refuse a column whose rows do not have a value for each token."""
    for row, (column, ids) in enumerate(zip(values, rows, strict=True)):
        if column.shape != ids.shape:
            raise DataError(f"{name} of row {row} has the shape {column.shape}, but the row has {len(ids)} tokens")


def as_numpy(values: Any) -> NDArray[Any]:
    """Convert a list, an array or a tensor on any device."""
    return values.detach().cpu().numpy() if hasattr(values, "detach") else np.asarray(values)


def carried(features: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Return whether the features carry a column (None counts as absent); refuse one that only some of them carry."""
    absent = [row for row, feature in enumerate(features) if feature.get(name) is None]
    if absent and len(absent) < len(features):
        raise DataError(
            f"only {len(features) - len(absent)} of {len(features)} features carry {name!r} (row {absent[0]} "
            "does not): give it to all of them or to none"
        )
    return not absent


def integer_rows(features: Sequence[Mapping[str, Any]], name: str) -> Rows:
    """Read a column of flat lists of integers; refuse anything else."""
    if not carried(features, name):
        raise DataError(f"the features carry no {name!r}; they have: {', '.join(map(str, features[0]))}")
    rows = [as_numpy(feature[name]) for feature in features]
    for row, values in enumerate(rows):
        if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
            raise DataError(f"{name} of row {row} must be a flat list of integers, not {values.dtype} {values.shape}")
    return [values.astype(np.int64, copy=False) for values in rows]
