"""Targets that trainers read: Axolotl, Megatron Bridge, SkyRL, Levanter and torchtitan."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from chatmill.core.shift import IGNORE_INDEX, shift_left_ragged
from chatmill.errors import DataError
from chatmill.export.arrow_files import Columns, lists, save_dataset, write_parquet
from chatmill.export.row_layout import PaddedRows, RowBatch, RowPlan
from chatmill.load.row_source import ARRAYS
from chatmill.load.teacher import entry_lists

if TYPE_CHECKING:
    from chatmill.export.targets import Export

METADATA = "packed_metadata.json"
"""Sizes of packed rows, which Megatron Bridge reads for CUDA graphs."""


def labels_of(batch: RowBatch, trained: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the ids of targets, and -100 elsewhere."""
    return np.where(trained, batch.ids, np.int32(IGNORE_INDEX))


def to_axolotl(export: Export) -> None:
    """`SPLIT/`: a dataset with `input_ids`, `attention_mask` and `labels`, one document a row."""
    import pyarrow as pa

    schema = lists(input_ids=pa.int32(), attention_mask=pa.int8(), labels=pa.int32())
    if export.teacher:
        entries = {"target_token_ids": pa.int32(), "target_logprobs": pa.float32(), "target_mask": pa.int8()}
        schema = pa.schema([*schema, *lists(**{name: pa.list_(kind) for name, kind in entries.items()})])
        export.say("the rest mass: Axolotl takes the k tokens for all, so their probabilities are scaled to sum to 1")
    export.begin_for("Axolotl")

    def columns(batch: RowBatch) -> Columns:
        trained, offsets = export.targets(batch), batch.token_offsets
        export.lose_rows_without(batch, trained, "Axolotl")
        return {
            "input_ids": (batch.ids, offsets),
            "attention_mask": (np.ones(len(trained), dtype=np.int8), offsets),
            "labels": (labels_of(batch, trained), offsets),
            **(_axolotl_teacher(export, batch) if export.teacher else {}),
        }

    for split in export.source.splits:
        save_dataset(export, split, export.documents(split, "Axolotl"), schema, columns, export.folder / split)
    for split, key in (("train", "datasets"), ("val", "test_datasets")):
        if split in export.source.splits:
            export.config += [f"{key}:", f"  - path: {{out}}/{split}", "    type:"]
    longest = export.longest_document
    export.config += [f"sequence_len: {longest}  # or more; Axolotl drops longer documents", "sample_packing: true"]
    if export.teacher:
        export.config += ["plugins:", "  - axolotl.integrations.kd.KDPlugin", "kd_trainer: true", "kd_temperature: 1.0"]


def _axolotl_teacher(export: Export, batch: RowBatch) -> Columns:
    """What Axolotl's KD collator reads. Its loss shifts labels alone: a token has the distribution of the next one."""
    found = export.teacher_of(batch.split).gather(batch.numbers, np.diff(batch.documents.offsets))
    logprobs = found.logprobs - np.log(np.exp(found.logprobs).sum(axis=1, keepdims=True))
    shifted, tokens = found._replace(at=found.at - 1, logprobs=logprobs), len(batch.ids)
    ones = np.ones(found.ids.shape, dtype=np.int8)
    return {
        "target_token_ids": (entry_lists(shifted, tokens, found.ids.astype(np.int32)), batch.token_offsets),
        "target_logprobs": (entry_lists(shifted, tokens, logprobs), batch.token_offsets),
        "target_mask": (entry_lists(shifted, tokens, ones), batch.token_offsets),
    }


def to_megatron_bridge(export: Export) -> None:
    """`SPLIT/shard_00000.idx.parquet`, ...: packed rows for `packed_train_data_path`.

    The loss mask is moved by one in each document: Megatron Bridge reads it next to the inputs, so its value at a token
    is that of the next one.
    """
    import pyarrow as pa

    schema = lists(input_ids=pa.int32(), seq_start_id=pa.int32(), loss_mask=pa.int8())
    export.begin_for("Megatron Bridge")

    def columns(batch: RowBatch) -> Columns:
        mask = shift_left_ragged(export.targets(batch).astype(np.int8), batch.documents.offsets)
        _refuse_targets_after_eos(export, batch, mask)
        return {
            "input_ids": (batch.ids, batch.token_offsets),
            "seq_start_id": (batch.starts.astype(np.int32), batch.row_offsets),
            "loss_mask": (mask, batch.token_offsets),
        }

    sizes, longest = [], 1
    for split in export.source.splits:
        rows = export.rows(split)
        longest = max(longest, rows.capacity or int(rows.row_tokens.max(initial=0)))
        sizes += _sizes(rows)
        write_parquet(export, split, rows, schema, columns, suffix=".idx.parquet")
    (export.folder / METADATA).write_text(json.dumps(sizes, indent=1) + "\n")
    if export.eos_id is None:
        export.say(
            "which token ends a text is not known of this dataset; Megatron Bridge trains no token that follows the "
            "eos of its tokenizer"
        )
    export.config += [
        "PackedSequenceSpecs(",
        f"    packed_sequence_size={longest},",
        *(
            f'    packed_{split}_data_path="{{out}}/{split}",'
            for split in ("train", "val")
            if split in export.source.splits
        ),
        f'    packed_metadata_path="{{out}}/{METADATA}",',
        ")",
        f"seq_length={longest}",
    ]


def _sizes(rows: RowPlan) -> list[dict[str, int]]:
    if not len(rows.documents):
        return []
    return [
        {
            "dataset_max_seqlen": int(rows.lengths.max()),
            "max_samples_per_bin": int(np.diff(rows.row_offsets).max()),
            "min_packed_seqlen": int(rows.row_tokens.min()),
        }
    ]


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
    import pyarrow as pa

    schema = lists(input_ids=pa.int32(), loss_mask=pa.int8())
    export.begin_for("SkyRL")

    def columns(batch: RowBatch) -> Columns:
        trained = export.targets(batch)
        export.lose_rows_without(batch, trained, "SkyRL")
        return {
            "input_ids": (batch.ids, batch.token_offsets),
            "loss_mask": (trained.astype(np.int8), batch.token_offsets),
        }

    for split in export.source.splits:
        write_parquet(export, split, export.documents(split, "SkyRL"), schema, columns)
    export.config += [f'pretokenized_dataset_paths: ["{{out}}/{export.main_split}"]']
    export.config += ['eval_pretokenized_dataset_paths: ["{out}/val"]'] if "val" in export.source.splits else []
    export.config += [f"max_length: {export.longest_document}  # or more; SkyRL cuts longer documents"]


def to_levanter(export: Export) -> None:
    """`SPLIT/shard_00000.parquet`, ...: rows of one length for the format `prebuilt`.

    `loss_weights` are label-aligned: Levanter multiplies the loss at a token, which is about the next one. It tells
    the documents of a row apart by the eos that ends each.
    """
    import pyarrow as pa

    schema = lists(input_ids=pa.int32(), loss_weights=pa.float32())
    export.begin_for("Levanter", weights=True)
    plans = {split: export.rows_of_one_length(split, "Levanter") for split in export.source.splits}
    packed, width = any(rows.packed for rows in plans.values()), max(rows.capacity or 0 for rows in plans.values())

    def columns(batch: RowBatch) -> Columns:
        rows = plans[batch.split]
        if rows.packed:
            _refuse_documents_that_would_mix(export, batch)
        padding = PaddedRows(batch, rows.capacity or 0)
        weights = np.where(export.targets(batch), batch.documents.full_weights, 0).astype(np.float32)
        weights = shift_left_ragged(weights, batch.documents.offsets)
        return {
            "input_ids": (padding.of(batch.ids, export.pad_id), padding.offsets),
            "loss_weights": (padding.of(weights, 0), padding.offsets),
        }

    for split, rows in plans.items():
        write_parquet(export, split, rows, schema, columns, width=rows.capacity or 0)
    export.config += [
        "data:",
        f"  block_cross_document_attention: {'true' if packed else 'false'}",
        "  components:",
        "    chats:",
        "      source:",
        "        type: url",
        f'        train_urls: ["{{out}}/{export.main_split}/*.parquet"]',
        *(['        validation_urls: ["{out}/val/*.parquet"]'] if "val" in export.source.splits else []),
        "      format:",
        "        type: prebuilt",
        "        loss_weights_key: loss_weights",
        f"train_seq_len: {width}",
    ]


def _refuse_documents_that_would_mix(export: Export, batch: RowBatch) -> None:
    eos = export.eos_id
    problem = (
        f"{batch.split}: which token ends a document is not known of this dataset"
        if eos is None
        else batch.problem_with_ends(eos)
    )
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
    longest = 0
    for split in export.source.splits:
        rows = export.rows_of_one_length(split, "torchtitan")
        width = rows.capacity or 0
        longest = max(longest, width)
        folder, shape, done = export.folder / split, (len(rows.row_offsets) - 1, width), 0
        folder.mkdir(parents=True, exist_ok=True)
        arrays = [open_memmap(folder / f"{name}.npy", "w+", "<i4", shape) for name in ARRAYS]
        for batch in export.batches(split, rows, width=width):
            padding = PaddedRows(batch, width)
            labels = labels_of(batch, export.targets(batch))
            labels = shift_left_ragged(labels, batch.documents.offsets, IGNORE_INDEX)
            values = (
                padding.of(batch.ids, export.pad_id),
                padding.of(labels, IGNORE_INDEX),
                padding.of(batch.positions, padding.counted),
            )
            for array, own in zip(arrays, values, strict=True):
                array[done : done + len(batch)] = own.reshape(-1, width)
            done += len(batch)
    export.config += [
        "from chatmill.torchtitan import ChatmillDataLoader",
        f'dataloader=ChatmillDataLoader.Config(dataset_path="{{out}}/{export.main_split}")',
        f"training.seq_len = {longest}",
    ]
