"""Targets that hold all that is stored: Parquet, and folders of the datasets library."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.shift import IGNORE_INDEX
from chatmill.export.arrow_files import save_dataset, write_parquet
from chatmill.export.row_layout import RowBatch, RowPlan
from chatmill.export.targets import FACTS, has_other_weights
from chatmill.load.hf import Columns
from chatmill.load.pictures import row_pictures
from chatmill.load.teacher import teacher_lists, teacher_types

if TYPE_CHECKING:
    from chatmill.export.targets import Export

TRL_PACKED = "SFTConfig(padding_free=True, max_length=None)  # without padding_free documents see each other"
TRAINER_PACKED = (
    "rows.map(chatmill.trainer_columns, batched=True), and "
    "Trainer(data_collator=chatmill.DataCollatorForCausalLM(tokenizer, model=model))"
)
"""What trainers must be told about packed rows."""
OTHER_WEIGHTS = (
    "labels only say trained or not: {:,} tokens have another weight than 0 and 1, which is in the column "
    "loss_weights; a trainer that reads labels alone does not see it"
)

TREES = (
    "rows are trees: train on them with masks made of position_ids and ends (DataCollatorForCausalLM with model=...); "
    "a trainer that ignores these columns reads branches as one text"
)


def to_parquet(export: Export) -> None:
    """`SPLIT/shard_00000.parquet`, ...: list columns with everything that is stored."""
    columns = _StoredColumns(export, labels=False)
    for split in export.source.splits:
        rows = export.rows(split)
        write_parquet(export, split, rows, columns.schema(rows, about=True), columns.of)


def to_hf(export: Export) -> None:
    """What `datasets.load_from_disk` opens: a `DatasetDict`, or a `Dataset` where one split was asked for."""
    if _save_splits(export) and not export.config:
        export.config += [f"TRL: {TRL_PACKED}", f"transformers: {TRAINER_PACKED}"]


def to_trl(export: Export) -> None:
    """The same folder, with what TRL's `SFTTrainer` must be told about it."""
    packed = _save_splits(export)
    if not export.config:  # a hybrid model has had its own lines
        export.config += [TRL_PACKED if packed else "SFTConfig(max_length=None)  # rows have their length already"]


def _save_splits(export: Export) -> bool:
    """Write the splits for `datasets.load_from_disk`; whether rows hold several documents."""
    packed = False
    columns = _StoredColumns(export, labels=True)
    for split in export.source.splits:
        rows = export.rows(split)
        folder = export.folder if export.alone else export.folder / split
        save_dataset(export, split, rows, columns.schema(rows, about=False), columns.of, folder)
        if rows.packed:
            _tell_keys(export)
        packed |= rows.packed
        if rows.capacity is not None:
            export.say(f"rows have no padding; their size, {rows.capacity:,} tokens, is in export.json alone")
    if not export.alone:
        (export.folder / "dataset_dict.json").write_text(json.dumps({"splits": list(export.source.splits)}))
    return packed


def _tell_keys(export: Export) -> None:
    """Say which collators make, of `seq_lengths`, the keys that a hybrid model reads."""
    hybrid = export.hybrid
    if hybrid is None or hybrid.needs is None or export.config:
        return
    export.config += [f"# {hybrid.kind} reads {', '.join(hybrid.needs.names)}; of seq_lengths they are made by"]
    by_trl = f"TRL: {TRL_PACKED}"
    if not hybrid.is_by_trl:
        by_trl = "TRL: SFTConfig(remove_unused_columns=False, max_length=None), and the collator of the next line"
    export.config += [by_trl, f"transformers: {TRAINER_PACKED}"]


class _StoredColumns:
    """Everything that is stored, as Arrow columns; the same ones for all splits."""

    def __init__(self, export: Export, *, labels: bool) -> None:
        """`labels`: ids with -100 where nothing is trained (hf), in place of a loss mask."""
        self._export, self._labels = export, labels
        self._kinds = export.holds_kinds
        self._facts = [name for name in FACTS if export.holds(name)]
        self._weights = any(has_other_weights(documents) for documents in export.source.splits.values())
        self._packed = False
        self._logprobs = any(documents.has_logprobs for documents in export.source.splits.values())
        self._pictures = any(documents.has_pictures for documents in export.source.splits.values())
        self._trees = any(documents.has_trees for documents in export.source.splits.values())

    def schema(self, rows: RowPlan, *, about: bool) -> Any:
        """The columns that rows of this plan have; `about` puts their meaning into the file."""
        import pyarrow as pa

        self._packed = rows.packed
        types = {"input_ids": pa.list_(pa.int32())}
        types["labels" if self._labels else "loss_mask"] = pa.list_(pa.int32() if self._labels else pa.uint8())
        if self._weights:
            types["loss_weights" if self._labels else "weights"] = pa.list_(pa.float32())
        if self._kinds:
            types["kinds"] = pa.list_(pa.uint8())
        if self._logprobs:
            types["logprobs"] = pa.list_(pa.float32())
        if self._export.teacher:
            types |= {name: pa.list_(kind) for name, kind in teacher_types().items()}
        if self._trees:  # lengths of documents would let their branches see each other
            types |= {"position_ids": pa.list_(pa.int32()), "ends": pa.list_(pa.int32())}
            types |= {"documents": pa.list_(pa.int64())} if rows.packed else {}
        elif rows.packed:
            types |= {"document_starts": pa.list_(pa.int32()), "documents": pa.list_(pa.int64())}
            types |= {"seq_lengths": pa.list_(pa.int32())} if self._labels else {}
        for name in self._facts:
            one = pa.type_for_alias(FACTS[name])
            types[name] = pa.list_(one) if rows.packed else one
        if self._pictures:
            types |= {"images": pa.string(), "image_bytes": pa.large_binary()}
        if self._trees:
            self._export.say(TREES)
        meaning = {"layout": "packed rows" if rows.packed else "one document a row", "capacity": rows.capacity}
        meaning |= {"pad_id": self._export.pad_id, "source_fingerprint": self._export.source.fingerprint}
        return pa.schema(list(types.items()), metadata={"chatmill": json.dumps(meaning)} if about else None)

    def of(self, batch: RowBatch) -> Columns:
        """The rows of a batch: what the schema names, and more."""
        some, tokens = batch.documents, batch.token_offsets
        columns: dict[str, tuple[NDArray[Any] | list[Any], NDArray[np.int64]]] = {
            "input_ids": (batch.ids, tokens),
            "loss_mask": (some.trained.astype(np.uint8), tokens),
            "document_starts": (batch.starts.astype(np.int32), batch.row_offsets),
            "seq_lengths": (np.diff(some.offsets).astype(np.int32), batch.row_offsets),
            "documents": (batch.numbers, batch.row_offsets),
        }
        if self._trees:
            lengths = np.diff(some.offsets)
            branches = self._export.source.splits[batch.split].branches(batch.numbers).cut(lengths)
            positions, ends = branches.positions_and_ends(lengths)
            ends = ends + np.repeat(batch.starts, lengths).astype(np.int32)
            columns |= {"position_ids": (positions, tokens), "ends": (ends, tokens)}
        if self._labels:  # no token predicts the first token of a packed document
            trained = self._export.targets(batch) if self._packed else some.trained
            columns["labels"] = (np.where(trained, batch.ids, np.int32(IGNORE_INDEX)), tokens)
        if self._weights:
            weights = some.full_weights.astype(np.float32)
            columns["loss_weights"] = columns["weights"] = (weights, tokens)
            if self._labels:
                self._export.lose(int(np.count_nonzero((weights != 0) & (weights != 1))), OTHER_WEIGHTS)
        if some.kinds is not None:
            columns["kinds"] = (some.kinds, tokens)
        if some.logprobs is not None:
            columns["logprobs"] = (some.logprobs, tokens)
        if self._export.teacher:
            teacher = self._export.teacher_of(batch.split)
            columns |= teacher_lists(teacher, batch.numbers, np.diff(some.offsets), batch.row_offsets)
        if self._pictures:
            documents = self._export.source.splits[batch.split]
            shown = row_pictures(documents, batch.numbers, np.diff(some.offsets), batch.row_offsets)
            columns |= {"images": (shown.lines, batch.row_offsets), "image_bytes": (shown.data, batch.row_offsets)}
        for name in self._facts:
            facts = self._export.source.splits[batch.split].facts(name, batch.numbers)
            columns[name] = (facts or [], batch.row_offsets)
        return columns
