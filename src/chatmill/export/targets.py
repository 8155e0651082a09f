"""The export while it runs, and the targets hf, parquet and episodes."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.compiler.pack_plan import write_pack_plan
from chatmill.core.shift import IGNORE_INDEX
from chatmill.errors import ConfigError, DataError, MissingExtraError
from chatmill.export.rows import RowBatch, RowPlan, as_stored, one_each, packed_anew, row_batches
from chatmill.store.documents import StoredDataset
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.store.parquet import parquet_shard
from chatmill.store.split import Split, even_ranges

FACTS = {"record_id": "string", "source": "string", "turns": "int32"}
"""What episodes know of their records beside tokens, and how Arrow holds it."""
COUNTED = ("rows", "documents", "tokens", "trained")
MAX_ID = 2**31 - 1
SCAN = 1 << 22


@dataclass(kw_only=True, slots=True)
class Export:
    """One export while it runs."""

    source: StoredDataset
    folder: Path
    """Where the target writes: not yet published."""
    alone: bool
    """Whether one split was asked for by name."""
    max_length: int | None
    packing_strategy: str
    overflow: str
    pad_id: int
    shard_tokens: int
    kinds: bool
    """Whether kinds are wanted."""
    eod_id: int | None = None
    """Put behind every document that does not end in it, untrained."""
    record_ids: bool = False
    """Whether the record id of every document is stored; `megatron` alone takes it."""
    hub: bool = False
    """Whether the folder is laid out for the Hugging Face Hub; `hf` alone takes it."""
    not_held: list[str] = field(default_factory=list)
    """Sentences about what the target cannot hold, or was asked to leave out."""
    config: list[str] = field(default_factory=list)
    """Lines for the config of the trainer; `{out}` is the folder."""
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """Per split: rows, documents, tokens and trained tokens."""

    def say(self, sentence: str) -> None:
        """Note once what is not held."""
        if sentence not in self.not_held:
            self.not_held.append(sentence)

    def rows(self, split: str) -> RowPlan:
        """Rows of the pack plan, or one document a row; laid out anew where a length is given."""
        documents = self.source.splits[split]
        if self.max_length is None:
            return as_stored(documents)
        made = packed_anew(documents, self.max_length, self.packing_strategy, self.overflow)
        for sentence in made.left_out:
            self.say(f"{split}: {sentence}")
        return made

    def rows_of_one_length(self, split: str, name: str) -> RowPlan:
        """As `rows`, for a trainer (`name`) that wants them padded: without a length there are none."""
        if self.max_length is None and self.source.splits[split].plan is None:
            raise ConfigError(
                f"all rows of {name} have one length, and {split} has no pack plan: give --max-length (one document a "
                "row: --pack alone), or build with pack: {length: N}"
            )
        return self.rows(split)

    def documents(self, split: str, name: str) -> RowPlan:
        """One document a row, for a trainer (`name`) that packs them itself."""
        documents = self.source.splits[split]
        if documents.plan is not None:
            self.say(f"which episodes share a row is not kept: {name} packs again")
        return one_each(documents)

    def batches(self, split: str, rows: RowPlan, *, width: int = 0) -> Iterator[RowBatch]:
        """The rows of a split, counted as they pass; `width` is their length where the target pads them."""
        self.counts[split] = dict.fromkeys(COUNTED, 0)
        return self._counted(split, rows, width)

    def shards(
        self, split: str, rows: RowPlan, *, width: int = 0, added: int = 0, most: int | None = None
    ) -> list[Iterator[RowBatch]]:
        """The same for a target that writes files of up to `shard_tokens` (or `most`) tokens: the rows of each file.

        `added`: tokens that the target puts behind each row.
        """
        self.counts[split] = dict.fromkeys(COUNTED, 0)
        tokens = np.maximum(rows.row_tokens, width) + added
        files = even_ranges(tokens, self.shard_tokens if most is None else most)
        return [self._counted(split, rows.part(first, last), width) for first, last in files]

    def _counted(self, split: str, rows: RowPlan, width: int) -> Iterator[RowBatch]:
        counts = self.counts[split]
        for batch in row_batches(self.source.splits[split], rows, width):
            counts["rows"] += len(batch)
            counts["documents"] += len(batch.numbers)
            counts["tokens"] += len(batch.documents.ids)
            counts["trained"] += int(np.count_nonzero(batch.documents.trained))
            yield batch

    def holds(self, fact: str) -> bool:
        """Whether all splits store `record_id`, `source` or `turns`."""
        first = np.zeros(1, dtype=np.int64)
        return all(documents.facts(fact, first) is not None for documents in self.source.splits.values())

    @property
    def main_split(self) -> str:
        """The split that a trainer trains on: `train`, or the first where there is no such split."""
        return "train" if "train" in self.source.splits else next(iter(self.source.splits))

    @property
    def eos_id(self) -> int | None:
        """The end token of the tokenizer that the dataset was built with; None where none is known."""
        found = self.source.about.get("tokenizer", {}).get("eos_id")
        return None if found is None else int(found)

    @property
    def holds_kinds(self) -> bool:
        """Whether kinds are wanted and all splits store them."""
        stored = all(documents.has_kinds for documents in self.source.splits.values())
        if stored and not self.kinds:
            self.say("kinds are left out, as asked")
        return stored and self.kinds


# --- episodes ---------------------------------------------------------------------------------------------------


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


# --- columns of Arrow ---------------------------------------------------------------------------------------------


def to_parquet(export: Export) -> None:
    """`SPLIT/shard_00000.parquet`, ...: list columns with everything that is stored."""
    columns = Columns(export, labels=False)
    for split in export.source.splits:
        rows = export.rows(split)
        schema = columns.schema(rows, about=True)
        for number, shard in enumerate(export.shards(split, rows)):
            with parquet_shard(export.folder / split, number, schema) as file:
                for batch in shard:
                    file.write_batch(columns.record_batch(split, rows, batch, schema))


def to_hf(export: Export) -> None:
    """What `datasets.load_from_disk` opens: a `DatasetDict`, or a `Dataset` where one split was asked for."""
    if export.hub:
        from chatmill.export.hub import to_hub

        to_hub(export)
        return
    columns = Columns(export, labels=True)
    for split in export.source.splits:
        rows = export.rows(split)
        schema = columns.schema(rows, about=False)
        batches = (columns.record_batch(split, rows, batch, schema) for batch in export.batches(split, rows))
        save_dataset(export, split, rows, schema, batches, export.folder if export.alone else export.folder / split)
        if rows.capacity is not None:
            export.say(f"rows have no padding; their size, {rows.capacity:,} tokens, is in export.json alone")
    columns.say_what_labels_lose()
    if not export.alone:
        (export.folder / "dataset_dict.json").write_text(json.dumps({"splits": list(export.source.splits)}))


def save_dataset(export: Export, split: str, rows: RowPlan, schema: Any, batches: Iterator[Any], folder: Path) -> None:
    """Write record batches as what `Dataset.load_from_disk` opens; one batch is in memory at a time."""
    try:
        import datasets
        import pyarrow as pa
    except ImportError as error:
        raise MissingExtraError("datasets", "hf", "exporting to folders of the datasets library") from error
    streams = export.folder / ".streams"  # a dataset is not saved into the folder that it is read from
    streams.mkdir()
    stream = streams / f"{split}.arrow"
    with stream.open("wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    name = f"{export.source.fingerprint}/{split}/{rows.capacity}/{','.join(schema.names)}"
    table = datasets.table.MemoryMappedTable.from_file(str(stream))
    # A fingerprint of ours: the one that would be made up depends on the time of the file.
    dataset = datasets.Dataset(table, fingerprint=hashlib.sha256(name.encode()).hexdigest()[:16])
    with _no_progress_bars(datasets):
        dataset.save_to_disk(str(folder))
    del dataset, table
    stream.unlink()
    streams.rmdir()


@contextlib.contextmanager
def _no_progress_bars(datasets: Any) -> Iterator[None]:
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


class Columns:
    """Rows as Arrow columns; the same ones for all splits."""

    def __init__(self, export: Export, *, labels: bool) -> None:
        """`labels`: ids with -100 where nothing is trained (hf), in place of a loss mask."""
        self._export, self._labels = export, labels
        self._kinds = export.holds_kinds
        self._facts = [name for name in FACTS if export.holds(name)]
        self._weights = any(has_other_weights(documents) for documents in export.source.splits.values())
        self._other_weights = 0
        self._first_tokens = 0

    def schema(self, rows: RowPlan, *, about: bool) -> Any:
        """The columns that rows of this plan have; `about` puts their meaning into the file."""
        import pyarrow as pa

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

    def record_batch(self, split: str, rows: RowPlan, batch: RowBatch, schema: Any) -> Any:
        """The rows of a batch."""
        import pyarrow as pa

        some, tokens = batch.documents, batch.token_offsets
        ids = ids_of(split, batch)
        columns: dict[str, tuple[NDArray[Any] | list[Any], NDArray[np.int64]]] = {
            "input_ids": (ids, tokens),
            "labels": (self._label_ids(batch, ids, rows.packed) if self._labels else ids, tokens),
            "loss_mask": (some.trained.astype(np.uint8), tokens),
            "document_starts": (batch.starts.astype(np.int32), batch.row_offsets),
            "seq_lengths": (np.diff(some.offsets).astype(np.int32), batch.row_offsets),
            "documents": (batch.numbers, batch.row_offsets),
        }
        if self._weights:
            weights = some.full_weights.astype(np.float32)
            columns["loss_weights"] = columns["weights"] = (weights, tokens)
            self._other_weights += int(np.count_nonzero((weights != 0) & (weights != 1)))
        if some.kinds is not None:
            columns["kinds"] = (some.kinds, tokens)
        for name in self._facts:
            columns[name] = (self._export.source.splits[split].facts(name, batch.numbers) or [], batch.row_offsets)
        return pa.RecordBatch.from_arrays(
            [list_array(*columns[column.name], column.type) for column in schema], schema=schema
        )

    def _label_ids(self, batch: RowBatch, ids: NDArray[np.int32], packed: bool) -> NDArray[np.int32]:
        """Ids where the token is trained. The first token of a packed document is nobody's next token."""
        trained = batch.documents.trained
        if packed:
            firsts = batch.documents.offsets[:-1]
            self._first_tokens += int(np.count_nonzero(trained[firsts]))
            trained = trained.copy()
            trained[firsts] = False
        return np.where(trained, ids, np.int32(IGNORE_INDEX))

    def say_what_labels_lose(self) -> None:
        """Labels only say trained or not."""
        if self._other_weights:
            self._export.say(
                f"labels only say trained or not: {self._other_weights:,} tokens have another weight than 0 and 1, "
                "which is in the column loss_weights; a trainer that reads labels alone does not see it"
            )
        if self._first_tokens:
            self._export.say(
                f"{self._first_tokens:,} trained tokens are the first of a packed document and have no label: no "
                "token of their own document comes before them"
            )


def ids_of(split: str, batch: RowBatch) -> NDArray[np.int32]:
    """The ids of a batch; those that int32 does not hold are refused."""
    ids = batch.documents.ids
    if len(ids) and int(ids.max()) > MAX_ID:
        raise DataError(f"{split}: a token has the id {ids.max():,}; int32 holds ids up to {MAX_ID:,}")
    return ids.astype(np.int32)


def list_array(values: NDArray[Any] | list[Any], offsets: NDArray[np.int64], kind: Any) -> Any:
    """A column: lists of values where its type is one, else a value a row."""
    import pyarrow as pa

    if not pa.types.is_list(kind):
        return pa.array(values, type=kind)
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values, type=kind.value_type))


def has_other_weights(documents: Split) -> bool:
    """Whether a token has a weight that is neither 0 nor 1."""
    for shard in range(documents.shard_count):
        weights = documents.shard_columns(shard)[1]
        for first in range(0, 0 if weights is None else len(weights), SCAN):
            assert weights is not None
            piece = weights[first : first + SCAN]
            if bool(((piece != 0) & (piece != 1)).any()):
                return True
    return False
