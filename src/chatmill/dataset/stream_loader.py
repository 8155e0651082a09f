"""A loader over episodes that are made while it reads: groups of shards, each there when its turn comes.

The order depends on the seed alone: an epoch has its groups in an order of its own, and the rows of a group are mixed
(and packed) among themselves. A batch continues from one group to the next, so no row is padding or left out.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from chatmill.compiler.engines.local import LocalExecutor
from chatmill.dataset.chunk_work import ChunkWork, Receipt, open_split
from chatmill.errors import DataError
from chatmill.load.config import TrainingConfig
from chatmill.load.episode_rows import EpisodeRows, episode_rows
from chatmill.load.feed import Feed, RowGroup, RowStep
from chatmill.load.loader import BatchLoader
from chatmill.load.order import EpochPlace, epoch_order, take_rows
from chatmill.load.placement import Placement

if TYPE_CHECKING:
    import torch


class StreamFeed(Feed):
    """The batches of one split of a streamed dataset; the `epoch` of its places is the number of a group of chunks.

    The chunks of an epoch come in an order that the seed decides, some of them in each group. A thread has groups
    compiled, in a process of its own where `workers` is not 0, so that training does not wait.
    """

    def __init__(
        self,
        work: ChunkWork,
        split: str,
        config: TrainingConfig,
        place: Placement,
        *,
        group_chunks: int,
        workers: int,
        seen: Callable[[Sequence[int], Sequence[Receipt]], None],
    ) -> None:
        """`seen` is told what was compiled; not in other processes."""
        super().__init__({}, config, place)
        self.work, self.split, self.workers, self.group_chunks = work, split, workers, group_chunks
        self.groups = -(-len(work.chunks) // group_chunks)
        """Groups of an epoch."""
        self._seen: Callable[[Sequence[int], Sequence[Receipt]], None] | None = seen
        self._empty = 0
        self._begin_process()

    def _begin_process(self) -> None:
        """Threads and processes belong to one process: a copy in another one makes its own groups."""
        self.sources, self._buffer = {}, None
        self._made: dict[int, Future[tuple[Path, EpisodeRows | None]]] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._executor: LocalExecutor | None = None

    @property
    def fingerprint(self) -> str:
        """Of all that decides the episodes: that of the build."""
        return self.work.fingerprint

    @property
    def order(self) -> dict[str, Any]:
        """With other groups a position would mean other rows."""
        groups = {"chunks": len(self.work.chunks), "group_chunks": self.group_chunks, "split": self.split}
        return super().order | groups

    def step_at(self, place: EpochPlace) -> RowStep:
        """The global step at a place, as this rank sees it; the source of its rows is the number of a group."""
        share = self.share
        taken, after = take_rows(place, self._rows_of, share.step)
        groups, at = [], 0
        for number, first, count in taken:
            low, high = max(at, share.first), min(at + count, share.first + share.batch_size)
            if low < high:
                rows, epoch = self._opened(number), number // self.groups
                assert rows is not None
                chosen = rows.select(epoch, first + low - at, high - low)
                slots = np.arange(low, high) - share.first
                groups.append(RowGroup(source=number, epoch=epoch, rows=chosen, slots=slots))
            at += count
        return RowStep(groups=tuple(groups), after=after)

    def batch(self, step: RowStep) -> tuple[torch.Tensor, ...]:
        """The tensors of a step; groups that no later step reads are removed."""
        opened = {group.source: self._opened(group.source) for group in step.groups}
        if opened.keys() != self.sources.keys():
            self.sources = {number: rows for number, rows in opened.items() if rows is not None}
            self._buffer = None
        tensors = super().batch(step)
        for old in [group for group in self._made if group < step.after.epoch]:
            made = self._made.pop(old)
            made.cancel()
            made.add_done_callback(_remove)
        return tensors

    def _rows_of(self, group: int) -> int:
        rows = self._opened(group)
        self._empty = 0 if rows is not None else self._empty + 1
        if self._empty > self.groups:
            raise DataError("no record of the input gives an episode of this split: there is nothing to read")
        return 0 if rows is None else rows.rows_of(group // self.groups)

    def _opened(self, group: int) -> EpisodeRows | None:
        """The rows of a group as soon as it is compiled, None where it has none; the next one is begun."""
        begun = self._begun(group)
        self._begun(group + 1)
        return begun.result()[1]

    def _begun(self, group: int) -> Future[tuple[Path, EpisodeRows | None]]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="chatmill-compiles")
        if group not in self._made:
            self._made[group] = self._thread.submit(self._compile, group)
        return self._made[group]

    def _compile(self, group: int) -> tuple[Path, EpisodeRows | None]:
        if self._executor is None:
            self._executor = LocalExecutor(self.workers).__enter__()
        chunks, folder = self._chunks_of(group), self.work.new_folder()
        receipts = self.work.make(chunks, folder, self._executor)
        if self._seen is not None:
            self._seen(chunks, receipts)
        dataset = open_split(folder, self.split)
        return folder, None if dataset is None else episode_rows(dataset, self.config)

    def _chunks_of(self, group: int) -> list[int]:
        epoch, place = divmod(group, self.groups)
        seed, shuffle = self.config.epoch_seed, self.config.epoch_shuffle
        order = epoch_order(seed, epoch, len(self.work.chunks), shuffle=shuffle)
        numbers: list[int] = order[place * self.group_chunks : (place + 1) * self.group_chunks].tolist()
        return numbers

    def unpin(self) -> None:
        """A worker of torch's `DataLoader` makes its own groups, in ordinary memory, and reports nothing."""
        self.pin, self._seen = False, None
        self._begin_process()

    def place_to_json(self, place: EpochPlace) -> dict[str, Any]:
        """Epoch, group of the epoch, and row of the group."""
        epoch, group = divmod(place.epoch, self.groups)
        return {"epoch": epoch, "group": group, "position": place.position}

    def place_from_json(self, value: Mapping[str, Any]) -> EpochPlace:
        """The place that `place_to_json` described."""
        number = int(value["epoch"]) * self.groups + int(value["group"])
        return EpochPlace(epoch=number, position=int(value["position"]))

    def close(self) -> None:
        """End the thread and its process; groups that are there stay."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        if self._executor is not None:
            self._executor.__exit__()
        self._made = {group: made for group, made in self._made.items() if not made.cancelled()}
        self._thread = self._executor = None

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs."""
        begun = ("_made", "_thread", "_executor", "_buffer", "sources")
        return {name: value for name, value in self.__dict__.items() if name not in begun} | {"_seen": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_process()


def _remove(made: Future[tuple[Path, EpisodeRows | None]]) -> None:
    """Remove the folder of a group, if it came to be made."""
    if not made.cancelled() and made.exception() is None:
        shutil.rmtree(made.result()[0], ignore_errors=True)


class StreamLoader(BatchLoader):
    """Batches of episodes that are compiled while they are read; `get_batch`, iteration and state as of all loaders."""

    kind = "sft_stream"
    split_is_folder = False

    def epoch(self, split: str = "train") -> int:
        """The epoch that the next batch begins in."""
        feed = self._feed(split)
        assert isinstance(feed, StreamFeed)
        return int(self._places[split].epoch // feed.groups)

    def close(self) -> None:
        """End the threads and processes that make batches; the loader can still be used."""
        super().close()
        for feed in self._feeds.values():
            assert isinstance(feed, StreamFeed)
            feed.close()
