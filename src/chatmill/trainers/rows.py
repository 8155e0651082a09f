"""Rows of one split for trainers: laid out once, and read from the files of the dataset when they are asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import ConfigError
from chatmill.export.export import hybrid_of
from chatmill.export.row_layout import RowBatch
from chatmill.export.targets import ALONE, Export, has_other_weights
from chatmill.load.row_columns import ENDS, LENGTHS, POSITIONS
from chatmill.pack.plan import Strategy
from chatmill.store.documents import open_dataset
from chatmill.store.model_ids import refuse_ids_beyond
from chatmill.store.split import StoredDataset
from chatmill.trainers.source import dataset_of

WEIGHTS = "loss_weights"
Row = dict[str, NDArray[Any]]


class SplitRows:
    """The rows of one split, as a trainer's own loader reads them: `len(rows)` and `rows[i]`.

    A row has `input_ids` and `labels`: the ids of trained tokens, unshifted, and -100 elsewhere and on the first token
    of every document. It says where its documents are: `seq_lengths`, or for trees `position_ids` and `ends`.
    `loss_weights` are there if some are neither 0 nor 1.
    """

    column_names = None
    """Columns that a trainer could drop: it is to drop none."""

    def __init__(
        self,
        dataset: str | os.PathLike[str],
        split: str = "train",
        *,
        trainer: str,
        max_length: int | None = None,
        packed: bool | None = None,
        model: Any = None,
        has_weights: bool = True,
        has_trees: bool = True,
    ) -> None:
        """Open a split, and refuse what a trainer cannot take.

        Args:
            dataset: A folder, a URL, or a recipe (`.yaml`), which is built first.
            split: Name of the split.
            trainer: Name of the trainer, for errors.
            max_length: Tokens of a packed row; without packing, of a document.
            packed: Whether documents share rows; default: where the build packed them, or `max_length` is given.
            model: Model whose embeddings the ids must have; default: that of the build.
            has_weights: Whether the trainer takes weights other than 0 and 1.
            has_trees: Whether it takes trees.
        """
        source = open_dataset(dataset_of(dataset), [split])
        documents = source.splits[split]
        refuse_ids_beyond(documents, source.about, model)
        stated = documents.plan
        if packed is None:
            packed = stated is not None or max_length is not None
        if packed and max_length is None and stated is None:
            raise ConfigError(f"{dataset} is not packed: packed rows need max_length, the tokens of a row")
        strategy = Strategy.BEST_FIT if stated is None else stated.strategy
        self.address, self.split = dataset, split
        self._export = Export(
            source=source,
            folder=source.directory,
            alone=True,
            max_length=stated.capacity if packed and max_length is None and stated is not None else max_length,
            packing_strategy=strategy if packed else ALONE,
            shard_tokens=1,
            hybrid=hybrid_of(source, model),
        )
        self._documents = documents
        self.has_weights = has_other_weights(documents)
        self.has_trees = documents.has_trees
        self._refuse(trainer, has_weights=has_weights, has_trees=has_trees)
        self._plan = self._export.rows()[split]
        self.lengths = self._plan.row_tokens
        """Tokens of each row."""

    def _refuse(self, trainer: str, *, has_weights: bool, has_trees: bool) -> None:
        """Refuse a dataset of which the trainer would see something else."""
        if self._documents.has_pictures:
            raise ConfigError(
                f"{self.address} holds pictures, and inside {trainer} Chatmill gives tokens alone: export with --to hf "
                "and train with PictureCollator (docs/pictures.md)"
            )
        if self._documents.has_sides:
            raise ConfigError(
                f"{self.address} holds answers that people compared, and {trainer} would train the rejected ones too: "
                "export with --to trl-dpo, trl-kto or trl-reward"
            )
        if self.has_trees and not has_trees:
            raise ConfigError(
                f"{self.address} holds trees, and {trainer} has no mask that keeps branches apart: export with "
                "--trees expand, or build with expand: turns"
            )
        if self.has_weights and not has_weights:
            raise ConfigError(
                f"{self.address}: some tokens have another weight than 0 and 1, and {trainer} reads only trained or "
                "not: build with weights of 0 and 1"
            )

    @property
    def source(self) -> StoredDataset:
        """The dataset, and what is known about how it was made."""
        return self._export.source

    @property
    def pad_id(self) -> int:
        """That of the build; 0 where it is not known."""
        return self._export.pad_id

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Row:
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of {len(self):,}")
        number %= len(self)
        return self._row(self.batch(number, number + 1))

    def __iter__(self) -> Iterator[Row]:
        return (self[number] for number in range(len(self)))

    def batch(self, first: int, last: int) -> RowBatch:
        """Read rows `first` up to `last - 1`, flat."""
        part = self._plan.part(first, last)
        return RowBatch(
            split=self.split,
            documents=self._documents.gather(part.documents),
            numbers=part.documents,
            row_offsets=part.row_offsets,
            packed=part.packed,
            width=0,
        )

    def _row(self, batch: RowBatch) -> Row:
        """Return the columns of a batch of one row."""
        labels = self._export.labels(batch)
        row = {"input_ids": batch.ids.astype(np.int64), "labels": labels.astype(np.int64)}
        if self.has_weights:
            weights = batch.documents.full_weights.astype(np.float32)
            row[WEIGHTS] = np.where(labels >= 0, weights, np.float32(0))
        if self.has_trees:
            positions, ends = self._documents.branches(batch.numbers).positions_and_ends(batch.lengths)
            starts = np.repeat(batch.starts, batch.lengths)
            row[POSITIONS] = positions.astype(np.int64)
            row[ENDS] = ends.astype(np.int64) + starts
        else:
            row[LENGTHS] = batch.lengths
        return row
