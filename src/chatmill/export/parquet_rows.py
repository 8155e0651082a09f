"""Exports to trainers that read Parquet files of their own columns: Megatron Bridge, SkyRL and Levanter."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from chatmill.core.shift import shift_left_ragged
from chatmill.errors import DataError
from chatmill.export.targets import ids_of
from chatmill.export.trained import PaddedRows, Targets, ends_in_eos, record_batch
from chatmill.store.parquet import parquet_shard

if TYPE_CHECKING:
    from chatmill.export.rows import RowBatch, RowPlan
    from chatmill.export.targets import Export

METADATA = "packed_metadata.json"
"""Sizes of packed rows, which Megatron Bridge reads for CUDA graphs."""


def to_megatron_bridge(export: Export) -> None:
    """`SPLIT/shard_00000.idx.parquet`, ...: packed rows for `packed_train_data_path`.

    The loss mask is moved by one in each document: Megatron Bridge reads it beside the inputs, so its value at a token
    is that of the next one.
    """
    import pyarrow as pa

    schema = pa.schema(
        [
            ("input_ids", pa.list_(pa.int32())),
            ("seq_start_id", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.int8())),
        ]
    )
    targets = Targets(export, "Megatron Bridge")
    sizes, longest = [], 1
    for split in export.source.splits:
        rows = export.rows(split)
        longest = max(longest, rows.capacity or int(rows.row_tokens.max(initial=0)))
        sizes += _sizes(rows)
        for number, shard in enumerate(export.shards(split, rows)):
            with parquet_shard(export.folder / split, number, schema, ".idx.parquet") as file:
                for batch in shard:
                    ids, offsets = ids_of(split, batch), batch.documents.offsets
                    mask = shift_left_ragged(targets.of(batch).astype(np.int8), offsets)
                    _refuse_targets_after_eos(export, split, ids, mask)
                    tokens = batch.token_offsets
                    columns = [(ids, tokens), (batch.starts.astype(np.int32), batch.row_offsets), (mask, tokens)]
                    file.write_batch(record_batch(columns, schema))
    (export.folder / METADATA).write_text(json.dumps(sizes, indent=1) + "\n")
    targets.say_what_is_lost()
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


def _refuse_targets_after_eos(export: Export, split: str, ids: NDArray[np.int32], mask: NDArray[np.int8]) -> None:
    eos = export.eos_id
    lost = 0 if eos is None else int(np.count_nonzero(mask[ids == eos]))
    if lost:
        raise DataError(
            f"{split}: {lost:,} trained tokens follow the end token {eos}, and Megatron Bridge trains none of these: "
            "build with a policy that ends at it, or export to megatron"
        )


def to_skyrl(export: Export) -> None:
    """`SPLIT/shard_00000.parquet`, ...: `input_ids` and a token-aligned 0/1 `loss_mask`, one document a row."""
    import pyarrow as pa

    schema = pa.schema([("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.int8()))])
    targets = Targets(export, "SkyRL")
    longest = 0
    for split, documents in export.source.splits.items():
        longest = max(longest, int(documents.lengths.max(initial=0)))
        for number, shard in enumerate(export.shards(split, export.documents(split, "SkyRL"))):
            with parquet_shard(export.folder / split, number, schema) as file:
                for batch in shard:
                    ids, trained = ids_of(split, batch), targets.of(batch)
                    targets.count_rows_without(batch, trained)
                    columns = [(ids, batch.token_offsets), (trained.astype(np.int8), batch.token_offsets)]
                    file.write_batch(record_batch(columns, schema))
    targets.say_what_is_lost()
    export.config += [f'pretokenized_dataset_paths: ["{{out}}/{export.main_split}"]']
    export.config += ['eval_pretokenized_dataset_paths: ["{out}/val"]'] if "val" in export.source.splits else []
    export.config += [f"max_length: {longest}  # or more; SkyRL cuts longer documents"]


def to_levanter(export: Export) -> None:
    """`SPLIT/shard_00000.parquet`, ...: rows of one length for the format `prebuilt`.

    `loss_weights` are label-aligned: Levanter multiplies the loss at a token, which is about the next one. It tells
    the documents of a row apart by the eos that ends each.
    """
    import pyarrow as pa

    schema = pa.schema([("input_ids", pa.list_(pa.int32())), ("loss_weights", pa.list_(pa.float32()))])
    targets = Targets(export, "Levanter", weights=True)
    widths, packed = set(), False
    for split in export.source.splits:
        rows = export.rows_of_one_length(split, "Levanter")
        width = rows.capacity or 0
        widths.add(width)
        packed |= rows.packed
        for number, shard in enumerate(export.shards(split, rows, width=width)):
            with parquet_shard(export.folder / split, number, schema) as file:
                for batch in shard:
                    if rows.packed:
                        _refuse_documents_that_would_mix(export, split, batch)
                    padding = PaddedRows(batch, width)
                    weights = np.where(targets.of(batch), batch.documents.full_weights, 0).astype(np.float32)
                    weights = shift_left_ragged(weights, batch.documents.offsets)
                    columns = [
                        (padding.of(ids_of(split, batch), export.pad_id), padding.offsets),
                        (padding.of(weights, 0), padding.offsets),
                    ]
                    file.write_batch(record_batch(columns, schema))
    targets.say_what_is_lost()
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
        f"train_seq_len: {max(widths)}",
    ]


def _refuse_documents_that_would_mix(export: Export, split: str, batch: RowBatch) -> None:
    eos = export.eos_id
    problem = (
        f"{split}: which token ends a document is not known of this dataset"
        if eos is None
        else ends_in_eos(split, batch, eos)
    )
    if problem:
        raise DataError(
            f"{problem}, and Levanter tells the documents of a packed row apart by it alone: put one document into "
            "each row (--max-length N --pack alone)"
        )
