"""The batches of one split of episodes: which rows a step takes, and how they become tensors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.label.policy import Policy
from chatmill.load.config import SamplingMode
from chatmill.load.loader import SplitFeed
from chatmill.load.long_episodes import LongEpisodes
from chatmill.load.order import Draws, EpochPlace, RankShare, epoch_step, steps_per_epoch
from chatmill.load.packed_batch import PackedBatch, document_starts
from chatmill.load.rows import EpisodeRows, PackedEpisodeRows, Planning, Weights, packed_rows
from chatmill.load.stage import Stage
from chatmill.pack.plan import Strategy
from chatmill.store.episodes import EpisodeDataset

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOptions:
    """What an episode loader was asked to do, with every default filled in."""

    share: RankShare
    block_size: int
    sampling: SamplingMode
    shuffle: bool
    drop_last: bool
    seed: int
    pad_id: int
    min_tokens: int
    use_mask: bool
    policy: Policy | None
    pack: bool
    """Several episodes per row."""
    strategy: Strategy | None
    """How rows are packed; None: as the plan beside the episodes, else best_fit."""
    planning: Planning
    overflow: LongEpisodes
    """What becomes of an episode that is longer than a row."""
    pin: bool
    """Batches in pinned memory, for copies to a GPU."""

    def rows(self, dataset: EpisodeDataset, *, check: bool = False) -> EpisodeRows:
        """The rows of a split under these options; `check` compares a plan with its hashes."""
        options: dict[str, Any] = {
            "width": self.block_size + 1,
            "min_tokens": self.min_tokens,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "use_mask": self.use_mask,
            "policy": self.policy,
            "overflow": self.overflow,
        }
        if not self.pack:
            return EpisodeRows(dataset, **options)
        return packed_rows(dataset, strategy=self.strategy, planning=self.planning, check=check, **options)

    def order(self) -> dict[str, Any]:
        """The options that give a position its meaning."""
        order: dict[str, Any] = {"batch_sampling_mode": str(self.sampling), "epoch_seed": self.seed}
        if self.sampling is SamplingMode.EPOCH or self.pack:
            order["epoch_shuffle"] = self.shuffle
        if self.pack:
            order |= {"packing_strategy": str(self.strategy or Strategy.BEST_FIT), "block_size": self.block_size}
        return order


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """Rows of one source and epoch that go into the given slots of a batch."""

    source: int
    epoch: int
    rows: Ints
    slots: Ints


class RowBatcher:
    """Lays rows of one or several sources into one stage and gives the tensors."""

    def __init__(self, sources: Sequence[EpisodeRows], options: EpisodeOptions) -> None:
        """All sources follow the same options; masks are given when every source has them."""
        self.sources = list(sources)
        self.masks = options.use_mask and all(s.weights is not Weights.ONES for s in sources)
        self._packed = options.pack
        dtype: np.dtype[Any] | None = None
        if self.masks or self._packed:
            dtype = np.result_type(*(s.weight_dtype for s in sources))
        self.stage = Stage(
            options.share.batch_size, options.block_size, pad_id=options.pad_id, weights=dtype, pin=options.pin
        )
        self._most = max((s.most_documents for s in sources if isinstance(s, PackedEpisodeRows)), default=1)

    def batch(self, groups: Sequence[RowGroup], real: int) -> tuple[torch.Tensor, ...]:
        """`(x, y)`, `(x, y, mask)` or a `PackedBatch`; rows from `real` on are padding."""
        stage = self.stage
        stage.clear()
        laid = [self.sources[g.source].lay(stage, g.epoch, g.rows, g.slots) for g in groups]
        tensors = stage.tensors(real)
        if not self._packed:
            return tensors
        starts, tokens = document_starts(laid, stage.batch_size, self._most, stage.block_size)
        return PackedBatch.of((*tensors, starts), tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStep:
    """This rank's rows of one global step; the batch's other rows are padding."""

    epoch: int
    rows: Ints
    starts_epoch: bool
    after: EpochPlace


class EpisodeFeed(SplitFeed):
    """The batches of one split of one dataset."""

    def __init__(self, split: str, rows: EpisodeRows, options: EpisodeOptions) -> None:
        """`rows` as `options.rows` gave them."""
        self.split, self.rows, self.options = split, rows, options
        self._batcher = RowBatcher([rows], options)
        self.masks = self._batcher.masks
        """Whether batches come with stored masks, or a policy's."""
        self._draws: Draws | None = None
        if options.sampling is SamplingMode.RANDOM:
            self._draws = Draws(options.seed, rows.rows_of(0))

    @property
    def fingerprint(self) -> str:
        """Of the dataset's files."""
        return self.rows.dataset.fingerprint

    @property
    def order(self) -> dict[str, Any]:
        """What gives a position its meaning."""
        return self.options.order() | self.rows.order_facts

    def step_at(self, place: EpochPlace) -> EpisodeStep:
        """The global step at a place, as this rank sees it."""
        share = self.options.share
        if self._draws is not None:
            rows = self._draws.take(place.position + share.first, share.batch_size)
            after = EpochPlace(position=place.position + share.step)
            return EpisodeStep(epoch=0, rows=rows, starts_epoch=False, after=after)
        folder, drop_last = str(self.rows.dataset.folder), self.options.drop_last
        step = epoch_step(place, self.rows.rows_of, share, drop_last=drop_last, what=folder)
        return EpisodeStep(
            epoch=step.epoch,
            rows=self.rows.select(step.epoch, step.first, step.real),
            starts_epoch=step.starts_epoch,
            after=step.after,
        )

    def batch(self, step: EpisodeStep) -> tuple[torch.Tensor, ...]:
        """The tensors of a step."""
        real = len(step.rows)
        group = RowGroup(source=0, epoch=step.epoch, rows=step.rows, slots=np.arange(real))
        return self._batcher.batch([group], real)

    def episodes_of(self, step: EpisodeStep) -> list[list[int]]:
        """The numbers of the episodes in each row of a step, in the order in which they are in the row."""
        return [self.rows.documents(step.epoch, row).tolist() for row in step.rows.tolist()]

    def place_of(self, number: int) -> EpochPlace:
        """Where the global step with this number begins, counted from the first of epoch 0."""
        if self._draws is not None:
            return EpochPlace(position=number * self.options.share.step)
        epoch = 0
        while (steps := self.steps_per_epoch(epoch)) and number >= steps:
            number, epoch = number - steps, epoch + 1
        return EpochPlace(epoch=epoch, position=number * self.options.share.step)

    def unpin(self) -> None:
        """From now on make batches in ordinary memory."""
        self._batcher.stage.pin = False

    def steps_per_epoch(self, epoch: int) -> int:
        """Global steps in an epoch."""
        rows, options = self.rows.rows_of(epoch), self.options
        return steps_per_epoch(rows, options.share, drop_last=options.drop_last)

    def steps_left(self, place: EpochPlace, epochs: int) -> int:
        """Global steps from a place to the end of epoch `epochs - 1`."""
        if place.epoch >= epochs:
            return 0
        options = self.options
        left = max(0, self.rows.rows_of(place.epoch) - place.position)
        here = steps_per_epoch(left, options.share, drop_last=options.drop_last)
        return here + sum(self.steps_per_epoch(epoch) for epoch in range(place.epoch + 1, epochs))

    def announce(self, step: EpisodeStep) -> None:
        """One line at each epoch's start."""
        if not step.starts_epoch:
            return
        options = self.options
        log.info(
            "[EpisodeLoader] split=%s epoch=%d episodes=%d batches=%d shuffle=%s drop_last=%s pad_id=%d mask=%s%s",
            self.split,
            step.epoch,
            self.rows.episodes,
            self.steps_per_epoch(step.epoch),
            flag(options.shuffle),
            flag(options.drop_last),
            options.pad_id,
            flag(self.masks),
            "" if not options.pack else f" packed_rows={self.rows.rows_of(step.epoch)}",
        )


def flag(value: bool) -> str:
    """`true` or `false`, as the log lines have it."""
    return "true" if value else "false"
