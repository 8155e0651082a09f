"""Rows become batches: what every source of rows has, which rows a step takes, and how they become tensors."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.shift import IGNORE_INDEX
from chatmill.load.config import SamplingMode, TrainingConfig
from chatmill.load.loader import BatchLoader, SplitFeed
from chatmill.load.order import Draws, EpochPlace, Recent, epoch_order, epoch_step, steps_per_epoch
from chatmill.load.packed_batch import PackedBatch, document_starts
from chatmill.load.placement import Placement
from chatmill.load.stage import Laid, Stage
from chatmill.pack.plan import Strategy

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
Ints = NDArray[np.int64]


class Rows(ABC):
    """The rows of one split: how many an epoch has, their order, and how they are laid into a batch."""

    has_masks: bool
    """Whether the rows say what is trained; else every token is."""
    most_documents: int = 1
    """No row of any epoch holds more documents than this."""
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
    def order_facts(self) -> dict[str, Any]:
        """What gives a position its meaning, beside the options."""

    @property
    @abstractmethod
    def weight_dtype(self) -> np.dtype[Any]:
        """The type in which weights are laid."""

    @abstractmethod
    def rows_of(self, epoch: int) -> int:
        """Rows of an epoch."""

    def select(self, epoch: int, first: int, count: int) -> Ints:
        """Rows `first` up to `first + count - 1` in the order of an epoch."""
        return self._orders.get(epoch)[first : first + count]

    def _order(self, epoch: int) -> Ints:
        return epoch_order(self.seed, epoch, self.rows_of(epoch), shuffle=self.shuffle)

    @abstractmethod
    def lay(self, stage: Stage, epoch: int, rows: Ints, slots: Ints) -> Laid:
        """Lay rows into the given slots of a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """Rows of one source and epoch that go into the given slots of a batch."""

    source: int
    epoch: int
    rows: Ints
    slots: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStep:
    """This rank's rows of one global step; the batch's other rows are padding."""

    groups: tuple[RowGroup, ...]
    begun: tuple[tuple[int, int], ...] = ()
    """(source, epoch) of every epoch that begins in this global step."""
    after: Any
    """Where the next global step begins."""


class RowBatcher:
    """Lays rows of one or several sources into one stage and gives the tensors."""

    def __init__(self, sources: Mapping[int, Rows], config: TrainingConfig, *, pin: bool) -> None:
        """Sources by the number that groups name, under the same options; masks are given when every one has them."""
        self.sources = dict(sources)
        rows = sources.values()
        self.masks = config.wants_masks and all(source.has_masks for source in rows)
        self._packed = config.pack
        dtype: np.dtype[Any] | None = None
        if self.masks or self._packed:
            dtype = np.result_type(*(source.weight_dtype for source in rows))
        pad_id = config.pad_token_id or 0
        self.stage = Stage(config.batch_size, config.block_size, pad_id=pad_id, weights=dtype, pin=pin)
        self._most = max(source.most_documents for source in rows)
        self._ignores = all(source.ignores_untrained for source in rows)

    def batch(self, groups: Sequence[RowGroup]) -> tuple[torch.Tensor, ...]:
        """`(x, y)`, `(x, y, mask)` or a `PackedBatch`; rows behind those of the groups are padding."""
        stage = self.stage
        stage.clear()
        laid = [self.sources[g.source].lay(stage, g.epoch, g.rows, g.slots) for g in groups]
        tensors = stage.tensors(sum(len(group.rows) for group in groups))
        if not self._packed:
            return tensors
        if self._ignores:
            tensors[1][tensors[2] == 0] = IGNORE_INDEX
        starts, tokens = document_starts(laid, stage.batch_size, self._most, stage.block_size)
        return PackedBatch.of((*tensors, starts), tokens)


def order_options(config: TrainingConfig) -> dict[str, Any]:
    """The options that give a position its meaning."""
    order: dict[str, Any] = {"batch_sampling_mode": str(config.batch_sampling_mode), "epoch_seed": config.epoch_seed}
    if config.batch_sampling_mode is SamplingMode.EPOCH or config.pack:
        order["epoch_shuffle"] = config.epoch_shuffle
    if config.pack:
        strategy = str(config.packing_strategy or Strategy.BEST_FIT)
        order |= {"packing_strategy": strategy, "block_size": config.block_size}
    return order


class RowFeed(SplitFeed):
    """The batches of one split of one source of rows: epoch by epoch, or drawn at random."""

    def __init__(self, split: str, rows: Rows, config: TrainingConfig, place: Placement) -> None:
        """`config` has the options of this split."""
        self.split, self.rows, self.config, self.place = split, rows, config, place
        self.share = place.share(config.batch_size)
        self._batcher = RowBatcher({0: rows}, config, pin=place.pin)
        self.masks = self._batcher.masks
        """Whether batches come with stored masks, or a policy's."""
        self._draws: Draws | None = None
        if config.batch_sampling_mode is SamplingMode.RANDOM:
            self._draws = Draws(config.epoch_seed, rows.rows_of(0))

    @property
    def fingerprint(self) -> str:
        """Of the data that is read."""
        return self.rows.fingerprint

    @property
    def order(self) -> dict[str, Any]:
        """What gives a position its meaning."""
        return order_options(self.config) | self.rows.order_facts

    def step_at(self, place: EpochPlace) -> RowStep:
        """The global step at a place, as this rank sees it."""
        share = self.share
        if self._draws is not None:
            rows = self._draws.take(place.position + share.first, share.batch_size)
            return self._step(0, rows, EpochPlace(position=place.position + share.step))
        drop_last, name = self.config.epoch_drop_last, self.rows.name
        step = epoch_step(place, self.rows.rows_of, share, drop_last=drop_last, what=name)
        begun = ((0, step.epoch),) if step.starts_epoch else ()
        return self._step(step.epoch, self.rows.select(step.epoch, step.first, step.real), step.after, begun)

    def _step(self, epoch: int, rows: Ints, after: EpochPlace, begun: tuple[tuple[int, int], ...] = ()) -> RowStep:
        group = RowGroup(source=0, epoch=epoch, rows=rows, slots=np.arange(len(rows)))
        return RowStep(groups=(group,), begun=begun, after=after)

    def batch(self, step: RowStep) -> tuple[torch.Tensor, ...]:
        """The tensors of a step."""
        return self._batcher.batch(step.groups)

    def unpin(self) -> None:
        """From now on make batches in ordinary memory."""
        self._batcher.stage.pin = False

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


class EpochLoader(BatchLoader):
    """A loader that knows how long its epochs are."""

    ends = False
    """Whether there is one pass, after which `get_batch` raises `StopIteration`."""

    def _row_feed(self, split: str) -> RowFeed:
        """The feed of a split."""
        feed = self._feed(split)
        assert isinstance(feed, RowFeed)
        return feed

    def is_endless(self, split: str = "train") -> bool:
        """Whether the rows of a split are drawn at random, without end."""
        return self._row_feed(split).config.batch_sampling_mode is SamplingMode.RANDOM

    def epoch(self, split: str = "train") -> int:
        """The epoch of the last delivered batch; 0 before the first, and in random mode."""
        self._feed(split)
        return int(self._places[split].epoch)

    def next_epoch(self, split: str = "train") -> int:
        """The epoch of the batch that comes next: `epoch`, or the one after it where that is used up."""
        epoch = self.epoch(split)
        return epoch if self.batches_left(split, epoch + 1) else epoch + 1

    def steps_per_epoch(self, split: str = "train", epoch: int = 0) -> int:
        """How many batches an epoch has; packed, that may differ from epoch to epoch."""
        return self._row_feed(split).steps_per_epoch(epoch)

    def batches_left(self, split: str = "train", epochs: int = 1) -> int:
        """Batches of this rank from here to the end of the epoch with number `epochs - 1`; not for random mode."""
        return self._row_feed(split).steps_left(self._places[split], epochs)

    def __len__(self) -> int:
        """Batches of this rank in the epoch that comes next, of the first split."""
        first = next(iter(self._feeds))
        if self.is_endless(first):
            raise TypeError("batch_sampling_mode is random: the batches never end, so the loader has no length")
        return self.steps_per_epoch(first, self.next_epoch(first))

    def __bool__(self) -> bool:
        """Always true, whatever the length."""
        return True
