"""Rows become batches: what every source of rows has, which rows a step takes, and how they become tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.shift import IGNORE_INDEX
from chatmill.errors import ConfigError
from chatmill.load.config import SamplingMode, TrainingConfig
from chatmill.load.order import Draws, EpochPlace, Recent, epoch_order, epoch_step, steps_per_epoch
from chatmill.load.packed_batch import PackedBatch, document_starts
from chatmill.load.placement import Placement
from chatmill.load.row_buffer import Laid, RowBuffer

if TYPE_CHECKING:
    import torch

Ints = NDArray[np.int64]


class Rows(ABC):
    """The rows of one split: how many an epoch has, their order, and how they are laid into a batch."""

    has_masks: bool
    """Whether the rows say what is trained; else every token is."""
    most_documents: int = 1
    """No row of any epoch holds more documents than this."""
    has_trees: bool = False
    """Whether documents may be trees, so that batches say what each token sees."""
    ignores_untrained: bool = False
    """Whether targets that are not trained are `IGNORE_INDEX` in packed batches."""

    def __init__(self, name: str, *, width: int, seed: int, shuffle: bool) -> None:
        """`name` is what errors call the rows; `width` is block_size + 1."""
        self.name, self.width, self.seed, self.shuffle = name, width, seed, shuffle
        self._orders: Recent[Ints] = Recent(self._order)

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Of the data that is read."""

    @property
    @abstractmethod
    def weight_dtype(self) -> np.dtype[Any]:
        """The type in which weights are laid."""

    @property
    def order_facts(self) -> dict[str, Any]:
        """What gives a position its meaning, beside the options and the fingerprint."""
        return {}

    @abstractmethod
    def rows_of(self, epoch: int) -> int:
        """Rows of an epoch."""

    def select(self, epoch: int, first: int, count: int) -> Ints:
        """Rows `first` up to `first + count - 1` in the order of an epoch."""
        return self._orders.get(epoch)[first : first + count]

    def _order(self, epoch: int) -> Ints:
        return epoch_order(self.seed, epoch, self.rows_of(epoch), shuffle=self.shuffle)

    @abstractmethod
    def lay(self, buffer: RowBuffer, epoch: int, rows: Ints, slots: Ints) -> Laid:
        """Lay rows into the given slots of a buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStep:
    """This rank's rows of one global step; the batch's other rows are padding."""

    epoch: int
    rows: Ints
    begins: bool
    """Whether an epoch begins with this global step."""
    after: EpochPlace
    """Where the next global step begins."""


class Feed:
    """The batches of one split: epoch by epoch, or drawn at random. A step leads from one place to the next."""

    def __init__(self, split: str, rows: Rows, config: TrainingConfig, place: Placement) -> None:
        """`config` has the options of this split."""
        self.split, self.rows, self.config, self.place = split, rows, config, place
        self.share = place.share(config.batch_size)
        self.pin = place.pin
        self._buffer: RowBuffer | None = None
        self._draws: Draws | None = None
        if config.batch_sampling_mode is SamplingMode.RANDOM:
            self._draws = Draws(config.epoch_seed, rows.rows_of(0))
        if rows.has_trees and not config.pack:
            raise ConfigError(
                f"{rows.name}: its episodes are trees, and batches without boundaries would read their branches as one "
                "text: read them packed (pack=True; packed=True in to_torch), or build with expand: turns"
            )

    @property
    def order(self) -> dict[str, Any]:
        """The options that give a place its meaning: a state is refused when one of them differs."""
        config = self.config
        order: dict[str, Any] = {
            "batch_sampling_mode": str(config.batch_sampling_mode),
            "epoch_seed": config.epoch_seed,
        }
        if config.batch_sampling_mode is SamplingMode.EPOCH or config.pack:
            order["epoch_shuffle"] = config.epoch_shuffle
        if config.pack:
            order["block_size"] = config.block_size
        return order | self.rows.order_facts

    @property
    def is_endless(self) -> bool:
        """Whether rows are drawn at random."""
        return self._draws is not None

    @property
    def masks(self) -> bool:
        """Whether batches come with stored masks, or a policy's."""
        return self.config.wants_masks and self.rows.has_masks

    def step_at(self, place: EpochPlace) -> RowStep:
        """The global step at a place, as this rank sees it."""
        share, rows = self.share, self.rows
        if self._draws is not None:
            chosen = self._draws.take(place.position + share.first, share.batch_size)
            after = EpochPlace(position=place.position + share.step)
            return RowStep(epoch=0, rows=chosen, begins=False, after=after)
        drop_last = self.config.epoch_drop_last
        place, real, after = epoch_step(place, rows.rows_of, share, drop_last=drop_last, what=rows.name)
        chosen = rows.select(place.epoch, place.position + share.first, real)
        return RowStep(epoch=place.epoch, rows=chosen, begins=place.position == 0, after=after)

    def batch(self, step: RowStep) -> tuple[torch.Tensor, ...]:
        """`(x, y)`, `(x, y, mask)` or a `PackedBatch`, on the CPU; rows behind those of the step are padding."""
        if self._buffer is None:
            self._buffer = self._new_buffer()
        buffer = self._buffer
        buffer.clear()
        laid = self.rows.lay(buffer, step.epoch, step.rows, np.arange(len(step.rows)))
        tensors = buffer.tensors(len(step.rows))
        if not self.config.pack:
            return tensors
        if self.rows.ignores_untrained:
            tensors[1][tensors[2] == 0] = IGNORE_INDEX
        starts, tokens = document_starts([laid], buffer.batch_size, self.rows.most_documents, buffer.block_size)
        return PackedBatch.of((*tensors, starts), tokens, buffer.tree_grid(tokens))

    def _new_buffer(self) -> RowBuffer:
        config = self.config
        dtype = self.rows.weight_dtype if self.masks or config.pack else None
        pad_id = config.pad_token_id or 0
        trees = self.rows.has_trees
        return RowBuffer(config.batch_size, config.block_size, pad_id=pad_id, weights=dtype, pin=self.pin, trees=trees)

    def unpin(self) -> None:
        """From now on make batches in ordinary memory."""
        self.pin, self._buffer = False, None

    def __getstate__(self) -> dict[str, Any]:
        """Another process lays its own batches."""
        return self.__dict__ | {"_buffer": None}

    def place_of(self, number: int) -> EpochPlace:
        """Where the global step with this number begins, counted from the first of epoch 0."""
        if self._draws is not None:
            return EpochPlace(position=number * self.share.step)
        epoch = 0
        while (steps := self.steps_per_epoch(epoch)) and number >= steps:
            number, epoch = number - steps, epoch + 1
        return EpochPlace(epoch=epoch, position=number * self.share.step)

    def steps_per_epoch(self, epoch: int) -> int:
        """Global steps in an epoch."""
        return steps_per_epoch(self.rows.rows_of(epoch), self.share, drop_last=self.config.epoch_drop_last)

    def steps_left(self, place: EpochPlace, epochs: int) -> int:
        """Global steps from a place to the end of epoch `epochs - 1`."""
        if place.epoch >= epochs:
            return 0
        left = max(0, self.rows.rows_of(place.epoch) - place.position)
        here = steps_per_epoch(left, self.share, drop_last=self.config.epoch_drop_last)
        return here + sum(self.steps_per_epoch(epoch) for epoch in range(place.epoch + 1, epochs))
