"""Targets that hold all that is stored: Parquet, and folders of the datasets library."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.shift import IGNORE_INDEX
from chatmill.export.arrow_files import Columns, lists, save_splits, write_parquet
from chatmill.export.row_layout import RowBatch, RowPlan
from chatmill.export.targets import FACTS, has_other_weights
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


TREE_COLUMNS = ("position_ids", "ends")
"""What rows of trees have besides ids and labels."""
TOKEN_TYPES = {"input_ids": "int32", "labels": "int32", "loss_mask": "uint8", "loss_weights": "float32"}
TOKEN_TYPES |= {"weights": "float32", "kinds": "uint8", "logprobs": "float32", "position_ids": "int32", "ends": "int32"}
DOCUMENT_TYPES = {"document_starts": "int32", "documents": "int64", "seq_lengths": "int32"}


def to_parquet(export: Export) -> None:
    """`SPLIT/shard_00000.parquet`, ...: list columns with everything that is stored."""
    columns = StoredColumns(export, labels=False)
    for split in export.source.splits:
        rows = export.rows(split)
        meaning = {"layout": "packed rows" if rows.packed else "one document a row", "capacity": rows.capacity}
        meaning |= {"pad_id": export.pad_id, "source_fingerprint": export.source.fingerprint}
        schema = columns.schema(rows).with_metadata({"chatmill": json.dumps(meaning)})
        write_parquet(export, split, rows, schema, columns.of)


def to_hf(export: Export) -> None:
    """What `datasets.load_from_disk` opens: a `DatasetDict`, or a `Dataset` where one split was asked for."""
    if _save(export) and not export.config:
        export.config += [f"TRL: {TRL_PACKED}", f"transformers: {TRAINER_PACKED}"]


def to_trl(export: Export) -> None:
    """The same folder, with what TRL's `SFTTrainer` must be told about it."""
    packed = _save(export)
    if not export.config:  # a hybrid model has had its own lines
        export.config += [TRL_PACKED if packed else "SFTConfig(max_length=None)  # rows have their length already"]


def _save(export: Export) -> bool:
    """Write the splits for `datasets.load_from_disk`; whether rows hold several documents."""
    columns = StoredColumns(export, labels=True)
    plans = {split: export.rows(split) for split in export.source.splits}
    save_splits(export, plans.__getitem__, lambda rows: (columns.schema(rows), columns.of))
    for rows in plans.values():
        if rows.packed:
            _tell_keys(export)
        if rows.capacity is not None:
            export.say(f"rows have no padding; their size, {rows.capacity:,} tokens, is in export.json alone")
    return any(rows.packed for rows in plans.values())


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


class StoredColumns:
    """Everything that is stored, as Arrow columns; the same ones for all splits."""

    def __init__(self, export: Export, *, labels: bool) -> None:
        """`labels`: ids with -100 where nothing is trained (hf), in place of a loss mask."""
        self._export, self._labels, self._packed = export, labels, False
        splits = export.source.splits.values()
        self._facts = [name for name in FACTS if export.holds(name)]
        self._weights = any(map(has_other_weights, splits))
        self._pictures = any(documents.has_pictures for documents in splits)
        self._trees = any(documents.has_trees for documents in splits)
        self._tokens = ["input_ids", "labels" if labels else "loss_mask"]
        self._tokens += ["loss_weights" if labels else "weights"] if self._weights else []
        self._tokens += ["kinds"] if export.holds_kinds else []
        self._tokens += ["logprobs"] if any(documents.has_logprobs for documents in splits) else []
        if self._trees:
            export.say(TREES)

    def schema(self, rows: RowPlan) -> Any:
        """The columns that rows of this plan have."""
        import pyarrow as pa

        self._packed = rows.packed
        kinds = {name: pa.type_for_alias(TOKEN_TYPES[name]) for name in self._tokens}
        kinds |= teacher_types() if self._export.teacher else {}
        kinds |= {name: pa.type_for_alias(TOKEN_TYPES[name]) for name in (TREE_COLUMNS if self._trees else ())}
        names = ["document_starts", "documents", "seq_lengths"] if self._labels else ["document_starts", "documents"]
        if self._trees:  # lengths of documents would let their branches see each other
            names = ["documents"]
        kinds |= {name: pa.type_for_alias(DOCUMENT_TYPES[name]) for name in (names if rows.packed else ())}
        schema = lists(**kinds)
        for name in self._facts:
            one = pa.type_for_alias(FACTS[name])
            schema = schema.append(pa.field(name, pa.list_(one) if rows.packed else one))
        if self._pictures:
            schema = pa.schema([*schema, ("images", pa.string()), ("image_bytes", pa.large_binary())])
        return schema

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
