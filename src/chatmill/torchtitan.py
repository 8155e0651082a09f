"""Training on an export with torchtitan: `ChatmillDataLoader`, which its trainer builds from its config.

Importing this module imports torch and torchtitan; `chatmill` itself never does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from chatmill.errors import ConfigError
from chatmill.load.row_source import RowSource

try:
    from torchtitan.components.dataloader import ParallelAwareDataloader
except ImportError as error:
    raise ConfigError(f"chatmill.torchtitan needs torchtitan ({error}): pip install torchtitan") from error

__all__ = ["ChatmillDataLoader", "RowSource"]

Sample = tuple[dict[str, torch.Tensor], torch.Tensor]


class _PackedRows(IterableDataset[Sample]):
    """The rows of one rank, epoch after epoch, each in an order of its own; knows where it is."""

    def __init__(self, source: RowSource, rank: int, ranks: int, *, seed: int | None, infinite: bool) -> None:
        self._source, self._rank, self._ranks = source, rank, ranks
        self._seed, self._infinite = seed, infinite
        self._epoch = self._done = 0

    def _numbers(self) -> NDArray[np.int64]:
        numbers = np.arange(len(self._source))
        if self._seed is not None:
            numbers = np.random.default_rng([self._seed, self._epoch]).permutation(numbers)
        each = len(numbers) // self._ranks  # equal on all ranks: one that ran out would leave the others waiting
        return numbers[: each * self._ranks][self._rank :: self._ranks]

    def __iter__(self) -> Iterator[Sample]:
        while True:
            for number in self._numbers()[self._done :].tolist():
                self._done += 1
                yield self._source[number]
            self._epoch, self._done = self._epoch + 1, 0
            if not self._infinite:
                return

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "done": self._done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._done = state["epoch"], state["done"]


class ChatmillDataLoader(ParallelAwareDataloader):  # type: ignore[misc]
    """A data loader for torchtitan's trainer over the rows of an export; it resumes from torchtitan's checkpoints."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
        """`dataset_path` is a split of the export, such as OUT/train."""

        seed: int | None = 42
        """Seed of the order of rows, which differs in each epoch; None: as stored."""
        infinite: bool = True
        """Whether to start again after the last row."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = 1,
        **_: Any,
    ) -> None:
        """Take what torchtitan's trainer gives."""
        if not config.dataset_path:
            raise ConfigError("dataset_path is missing: give a split of the export, such as OUT/train")
        if config.num_workers > 1:
            raise ConfigError(f"num_workers is {config.num_workers}; rows are only read from disk: use 0 or 1")
        source = RowSource(config.dataset_path)
        if source.seq_len != seq_len:
            raise ConfigError(
                f"{source.folder} has rows of {source.seq_len:,} tokens, and training.seq_len is {seq_len:,}: set it "
                f"to {source.seq_len}, or export with --max-length {seq_len}"
            )
        if len(source) < dp_world_size:
            raise ConfigError(f"{source.folder} has {len(source):,} rows for {dp_world_size:,} ranks")
        super().__init__(
            _PackedRows(source, dp_rank, dp_world_size, seed=config.seed, infinite=config.infinite),
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            batch_size=local_batch_size,
            num_workers=config.num_workers,
            persistent_workers=config.persistent_workers,
            pin_memory=config.pin_memory,
            prefetch_factor=config.prefetch_factor,
            snapshot_every_n_steps=snapshot_every_n_steps,
        )
