"""Rows become batches: what every source of rows has, which rows a step takes, and how they become tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.shift import IGNORE_INDEX
from chatmill.load.config import SamplingMode, TrainingConfig
from chatmill.load.order import Draws, EpochPlace, Recent, epoch_order, epoch_step, steps_per_epoch
from chatmill.load.packed_batch import PackedBatch, document_starts
from chatmill.load.placement import Placement
from chatmill.load.row_buffer import Laid, RowBuffer
from chatmill.pack.plan import Strategy

if TYPE_CHECKING:
    import torch

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


class Feed(ABC):
    """The batches of one split. A place is a hashable value; a step begins at one place and leads to the next."""

    def __init__(self, sources: Mapping[int, Rows], config: TrainingConfig, place: Placement) -> None:
        """Sources by the number that steps name, under the same options; `config` has those of this split."""
        self.sources, self.config, self.place = dict(sources), config, place
        self.share = place.share(config.batch_size)
        self.pin = place.pin
        self._buffer: RowBuffer | None = None

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Of the data that is read."""

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
            strategy = str(config.packing_strategy or Strategy.BEST_FIT)
            order |= {"packing_strategy": strategy, "block_size": config.block_size}
        return order

    @property
    def masks(self) -> bool:
        """Whether batches come with stored masks, or a policy's: when every source has them."""
        return self.config.wants_masks and all(source.has_masks for source in self.sources.values())

    def begin(self) -> Any:
        """The first place."""
        return EpochPlace()

    @abstractmethod
    def step_at(self, place: Any) -> RowStep:
        """The global step at a place, as this rank sees it."""

    def batch(self, step: RowStep) -> tuple[torch.Tensor, ...]:
        """`(x, y)`, `(x, y, mask)` or a `PackedBatch`, on the CPU; rows behind those of the step are padding."""
        if self._buffer is None:
            self._buffer = self._new_buffer()
        buffer = self._buffer
        buffer.clear()
        laid = [self.sources[g.source].lay(buffer, g.epoch, g.rows, g.slots) for g in step.groups]
        tensors = buffer.tensors(sum(len(group.rows) for group in step.groups))
        if not self.config.pack:
            return tensors
        sources = self.sources.values()
        if all(source.ignores_untrained for source in sources):
            tensors[1][tensors[2] == 0] = IGNORE_INDEX
        most = max(source.most_documents for source in sources)
        starts, tokens = document_starts(laid, buffer.batch_size, most, buffer.block_size)
        return PackedBatch.of((*tensors, starts), tokens)

    def _new_buffer(self) -> RowBuffer:
        config = self.config
        dtype: np.dtype[Any] | None = None
        if self.masks or config.pack:
            dtype = np.result_type(*(source.weight_dtype for source in self.sources.values()))
        pad_id = config.pad_token_id or 0
        return RowBuffer(config.batch_size, config.block_size, pad_id=pad_id, weights=dtype, pin=self.pin)

    def announce(self, step: RowStep) -> None:  # noqa: B027 - most steps begin nothing
        """Log what a delivered step begins (an epoch, say)."""

    def unpin(self) -> None:
        """From now on make batches in ordinary memory."""
        self.pin, self._buffer = False, None

    def __getstate__(self) -> dict[str, Any]:
        """Another process lays its own batches."""
        return self.__dict__ | {"_buffer": None}

    def place_to_json(self, place: Any) -> dict[str, Any]:
        """A place as plain numbers and names."""
        return asdict(place)

    def place_from_json(self, value: Mapping[str, Any]) -> Any:
        """The place that `place_to_json` described."""
        return EpochPlace(epoch=int(value["epoch"]), position=int(value["position"]))


class RowFeed(Feed):
    """The batches of one split of one source of rows: epoch by epoch, or drawn at random."""

    def __init__(self, split: str, rows: Rows, config: TrainingConfig, place: Placement) -> None:
        super().__init__({0: rows}, config, place)
        self.split, self.rows = split, rows
        self._draws: Draws | None = None
        if config.batch_sampling_mode is SamplingMode.RANDOM:
            self._draws = Draws(config.epoch_seed, rows.rows_of(0))

    @property
    def fingerprint(self) -> str:
        """Of the data that is read."""
        return self.rows.fingerprint

    @property
    def order(self) -> dict[str, Any]:
        """With another number of rows a position would mean other ones."""
        return super().order | self.rows.order_facts

    def step_at(self, place: EpochPlace) -> RowStep:
        """The global step at a place, as this rank sees it."""
        share, rows = self.share, self.rows
        begun: tuple[tuple[int, int], ...] = ()
        if self._draws is not None:
            chosen = self._draws.take(place.position + share.first, share.batch_size)
            after = EpochPlace(position=place.position + share.step)
        else:
            drop_last = self.config.epoch_drop_last
            place, real, after = epoch_step(place, rows.rows_of, share, drop_last=drop_last, what=rows.name)
            chosen = rows.select(place.epoch, place.position + share.first, real)
            begun = ((0, place.epoch),) if place.position == 0 else ()
        group = RowGroup(source=0, epoch=place.epoch, rows=chosen, slots=np.arange(len(chosen)))
        return RowStep(groups=(group,), begun=begun, after=after)

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
