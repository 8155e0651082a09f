"""Tinker: documents as datums, and the dataset builder that tinker-cookbook's supervised training takes."""

from __future__ import annotations

import math

import numpy as np

from chatmill.errors import ConfigError
from chatmill.trainers.rows import WEIGHTS, Row, SplitRows

try:
    import chz
    import tinker
    from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder
except ImportError as error:
    raise ConfigError(f"chatmill.trainers.tinker needs tinker and tinker-cookbook: {error}") from error


def datum_of(row: Row) -> tinker.Datum:
    """Make the datum of a document: its targets and weights are shifted, and weights are as they are stored."""
    ids = row["input_ids"]
    weights = row[WEIGHTS] if WEIGHTS in row else (row["labels"] >= 0).astype(np.float32)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1].tolist()),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": weights[1:]},
    )


class DocumentBatches(SupervisedDataset):
    """Batches of documents; which ones are in a batch depends on seed and number alone, so a run can be resumed."""

    def __init__(self, rows: SplitRows, batch_size: int, *, shuffle: bool) -> None:
        """Take rows of one document each; the last incomplete batch of shuffled ones is left out."""
        self.rows = rows
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._order = np.arange(len(rows))

    def __len__(self) -> int:
        if self._shuffle:
            return len(self.rows) // self._batch_size
        return math.ceil(len(self.rows) / self._batch_size)

    def set_epoch(self, seed: int = 0) -> None:
        """Choose the order of an epoch."""
        if self._shuffle:
            self._order = np.random.default_rng(seed).permutation(len(self.rows))

    def get_batch(self, index: int) -> list[tinker.Datum]:
        """Return the datums of a batch."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self):,}")
        first = index * self._batch_size
        return [datum_of(self.rows[number]) for number in self._order[first : first + self._batch_size].tolist()]


@chz.chz
class ChatmillDatasetBuilder(SupervisedDatasetBuilder):
    """`dataset_builder=ChatmillDatasetBuilder(dataset="built", batch_size=128)` in `train.Config`."""

    dataset: str
    """A folder, a URL, or a recipe, which is built first."""
    batch_size: int
    shuffle: bool = True
    evaluate: bool = False
    """Whether the loss of the split `val` is evaluated."""

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Open the dataset."""
        train = self._batches("train", shuffle=self.shuffle)
        if len(train) == 0:
            raise ConfigError(
                f"{self.dataset}: {len(train.rows):,} documents do not fill a batch of {self.batch_size:,}"
            )
        return train, self._batches("val", shuffle=False) if self.evaluate else None

    def _batches(self, split: str, *, shuffle: bool) -> DocumentBatches:
        rows = SplitRows(self.dataset, split, trainer="Tinker", packed=False, has_trees=False)
        return DocumentBatches(rows, self.batch_size, shuffle=shuffle)
