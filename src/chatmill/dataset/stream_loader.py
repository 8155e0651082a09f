"""A loader over episodes that are made while it reads: groups of shards, each there when its turn comes.

The order depends on the seed alone: an epoch has its groups in an order of its own, and the rows of a group are mixed
(and packed) among themselves. A batch continues from one group to the next, so no row is padding or left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from chatmill.dataset.chunk_groups import ChunkGroups
from chatmill.errors import DataError
from chatmill.load.config import TrainingConfig
from chatmill.load.feed import RowBatcher, RowGroup, RowStep, order_options
from chatmill.load.loader import BatchLoader, SplitFeed
from chatmill.load.order import EpochPlace, take_rows
from chatmill.load.placement import Placement
from chatmill.load.rows import EpisodeRows, episode_rows

if TYPE_CHECKING:
    import torch

OPEN_GROUPS = 3
"""Groups that are there at a time: the one that is read, and its neighbours at the border of a batch."""


class StreamFeed(SplitFeed):
    """The batches of one split of a streamed dataset; the `epoch` of its places is the number of a group."""

    def __init__(self, groups: ChunkGroups, config: TrainingConfig, place: Placement) -> None:
        self.groups, self.config, self._pin = groups, config, place.pin
        self._share = place.share(config.batch_size)
        self._rows: dict[int, EpisodeRows | None] = {}
        self._batcher: RowBatcher | None = None
        self._empty = 0

    @property
    def fingerprint(self) -> str:
        """Of all that decides the episodes."""
        return self.groups.fingerprint

    @property
    def order(self) -> dict[str, Any]:
        """What gives a position its meaning."""
        return order_options(self.config) | self.groups.order

    def step_at(self, place: EpochPlace) -> RowStep:
        """The global step at a place, as this rank sees it; the source of its rows is the number of a group."""
        share = self._share
        taken, after = take_rows(place, self._rows_of, share.step)
        groups, at = [], 0
        for number, first, count in taken:
            low, high = max(at, share.first), min(at + count, share.first + share.batch_size)
            if low < high:
                rows, epoch = self._opened(number), number // self.groups.count
                assert rows is not None
                chosen = rows.select(epoch, first + low - at, high - low)
                slots = np.arange(low, high) - share.first
                groups.append(RowGroup(source=number, epoch=epoch, rows=chosen, slots=slots))
            at += count
        return RowStep(groups=tuple(groups), after=after)

    def _rows_of(self, group: int) -> int:
        rows = self._opened(group)
        self._empty = 0 if rows is not None else self._empty + 1
        if self._empty > self.groups.count:
            raise DataError("no record of the input gives an episode of this split: there is nothing to read")
        return 0 if rows is None else rows.rows_of(group // self.groups.count)

    def _opened(self, group: int) -> EpisodeRows | None:
        if group not in self._rows:
            dataset = self.groups.open(group)
            self._rows[group] = None if dataset is None else episode_rows(dataset, self.config)
            self.groups.prepare(group + 1)
            for old in sorted(self._rows, key=lambda one: abs(one - group))[OPEN_GROUPS:]:
                del self._rows[old]
                self._batcher = None
                self.groups.drop(old)
        return self._rows[group]

    def batch(self, step: RowStep) -> tuple[torch.Tensor, ...]:
        """The tensors of a step."""
        opened = {group.source: self._opened(group.source) for group in step.groups}
        if self._batcher is None or self._batcher.sources.keys() != opened.keys():
            sources = {number: rows for number, rows in opened.items() if rows is not None}
            self._batcher = RowBatcher(sources, self.config, pin=self._pin)
        return self._batcher.batch(step.groups)

    def unpin(self) -> None:
        """A worker of torch's `DataLoader` makes its own groups, in ordinary memory."""
        self._pin, self._rows, self._batcher = False, {}, None
        self.groups.restart()

    def place_to_json(self, place: EpochPlace) -> dict[str, Any]:
        """Epoch, group of the epoch, and row of the group."""
        epoch, group = divmod(place.epoch, self.groups.count)
        return {"epoch": epoch, "group": group, "position": place.position}

    def place_from_json(self, value: Mapping[str, Any]) -> EpochPlace:
        """The place that `place_to_json` described."""
        number = int(value["epoch"]) * self.groups.count + int(value["group"])
        return EpochPlace(epoch=number, position=int(value["position"]))

    def __getstate__(self) -> dict[str, Any]:
        """Another process opens its own groups."""
        return self.__dict__ | {"_rows": {}, "_batcher": None, "_empty": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class StreamLoader(BatchLoader):
    """Batches of episodes that are compiled while they are read; `get_batch`, iteration and state as of all loaders."""

    kind = "sft_stream"
    split_is_folder = False

    def epoch(self, split: str = "train") -> int:
        """The epoch that the next batch begins in."""
        feed = self._feed(split)
        assert isinstance(feed, StreamFeed)
        return int(self._places[split].epoch // feed.groups.count)

    def close(self) -> None:
        """End the threads and processes that make batches; the loader can still be used."""
        super().close()
        for feed in self._feeds.values():
            assert isinstance(feed, StreamFeed)
            feed.groups.close()
