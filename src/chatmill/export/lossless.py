"""Targets that hold all that is stored: episodes, Parquet, and folders of the datasets library and of the Hub."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.compiler.pack_plan import write_pack_plan
from chatmill.core.shift import IGNORE_INDEX
from chatmill.export.arrow_files import save_dataset, write_parquet
from chatmill.export.row_layout import RowBatch, RowPlan, one_each
from chatmill.export.targets import FACTS, has_other_weights
from chatmill.load.hf import Columns, record_batch
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.store.parquet import parquet_writer

if TYPE_CHECKING:
    from chatmill.export.targets import Export

CARD = "README.md"
HUB_TOKENS = 50_000_000
"""Tokens of a file for the Hub, at most: it serves files of some hundred megabytes best."""
OTHER_WEIGHTS = (
    "labels only say trained or not: {:,} tokens have another weight than 0 and 1, which is in the column "
    "loss_weights; a trainer that reads labels alone does not see it"
)


def to_episodes(export: Export) -> None:
    """One document an episode, in the order of the build, and the pack plan where there is one."""
    kinds = export.holds_kinds
    facts = [name for name in FACTS if export.holds(name)]
    for split, documents in export.source.splits.items():
        is_flat = int(documents.lengths.sum()) <= export.shard_tokens
        with EpisodeWriter(export.folder, split, None if is_flat else export.shard_tokens) as writer:
            for batch in export.batches(split, one_each(documents)):
                some = batch.documents
                columns = {name: documents.facts(name, batch.numbers) for name in facts}
                writer.append_batch(
                    some.ids,
                    some.offsets,
                    some.weights,
                    some.kinds if kinds else None,
                    source=columns.get("source"),
                    turns=columns.get("turns"),
                    record_ids=columns.get("record_id"),
                )
        if documents.plan is not None:
            write_pack_plan(export.folder / split, documents.lengths, documents.plan.length, documents.plan.strategy)


def to_parquet(export: Export) -> None:
    """`SPLIT/shard_00000.parquet`, ...: list columns with everything that is stored."""
    columns = _StoredColumns(export, labels=False)
    for split in export.source.splits:
        rows = export.rows(split)
        write_parquet(export, split, rows, columns.schema(rows, about=True), columns.of)


def to_hf(export: Export) -> None:
    """What `datasets.load_from_disk` opens: a `DatasetDict`, or a `Dataset` where one split was asked for."""
    if export.hub:
        _to_hub(export)
        return
    columns = _StoredColumns(export, labels=True)
    for split in export.source.splits:
        rows = export.rows(split)
        folder = export.folder if export.alone else export.folder / split
        save_dataset(export, split, rows, columns.schema(rows, about=False), columns.of, folder)
        if rows.capacity is not None:
            export.say(f"rows have no padding; their size, {rows.capacity:,} tokens, is in export.json alone")
    if not export.alone:
        (export.folder / "dataset_dict.json").write_text(json.dumps({"splits": list(export.source.splits)}))


def _to_hub(export: Export) -> None:
    """`data/SPLIT-00000-of-00003.parquet`, ... and `README.md`: what `datasets.load_dataset` opens."""
    columns = _StoredColumns(export, labels=True)
    data = export.folder / "data"
    for split in export.source.splits:
        rows = export.rows(split)
        schema = columns.schema(rows, about=True)
        shards = export.shards(split, rows, most=min(export.shard_tokens, HUB_TOKENS))
        for number, shard in enumerate(shards):
            with parquet_writer(data / f"{split}-{number:05d}-of-{len(shards):05d}.parquet", schema) as file:
                for batch in shard:
                    file.write_batch(record_batch(columns.of(batch), schema))
    (export.folder / CARD).write_text(_card(export), encoding="utf-8")
    export.config += ["hf upload USER/NAME {out} --repo-type dataset"]


class _StoredColumns:
    """Everything that is stored, as Arrow columns; the same ones for all splits."""

    def __init__(self, export: Export, *, labels: bool) -> None:
        """`labels`: ids with -100 where nothing is trained (hf), in place of a loss mask."""
        self._export, self._labels = export, labels
        self._kinds = export.holds_kinds
        self._facts = [name for name in FACTS if export.holds(name)]
        self._weights = any(has_other_weights(documents) for documents in export.source.splits.values())
        self._packed = False

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
        if rows.packed:
            types |= {"document_starts": pa.list_(pa.int32()), "documents": pa.list_(pa.int64())}
            types |= {"seq_lengths": pa.list_(pa.int32())} if self._labels else {}
        for name in self._facts:
            one = pa.type_for_alias(FACTS[name])
            types[name] = pa.list_(one) if rows.packed else one
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
        for name in self._facts:
            facts = self._export.source.splits[batch.split].facts(name, batch.numbers)
            columns[name] = (facts or [], batch.row_offsets)
        return columns


def _card(export: Export) -> str:
    """The dataset card: which files are which split, what the rows are, and how they were made."""
    filled = [split for split, counts in export.counts.items() if counts["rows"]]
    files = [f"  - split: {split}\n    path: data/{split}-*.parquet" for split in filled]
    counts = [
        f"| {split} | {found['rows']:,} | {found['documents']:,} | {found['tokens']:,} | {found['trained']:,} |"
        for split, found in export.counts.items()
    ]
    about: dict[str, Any] = {"fingerprint": export.source.fingerprint, **export.source.about}
    kept = ("fingerprint", "package_version", "recipe", "inputs", "tokenizer", "template", "policy")
    manifest = json.dumps({name: about[name] for name in kept if name in about}, indent=1, sort_keys=True)
    made = [
        f"- {what}: `{about[what]['name']}` (sha256 {about[what]['fingerprint']})"
        for what in ("tokenizer", "template", "policy")
        if what in about
    ]
    return "\n".join(
        [
            "---",
            "tags:",
            "- chatmill",
            "- tokenized",
            "configs:",
            "- config_name: default",
            "  data_files:",
            *files,
            "---",
            "",
            "# Chat conversations as tokens",
            "",
            "Rows of token ids with labels, compiled by Chatmill. `labels` are the ids of trained tokens and -100",
            "elsewhere, not shifted.",
            "",
            "| split | rows | documents | tokens | trained |",
            "|---|---|---|---|---|",
            *counts,
            "",
            *made,
            "",
            *(f"- Not held: {sentence}" for sentence in export.not_held),
            "",
            "How it was made (`export.json` has the hash of every file):",
            "",
            "```json",
            manifest,
            "```",
            "",
        ]
    )
