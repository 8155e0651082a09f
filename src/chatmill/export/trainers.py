"""Targets that trainers read: Axolotl, Megatron Bridge, SkyRL, Levanter and torchtitan."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from chatmill.core.shift import IGNORE_INDEX, shift_left_ragged
from chatmill.errors import DataError
from chatmill.export.arrow_files import Columns, save_dataset, write_parquet
from chatmill.export.row_layout import RowBatch, RowPlan
from chatmill.export.trainer_lines import (
    axolotl_lines,
    levanter_lines,
    megatron_bridge_lines,
    skyrl_lines,
    torchtitan_lines,
)
from chatmill.load.row_source import ARRAYS
from chatmill.load.teacher import entry_lists

if TYPE_CHECKING:
    from chatmill.export.targets import Export

METADATA = "packed_metadata.json"
"""Sizes of packed rows, which Megatron Bridge reads for CUDA graphs."""


def to_axolotl(export: Export, *, teacher: bool = False) -> None:
    """`SPLIT/`: a dataset with `input_ids`, `attention_mask` and `labels`, one document a row."""
    if teacher:
        export.say("the rest mass: Axolotl takes the k tokens for all, so their probabilities are scaled to sum to 1")
    export.begin_for("Axolotl")

    def columns(batch: RowBatch) -> Columns:
        labels = export.labels(batch)
        export.lose_rows_without(batch, labels != IGNORE_INDEX, "Axolotl")
        return {
            "input_ids": batch.per_token(batch.ids),
            "attention_mask": batch.per_token(np.ones(len(labels), dtype=np.int8)),
            "labels": batch.per_token(labels),
            **(_axolotl_teacher(export, batch) if teacher else {}),
        }

    for split, rows in export.documents("Axolotl").items():
        save_dataset(export, split, rows, columns, export.folder / split)
    export.config += axolotl_lines(export.facts())
    if teacher:
        export.config += ["plugins:", "  - axolotl.integrations.kd.KDPlugin", "kd_trainer: true", "kd_temperature: 1.0"]


def _axolotl_teacher(export: Export, batch: RowBatch) -> Columns:
    """What Axolotl's KD collator reads. Its loss shifts labels alone: a token has the distribution of the next one."""
    answers = export.teacher_of(batch.split).gather(batch.numbers, batch.lengths)
    logprobs = answers.logprobs - np.log(np.exp(answers.logprobs).sum(axis=1, keepdims=True))
    shifted = answers._replace(at=answers.at - 1, logprobs=logprobs)
    values = {
        "target_token_ids": answers.ids.astype(np.int32),
        "target_logprobs": logprobs,
        "target_mask": np.ones(answers.ids.shape, dtype=np.int8),
    }
    return {name: batch.per_token(entry_lists(shifted, len(batch.ids), entries)) for name, entries in values.items()}


def to_megatron_bridge(export: Export) -> None:
    """`SPLIT/shard_00000.idx.parquet`, ...: packed rows for `packed_train_data_path`.

    The loss mask is moved by one in each document: Megatron Bridge reads it next to the inputs, so its value at a token
    is that of the next one.
    """
    export.begin_for("Megatron Bridge")

    def columns(batch: RowBatch) -> Columns:
        mask = shift_left_ragged(export.targets(batch).astype(np.int8), batch.documents.offsets)
        _refuse_targets_after_eos(export, batch, mask)
        return {
            "input_ids": batch.per_token(batch.ids),
            "seq_start_id": batch.per_document(batch.starts.astype(np.int32)),
            "loss_mask": batch.per_token(mask),
        }

    plans = export.rows()
    write_parquet(export, plans, columns, suffix=".idx.parquet")
    (export.folder / METADATA).write_text(json.dumps(list(map(_sizes, plans.values())), indent=1) + "\n")
    if export.eos_id is None:
        export.say(
            "which token ends a text is not known of this dataset; Megatron Bridge trains no token that follows the "
            "eos of its tokenizer"
        )
    export.config += megatron_bridge_lines(export.facts(plans))


def _sizes(rows: RowPlan) -> dict[str, int]:
    return {
        "dataset_max_seqlen": int(rows.lengths.max()),
        "max_samples_per_bin": int(np.diff(rows.row_offsets).max()),
        "min_packed_seqlen": int(rows.row_tokens.min()),
    }


def _refuse_targets_after_eos(export: Export, batch: RowBatch, mask: NDArray[np.int8]) -> None:
    eos = export.eos_id
    lost = 0 if eos is None else int(np.count_nonzero(mask[batch.ids == eos]))
    if lost:
        raise DataError(
            f"{batch.split}: {lost:,} trained tokens follow the end token {eos}, and Megatron Bridge trains none of "
            "these: build with a policy that ends at it, or export to megatron"
        )


def to_skyrl(export: Export) -> None:
    """`SPLIT/shard_00000.parquet`, ...: `input_ids` and a token-aligned 0/1 `loss_mask`, one document a row."""
    export.begin_for("SkyRL")

    def columns(batch: RowBatch) -> Columns:
        trained = export.targets(batch)
        export.lose_rows_without(batch, trained, "SkyRL")
        return {"input_ids": batch.per_token(batch.ids), "loss_mask": batch.per_token(trained.astype(np.int8))}

    write_parquet(export, export.documents("SkyRL"), columns)
    export.config += skyrl_lines(export.facts())


def to_levanter(export: Export) -> None:
    """`SPLIT/shard_00000.parquet`, ...: rows of one length for the format `prebuilt`.

    `loss_weights` are label-aligned: Levanter multiplies the loss at a token, which is about the next one. It tells
    the documents of a row apart by the eos that ends each.
    """
    export.begin_for("Levanter", weights=True)
    plans = export.padded_rows("Levanter")

    def columns(batch: RowBatch) -> Columns:
        if batch.packed:
            _refuse_documents_that_would_mix(export, batch)
        weights = np.where(export.targets(batch), batch.documents.full_weights, 0).astype(np.float32)
        return {
            "input_ids": batch.per_token(batch.ids, export.pad_id),
            "loss_weights": batch.per_token(shift_left_ragged(weights, batch.documents.offsets)),
        }

    write_parquet(export, plans, columns)
    export.config += levanter_lines(export.facts(plans))


def _refuse_documents_that_would_mix(export: Export, batch: RowBatch) -> None:
    problem = f"{batch.split}: which token ends a document is not known of this dataset"
    if export.eos_id is not None:
        problem = batch.problem_with_ends(export.eos_id)
    if problem:
        raise DataError(
            f"{problem}, and Levanter tells the documents of a packed row apart by it alone: put one document into "
            "each row (--max-length N --pack alone)"
        )


def to_torchtitan(export: Export) -> None:
    """`SPLIT/{input,labels,positions}.npy`: int32 arrays of shape (rows, length), for `numpy.load(mmap_mode="r")`.

    Labels are moved by one in each document, as torchtitan's loss expects them, and positions restart with each
    document, which is where its attention masks find the bounds. Padding is a document of its own.
    """
    export.begin_for("torchtitan")
    plans = export.padded_rows("torchtitan")
    for split, rows in plans.items():
        folder, shape, done = export.folder / split, (len(rows.row_offsets) - 1, rows.width), 0
        folder.mkdir(parents=True, exist_ok=True)
        arrays = [open_memmap(folder / f"{name}.npy", "w+", "<i4", shape) for name in ARRAYS]
        for batch in export.batches(split, rows):
            labels = shift_left_ragged(export.labels(batch), batch.documents.offsets, IGNORE_INDEX)
            values = (
                batch.padded(batch.ids, export.pad_id),
                batch.padded(labels, IGNORE_INDEX),
                batch.padded(batch.positions, batch.counted_padding),
            )
            for array, block in zip(arrays, values, strict=True):
                array[done : done + len(batch)] = block.reshape(-1, rows.width)
            done += len(batch)
    export.config += torchtitan_lines(export.facts(plans))
