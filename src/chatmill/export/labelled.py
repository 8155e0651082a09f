"""Exports to trainers that read labels: Axolotl and LLaMA-Factory, both from folders of the datasets library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.shift import IGNORE_INDEX
from chatmill.export.rows import RowBatch, RowPlan
from chatmill.export.targets import ids_of, save_dataset
from chatmill.export.trained import PaddedRows, Targets, numbers_in_row, positions_of, record_batch

if TYPE_CHECKING:
    from chatmill.export.targets import Export

VALIDATION = "validation"
"""What LLaMA-Factory calls `val`."""


def to_axolotl(export: Export) -> None:
    """`SPLIT/`: a dataset with `input_ids`, `attention_mask` and `labels`, one document a row."""
    import pyarrow as pa

    schema = _schema({"input_ids": pa.int32(), "attention_mask": pa.int8(), "labels": pa.int32()})
    targets = Targets(export, "Axolotl")
    longest = 0
    for split, documents in export.source.splits.items():
        rows = export.documents(split, "Axolotl")
        longest = max(longest, int(documents.lengths.max(initial=0)))

        def batches(split: str = split, rows: RowPlan = rows) -> Iterator[Any]:
            for batch in export.batches(split, rows):
                ids, trained = ids_of(split, batch), targets.of(batch)
                targets.count_rows_without(batch, trained)
                columns = [ids, np.ones(len(ids), dtype=np.int8), _labels(ids, trained)]
                yield record_batch([(values, batch.token_offsets) for values in columns], schema)

        save_dataset(export, split, rows, schema, batches(), export.folder / split)
    targets.say_what_is_lost()
    for split, key in (("train", "datasets"), ("val", "test_datasets")):
        if split in export.source.splits:
            export.config += [f"{key}:", f"  - path: {{out}}/{split}", "    type:"]
    export.config += [f"sequence_len: {longest}  # or more; Axolotl drops longer documents", "sample_packing: true"]


def to_llamafactory(export: Export) -> None:
    """A folder for `tokenized_path`: `train` and `validation`.

    Packed rows are laid out as `neat_packing` lays them out: `attention_mask` holds the number of the document in its
    row and `position_ids` begin anew with each; all rows are padded to one token more than their length.
    """
    import pyarrow as pa

    targets = Targets(export, "LLaMA-Factory")
    names, lengths = {}, set()
    for split in export.source.splits:
        rows = export.rows(split)
        kinds = {"input_ids": pa.int32(), "attention_mask": pa.int32() if rows.packed else pa.int8()}
        kinds |= {"position_ids": pa.int32()} if rows.packed else {}
        schema = _schema({**kinds, "labels": pa.int32()})
        lengths.add((rows.packed, rows.capacity or int(rows.row_tokens.max(initial=0))))

        def batches(split: str = split, rows: RowPlan = rows, schema: Any = schema) -> Iterator[Any]:
            # One token more, as LLaMA-Factory does: a row without padding loses its mask in flash attention.
            width = 0 if rows.capacity is None or not rows.packed else rows.capacity + 1
            for batch in export.batches(split, rows, width=width):
                ids = ids_of(split, batch)
                labels = _labels(ids, targets.of(batch))
                if rows.packed:
                    yield _packed(batch, ids, labels, PaddedRows(batch, width), export.pad_id, schema)
                else:
                    columns = [ids, np.ones(len(ids), dtype=np.int8), labels]
                    yield record_batch([(values, batch.token_offsets) for values in columns], schema)

        names[split] = {"train": "train", "val": VALIDATION}.get(split, f"{VALIDATION}_{split}")
        folder = export.folder if export.alone else export.folder / names[split]
        save_dataset(export, split, rows, schema, batches(), folder)
    targets.say_what_is_lost()
    if not export.alone:
        (export.folder / "dataset_dict.json").write_text(json.dumps({"splits": list(names.values())}))
    packed, longest = max(lengths)
    export.config += ["stage: sft", "tokenized_path: {out}", f"cutoff_len: {longest}"]
    export.config += ["neat_packing: true"] if packed else []


def _packed(
    batch: RowBatch,
    ids: NDArray[np.int32],
    labels: NDArray[np.int32],
    padding: PaddedRows,
    pad_id: int,
    schema: Any,
) -> Any:
    columns = [
        padding.of(ids, pad_id),
        padding.of(numbers_in_row(batch), 0),
        padding.of(positions_of(batch), 0),
        padding.of(labels, IGNORE_INDEX),
    ]
    return record_batch([(values, padding.offsets) for values in columns], schema)


def _labels(ids: NDArray[np.int32], trained: NDArray[np.bool_]) -> NDArray[np.int32]:
    return np.where(trained, ids, np.int32(IGNORE_INDEX))


def _schema(kinds: dict[str, Any]) -> Any:
    import pyarrow as pa

    return pa.schema([(name, pa.list_(kind)) for name, kind in kinds.items()])
