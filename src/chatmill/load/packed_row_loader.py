"""Batches of rows that are packed already (spec 3): each once per epoch, documents kept apart."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.shift import IGNORE_INDEX, model_inputs, next_token
from chatmill.errors import ConfigError, DataError, need
from chatmill.load.distributed import rank_and_world
from chatmill.load.order import EpochPlace, RankShare, epoch_order, epoch_step, steps_per_epoch
from chatmill.load.packed_batch import PackedBatch

STATE_VERSION = 1


class PackedRowLoader:
    """`PackedBatch`es of rows in memory: every token but the first of a document is a target.

    Epoch e has the order `RandomState(seed + e).permutation(rows)` (with `shuffle`). The last batch of an epoch is
    filled up with empty rows. The state is the global position, as of the other loaders.
    """

    ends = False
    """Whether there is one pass, after which `get_batch` raises `StopIteration`."""
    data = "packed rows"
    """What errors call the rows."""

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
        need("torch", "batches of tensors")
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}; it must be 1 or more")
        if not len(input_ids):
            raise DataError("there are no packed rows: were all texts left out (min_len, max_len)?")
        self.batch_size, self.pad_id, self.shuffle, self.seed, self.split = batch_size, pad_id, shuffle, seed, split
        self.rank, self.world_size = rank_and_world(rank, world_size)
        self._share = RankShare(batch_size=batch_size, rank=self.rank, world_size=self.world_size)
        self._rows = [np.asarray(row, dtype=np.int64) for row in input_ids]
        self._starts = [np.asarray(starts, dtype=np.int64) for starts in document_starts]
        self._weights = weights
        lengths = np.array([len(row) for row in self._rows], dtype=np.int64)
        self._width = int(lengths.max()) if width is None else width
        if self._width < 2:
            raise DataError("no packed row has 2 tokens: there is nothing to predict")
        self._most = max(len(starts) for starts in self._starts)
        self._place = EpochPlace()
        self._report = dict(report or {})
        digest = hashlib.sha256(lengths.tobytes())
        for column in (self._rows, self._starts, weights or ()):
            for row in column:
                digest.update(np.ascontiguousarray(row).data)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        """Batches of each rank in an epoch."""
        return self.steps_per_epoch()

    def steps_per_epoch(self, split: str = "train", epoch: int = 0) -> int:
        """Batches of each rank in an epoch; all epochs have as many."""
        return steps_per_epoch(len(self._rows), self._share, drop_last=False)

    def next_epoch(self, split: str = "train") -> int:
        """The epoch of the batch that comes next."""
        return self._place.epoch + int(self._place.position >= len(self._rows))

    def batches_left(self, split: str = "train", epochs: int = 1) -> int:
        """Batches of this rank from here to the end of the epoch with number `epochs - 1`."""
        if self._place.epoch >= epochs:
            return 0
        left = max(0, len(self._rows) - self._place.position)
        here = steps_per_epoch(left, self._share, drop_last=False)
        return here + (epochs - 1 - self._place.epoch) * self.steps_per_epoch()

    def data_report(self) -> dict[str, Any]:
        """What packing cut and left out."""
        return dict(self._report)

    def get_batch(self, split: str = "train") -> PackedBatch:
        """This rank's rows of the next global step."""
        if split != self.split:
            raise ConfigError(f"these {self.data} are the split {self.split!r}; there is no {split!r}")
        rows = len(self._rows)
        if self.ends and self._place.position >= rows:
            raise StopIteration
        step = epoch_step(self._place, lambda epoch: rows, self._share, drop_last=False, what=self.data)
        order = epoch_order(self.seed, step.epoch, rows, shuffle=self.shuffle)
        self._place = step.after
        return self._batch(order[step.first : step.first + step.real])

    def _batch(self, rows: NDArray[np.int64]) -> PackedBatch:
        import torch

        ids = np.full((self.batch_size, self._width), self.pad_id, dtype=np.int64)
        trained = np.zeros((self.batch_size, self._width), dtype=np.float32)
        starts = np.full((self.batch_size, self._most), -1, dtype=np.int64)
        starts[:, 0] = 0
        tokens = np.zeros(self.batch_size, dtype=np.int64)
        for slot, row in enumerate(rows.tolist()):
            count = len(self._rows[row])
            ids[slot, :count] = self._rows[row]
            trained[slot, :count] = 1 if self._weights is None else self._weights[row]
            trained[slot, self._starts[row]] = 0  # the token before belongs to another document
            inside = self._starts[row][self._starts[row] < self._width - 1]
            starts[slot, : len(inside)] = inside
            tokens[slot] = min(count, self._width - 1)
        mask = next_token(trained)
        targets = np.where(mask != 0, next_token(ids), IGNORE_INDEX)
        arrays = (model_inputs(ids), targets, mask, starts)
        return PackedBatch.of(tuple(torch.from_numpy(np.ascontiguousarray(one)) for one in arrays), tokens)

    def state_dict(self) -> dict[str, Any]:
        """Epoch, and rows of it that were given over all ranks."""
        return {
            "version": STATE_VERSION,
            "fingerprint": self.fingerprint,
            "order": {"shuffle": self.shuffle, "seed": self.seed},
            "epoch": self._place.epoch,
            "position": self._place.position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on, with any number of ranks; other rows or another order are refused."""
        own = self.state_dict()
        for name in ("version", "fingerprint", "order"):
            if state.get(name) != own[name]:
                raise ConfigError(
                    f"the state belongs to other {self.data}: its {name} is {state.get(name)!r}, not {own[name]!r}"
                )
        self._place = EpochPlace(epoch=int(state["epoch"]), position=int(state["position"]))
