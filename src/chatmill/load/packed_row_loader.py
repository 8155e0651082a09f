"""Batches of rows that are packed already (spec 3): each once per epoch, documents kept apart."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.blocks import boundaries_from_starts
from chatmill.errors import DataError
from chatmill.load.config import DatasetMode, SamplingMode, TrainingConfig
from chatmill.load.feed import RowFeed, Rows
from chatmill.load.loader import EpochLoader
from chatmill.load.placement import placed
from chatmill.load.row_buffer import Laid, RowBuffer

Ints = NDArray[np.int64]


class MemoryRows(Rows):
    """Packed rows in memory; the first token of a document is never a target."""

    has_masks = True
    ignores_untrained = True

    def __init__(
        self, name: str, rows: list[Ints], starts: list[Ints], weights: Sequence[NDArray[Any]] | None, **options: Any
    ) -> None:
        """`weights` are token-aligned; None: every token counts. `options` as for `Rows`."""
        super().__init__(name, **options)
        self._rows, self._starts, self._weights = rows, starts, weights
        self.most_documents = max(map(len, starts))
        digest = hashlib.sha256(np.array([len(row) for row in rows], dtype=np.int64).tobytes())
        for column in (rows, starts, weights or ()):
            for row in column:
                digest.update(np.ascontiguousarray(row).data)
        self._fingerprint = digest.hexdigest()

    @property
    def fingerprint(self) -> str:
        """Of rows, starts and weights."""
        return self._fingerprint

    @property
    def weight_dtype(self) -> np.dtype[Any]:
        """Weights may be fractions."""
        return np.dtype(np.float32)

    def rows_of(self, epoch: int) -> int:
        """All of them, whatever the epoch."""
        return len(self._rows)

    def lay(self, buffer: RowBuffer, epoch: int, rows: Ints, slots: Ints) -> Laid:
        """Copy rows into their slots."""
        assert buffer.weights is not None
        starts: list[Ints] = [np.empty(0, dtype=np.int64)]
        lengths = starts.copy()
        for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
            ids, own = self._rows[row], self._starts[row]
            buffer.ids[slot, : len(ids)] = ids
            buffer.weights[slot, : len(ids)] = 1 if self._weights is None else self._weights[row]
            buffer.weights[slot, own] = 0  # the token before belongs to another document
            starts.append(own)
            lengths.append(np.diff(own, append=len(ids)))
        counts = [len(own) for own in starts[1:]]
        return Laid(slots=np.repeat(slots, counts), starts=np.concatenate(starts), lengths=np.concatenate(lengths))


class PackedRowLoader(EpochLoader):
    """`PackedBatch`es of rows in memory: every token but the first of a document is a target.

    Epoch e has the order `RandomState(seed + e).permutation(rows)` (with `shuffle`). The last batch of an epoch is
    filled up with empty rows. Targets that are not trained are -100.
    """

    kind = "packed_rows"
    data = "packed rows"
    """What errors call the rows."""
    split_is_folder = False

    def __init__(
        self,
        input_ids: Sequence[Sequence[int] | NDArray[np.integer]],
        document_starts: Sequence[Sequence[int] | NDArray[np.integer]],
        *,
        batch_size: int,
        pad_id: int,
        shuffle: bool = True,
        seed: int = 1337,
        split: str = "train",
        report: Mapping[str, Any] | None = None,
        weights: Sequence[NDArray[Any]] | None = None,
        width: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Rows as `block_tokenize_fn` gives them; `report` is what packing left out (`data_report`).

        `weights` are token-aligned, in place of training every token. `width`: tokens of a row, padding included
        (default: those of the longest).
        """
        if not len(input_ids):
            raise DataError("there are no packed rows: were all texts left out (min_len, max_len)?")
        rows = [np.asarray(row, dtype=np.int64) for row in input_ids]
        starts = [np.asarray(row, dtype=np.int64) for row in document_starts]
        sizes = np.array([len(row) for row in rows], dtype=np.int64)
        boundaries_from_starts(starts, sizes)  # wrong ones are refused here, and not row by row in training
        width = int(sizes.max()) if width is None else width
        if width < 2:
            raise DataError("no packed row has 2 tokens: there is nothing to predict")
        config = TrainingConfig(
            batch_size=batch_size,
            block_size=width - 1,
            dataset_mode=DatasetMode.SFT_EPISODE,
            batch_sampling_mode=SamplingMode.EPOCH,
            epoch_shuffle=shuffle,
            epoch_drop_last=False,
            epoch_seed=seed,
            use_loss_mask=True,
            pad_token_id=pad_id,
            pack=True,
        )
        place = placed(rank=rank, world_size=world_size)
        source = MemoryRows(self.data, rows, starts, weights, width=width, seed=seed, shuffle=shuffle)
        feeds = {split: RowFeed(split, source, config, place)}
        super().__init__(feeds, config, place, dataset=self.data, prefetch=False)
        self.split = split
        self._report = dict(report or {})

    def data_report(self) -> dict[str, Any]:
        """What packing cut and left out."""
        return dict(self._report)
