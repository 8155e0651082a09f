"""Targets that hold all that is stored: Parquet, and folders of the datasets library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from chatmill.core.shift import IGNORE_INDEX
from chatmill.export.arrow_files import Columns, save_splits, write_parquet
from chatmill.export.row_layout import RowBatch
from chatmill.export.targets import FACTS, has_other_weights
from chatmill.export.trainer_lines import TRAINER_PACKED, TRL_PACKED, RowFacts, hf_lines, trl_lines
from chatmill.load.pictures import row_pictures
from chatmill.load.teacher import teacher_values
from chatmill.store.named_paths import find_image_folder

if TYPE_CHECKING:
    from chatmill.export.targets import Export

OTHER_WEIGHTS = (
    "labels only say trained or not: {:,} tokens have another weight than 0 and 1, which is in the column "
    "loss_weights; a trainer that reads labels alone does not see it"
)
TREES = (
    "rows are trees: train on them with masks made of position_ids and ends (DataCollatorForCausalLM with model=...); "
    "a trainer that ignores these columns reads branches as one text"
)
NO_TREES = (
    "# {} has recurrent layers, which carry a state from one branch to the next: it cannot be trained on trees. "
    "Export again with --trees expand"
)
"""In place of the lines for trees."""
TREE_COLUMNS = ("position_ids", "ends")
"""What rows of trees have besides ids and labels."""


def to_parquet(export: Export, *, teacher: bool = False) -> None:
    """`SPLIT/shard_00000.parquet`, ...: list columns with everything that is stored."""
    write_parquet(export, export.rows(), StoredColumns(export, labels=False, teacher=teacher).of)


def to_hf(export: Export, *, teacher: bool = False) -> None:
    """Write what `datasets.load_from_disk` opens: a `DatasetDict`, or a `Dataset` where one split was asked for."""
    facts = _save(export, teacher=teacher)
    if facts.has_trees and export.hybrid is not None:
        export.config = [NO_TREES.format(export.hybrid.kind)]
    elif facts.has_trees or facts.has_images or not export.config:  # a packed hybrid has had its own lines
        export.config = hf_lines(facts)


def to_trl(export: Export) -> None:
    """Write the same folder, with what TRL's `SFTTrainer` must be told about it."""
    facts = _save(export, teacher=False)
    if not export.config:
        export.config = trl_lines(facts)


def _save(export: Export, *, teacher: bool) -> RowFacts:
    """Write the splits for `datasets.load_from_disk`; return what the lines for trainers depend on."""
    columns, plans = StoredColumns(export, labels=True, teacher=teacher), export.rows()
    save_splits(export, plans, columns.of)
    for rows in plans.values():
        if rows.packed:
            _tell_keys(export)
        if rows.capacity is not None:
            export.say(f"rows have no padding; their size, {rows.capacity:,} tokens, is in export.json alone")
    return export.facts(plans, image_folder=_image_folder(export))


def _image_folder(export: Export) -> str:
    """Find the folder that the paths of images start from; empty where the images are stored, or there are none."""
    recipe = export.source.about.get("recipe", {})
    has_images = any(documents.has_pictures for documents in export.source.splits.values())
    if not has_images or recipe.get("store_images"):
        return ""
    return find_image_folder(recipe, export.source.directory) or "FOLDER"


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

    def __init__(self, export: Export, *, labels: bool, teacher: bool) -> None:
        """`labels`: ids with -100 where nothing is trained (hf), in place of a loss mask."""
        splits = export.source.splits.values()
        self._export, self._labels, self._teacher = export, labels, teacher
        self._facts = [name for name in FACTS if export.holds(name)]
        self._weights = any(map(has_other_weights, splits))
        self._kinds = export.holds_kinds
        self._pictures = any(documents.has_pictures for documents in splits)
        self._trees = any(documents.has_trees for documents in splits)
        if self._trees:
            export.say(TREES)

    def of(self, batch: RowBatch) -> Columns:
        """Return the rows of a batch."""
        import pyarrow as pa

        gathered, documents = batch.documents, self._export.source.splits[batch.split]
        columns = {"input_ids": batch.per_token(batch.ids), **self._targets(batch)}
        if self._kinds:
            columns["kinds"] = batch.per_token(gathered.kinds)
        if gathered.logprobs is not None:
            columns["logprobs"] = batch.per_token(gathered.logprobs)
        if self._teacher:
            teachers = teacher_values(self._export.teacher_of(batch.split), batch.numbers, batch.lengths)
            columns |= {name: batch.per_token(values) for name, values in teachers.items()}
        if self._trees:
            positions, ends = documents.branches(batch.numbers).positions_and_ends(batch.lengths)
            ends = ends + np.repeat(batch.starts, batch.lengths).astype(np.int32)
            columns |= {
                name: batch.per_token(column) for name, column in zip(TREE_COLUMNS, (positions, ends), strict=True)
            }
        elif batch.packed:  # lengths of documents would let the branches of trees see each other
            columns["document_starts"] = batch.per_document(batch.starts.astype(np.int32))
        if batch.packed:
            columns["documents"] = batch.per_document(batch.numbers)
        if batch.packed and self._labels and not self._trees:
            columns["seq_lengths"] = batch.per_document(batch.lengths.astype(np.int32))
        for name in self._facts:
            facts = pa.array(documents.facts(name, batch.numbers) or [], type=pa.type_for_alias(FACTS[name]))
            columns[name] = batch.per_document(facts) if batch.packed else facts
        if self._pictures:
            shown = row_pictures(documents, batch.numbers, batch.lengths, batch.row_offsets)
            columns |= {"images": pa.array(shown.lines, pa.string())}
            columns |= {"image_bytes": pa.array(shown.data, pa.large_binary())}
        return columns

    def _targets(self, batch: RowBatch) -> dict[str, Any]:
        """Return what is trained, and the weights where some are neither 0 nor 1."""
        documents, columns = batch.documents, {}
        if not self._labels:
            columns["loss_mask"] = batch.per_token(documents.trained.astype(np.uint8))
        elif batch.packed:  # no token predicts the first token of a packed document
            columns["labels"] = batch.per_token(self._export.labels(batch))
        else:
            columns["labels"] = batch.per_token(np.where(documents.trained, batch.ids, np.int32(IGNORE_INDEX)))
        if self._weights:
            weights = documents.full_weights.astype(np.float32)
            columns["loss_weights" if self._labels else "weights"] = batch.per_token(weights)
            if self._labels:
                self._export.lose(int(np.count_nonzero((weights != 0) & (weights != 1))), OTHER_WEIGHTS)
        return columns
