"""Levanter: rows of a dataset for its `DirectDatasetComponent`, with float weights and stated documents."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from chatmill.core.shift import IGNORE_INDEX
from chatmill.errors import ConfigError
from chatmill.load.row_columns import LENGTHS
from chatmill.trainers.rows import WEIGHTS, Row, SplitRows

try:
    import jax.numpy as jnp
    from levanter.data.dataset import AsyncDataset
    from levanter.data.text.examples import GrugLmExample
except ImportError as error:
    raise ConfigError(f"chatmill.trainers.levanter needs levanter (marin-levanter 0.2.20.dev): {error}") from error


class LevanterRows(AsyncDataset[Any]):
    """The rows of a split, padded to `train_seq_len` tokens.

    Documents of a row are told apart by segment ids, whatever token ends them.
    """

    def __init__(self, dataset: str | os.PathLike[str], split: str, *, train_seq_len: int) -> None:
        """Open a split; where the build did not pack, rows are packed into `train_seq_len` tokens."""
        rows = SplitRows(dataset, split, trainer="Levanter", has_trees=False)
        if rows.source.splits[split].plan is None:
            rows = SplitRows(dataset, split, trainer="Levanter", max_length=train_seq_len, packed=True)
        longest = int(rows.lengths.max(initial=0))
        if longest > train_seq_len:
            raise ConfigError(
                f"{dataset} has rows of up to {longest:,} tokens, and train_seq_len is {train_seq_len:,}: set it to "
                f"{longest} or more, or build shorter rows"
            )
        self.rows = rows
        self._length = train_seq_len

    async def async_len(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def is_finite(self) -> bool:
        """Say that the rows come to an end."""
        return True

    async def get_batch(self, indices: Sequence[int]) -> Sequence[Any]:
        """Return some rows as examples."""
        return [self._example(self.rows[int(index)]) for index in indices]

    def _example(self, row: Row) -> Any:
        """Pad a row; weights are moved to the token before, whose loss they multiply."""
        count = len(row["input_ids"])
        weights = row.get(WEIGHTS)
        if weights is None:
            weights = (row["labels"] != IGNORE_INDEX).astype(np.float32)
        documents = np.repeat(np.arange(len(row[LENGTHS])), row[LENGTHS])

        tokens = np.full(self._length, self.rows.pad_id, dtype=np.int32)
        tokens[:count] = row["input_ids"]
        moved = np.zeros(self._length, dtype=np.float32)
        moved[: count - 1] = weights[1:]
        segments = np.full(self._length, len(row[LENGTHS]), dtype=np.int32)
        segments[:count] = documents
        return GrugLmExample.causal(
            jnp.asarray(tokens), loss_weight=jnp.asarray(moved), segment_ids=jnp.asarray(segments)
        )
