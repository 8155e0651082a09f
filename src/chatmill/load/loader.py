"""What all loaders share: batches by split, the state that a run resumes from, prefetching, and iteration."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chatmill.errors import ConfigError, need
from chatmill.load.config import TrainingConfig
from chatmill.load.feed import Feed, RowStep
from chatmill.load.order import EpochPlace
from chatmill.load.packed_batch import PackedBatch
from chatmill.load.placement import Placement

if TYPE_CHECKING:
    import torch

STATE_VERSION = 1


class BatchLoader:
    """`get_batch`, `state_dict`, `load_state_dict` over the feeds of the splits; also an iterable dataset of torch.

    The state describes what was delivered, never what was prepared ahead.
    """

    kind: str
    """The name of this kind of loader in a state."""
    split_is_folder = True
    """Whether a split that is missing can be put beside the others, as a folder."""
    keeps: Any = None
    """What must live as long as the loader: the folder of a dataset that was never saved."""
    _pool: ThreadPoolExecutor | None
    _ahead: dict[str, tuple[EpochPlace, Future[tuple[RowStep, tuple[torch.Tensor, ...]]]]]
    """By split, a place and the step that is prepared there; it counts for nothing until it is delivered."""

    def __init__(
        self,
        feeds: Mapping[str, Feed],
        config: TrainingConfig,
        place: Placement,
        *,
        dataset: str,
        prefetch: bool = True,
    ) -> None:
        """`dataset` names the data in errors."""
        need("torch", "batches of tensors")
        self.config = config
        self.batch_size, self.block_size, self.pad_token_id = config.batch_size, config.block_size, config.pad_token_id
        self.rank, self.world_size, self.device = place.rank, place.world_size, place.device
        self._feeds = dict(feeds)
        self._dataset = dataset
        self._places = {split: EpochPlace() for split in self._feeds}
        self._last: dict[str, RowStep] = {}
        """The step that was delivered last, by split."""
        self._prefetch = prefetch
        self._worker: tuple[int, int] | None = None
        self._begin_process()
        _register_as_iterable(type(self))

    def get_batch(self, split: str = "train") -> tuple[torch.Tensor, ...]:
        """The next batch of a split: this rank's rows of the next global step."""
        feed = self._feed(split)
        place = self._places[split]
        self._check_process()
        prepared, started = self._ahead.pop(split, (None, None))
        if started is not None and prepared == place:
            step, tensors = started.result()
        else:
            step, tensors = self._prepare(split, place)
        self._places[split], self._last[split] = step.after, step
        if step.begins:
            self._announce(feed, step.epoch)
        if self._prefetch and self._worker is None:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="chatmill-prefetch")
            self._ahead[split] = (step.after, self._pool.submit(self._prepare, split, step.after))
        return self._to_device(tensors)

    def _begin_process(self) -> None:
        """Locks and threads belong to a process: a copy in another one, forked or unpickled, begins with its own."""
        self._process = os.getpid()
        self._locks = {split: threading.Lock() for split in self._feeds}
        self._pool, self._ahead = None, {}

    def _check_process(self) -> None:
        if self._process != os.getpid():
            self._begin_process()

    def _announce(self, feed: Feed, epoch: int) -> None:
        """Log that an epoch of a split begins."""

    def _prepare(self, split: str, place: EpochPlace) -> tuple[RowStep, tuple[torch.Tensor, ...]]:
        feed = self._feeds[split]
        self._check_process()
        with self._locks[split]:  # a feed lays one batch at a time
            step = feed.step_at(place)
            return step, feed.batch(step)

    def last_step(self, split: str = "train") -> RowStep:
        """The step that `get_batch` gave last."""
        if split not in self._last:
            raise ConfigError(f"get_batch({split!r}) was not called yet: there is no last batch")
        return self._last[split]

    def _feed(self, split: str) -> Feed:
        if split not in self._feeds:
            way_out = f"; get_batch({split!r}) needs the folder {split}/" if self.split_is_folder else ""
            raise ConfigError(
                f"{self._dataset}: there is no split {split!r} (there is: {', '.join(self._feeds)}){way_out}"
            )
        return self._feeds[split]

    def _to_device(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if self._worker is not None or str(self.device) == "cpu":
            return tensors
        if isinstance(tensors, PackedBatch):
            return tensors.to(self.device, non_blocking=True)
        return tuple(tensor.to(self.device, non_blocking=True) for tensor in tensors)

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that there are."""
        return tuple(self._feeds)

    def rows_per_epoch(self, split: str = "train") -> int:
        """Rows of the first epoch of a split."""
        return self._feed(split).rows.rows_of(0)

    def state_dict(self) -> dict[str, Any]:
        """The place of each split, with the fingerprint of its data; plain values that JSON can hold."""
        return {
            "version": STATE_VERSION,
            "loader": self.kind,
            "worker": list(self._worker) if self._worker else None,
            "splits": {
                split: {
                    "fingerprint": feed.rows.fingerprint,
                    "order": dict(feed.order),
                    "place": asdict(self._places[split]),
                }
                for split, feed in self._feeds.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, with any number of ranks; another dataset or order is refused."""
        version, kind = state.get("version"), state.get("loader")
        if version != STATE_VERSION or kind != self.kind:
            raise ConfigError(
                f"{self._dataset}: this is a state of loader {kind!r} version {version!r}; "
                f"a {self.kind!r} state of version {STATE_VERSION} is needed"
            )
        places = dict(self._places)
        for split, saved in state["splits"].items():
            feed = self._feed(split)
            own = feed.rows.fingerprint
            if saved["fingerprint"] != own:
                raise ConfigError(
                    f"{self._dataset}: the state belongs to another dataset: its {split} split has the fingerprint "
                    f"{saved['fingerprint']}, this one {own}; open the dataset that the run began with"
                )
            self._refuse_other_order(split, saved["order"], dict(feed.order))
            places[split] = EpochPlace(**{name: int(value) for name, value in saved["place"].items()})
        self._places = places
        worker = state.get("worker")
        self._worker = (int(worker[0]), int(worker[1])) if worker else None

    def _refuse_other_order(self, split: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        for name in sorted(saved.keys() | own.keys()):
            if saved.get(name) != own.get(name):
                raise ConfigError(
                    f"{self._dataset}: {split}: the state was taken with {name} = {saved.get(name)!r}, this loader has "
                    f"{own.get(name)!r}: its position would mean other rows; use the options that the run began with"
                )

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Batches of the train split without end; in a worker of torch's `DataLoader`, every K-th of them.

        Worker k of K gives the global steps k, k + K, k + 2K, ..., so the `DataLoader`, which asks its workers in
        turn, hands out the same batches in the same order as `get_batch` would.
        """
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        if info is None:
            while True:
                yield self.get_batch()
        worker = (info.id, info.num_workers)
        self._enter_worker(worker)
        while True:
            batch = self.get_batch()
            self._skip(info.num_workers - 1)
            yield batch

    def _enter_worker(self, worker: tuple[int, int]) -> None:
        """Take this worker's part; after a resume the state is already that of the worker.

        A forked process cannot use CUDA, which pinned memory would.
        """
        for feed in self._feeds.values():
            feed.unpin()
        if self._worker is None:
            self._worker = worker
            self._skip(worker[0])
        elif self._worker != worker:
            raise ConfigError(
                f"the state is of worker {self._worker[0]} of {self._worker[1]}, this is worker {worker[0]} of "
                f"{worker[1]}: resume with the same num_workers"
            )

    def _skip(self, steps: int) -> None:
        for _ in range(steps):
            self._places["train"] = self._feeds["train"].step_at(self._places["train"]).after

    def is_endless(self, split: str = "train") -> bool:
        """Whether the rows of a split are drawn at random, without end."""
        return self._feed(split).is_endless

    def epoch(self, split: str = "train") -> int:
        """The epoch of the last delivered batch; 0 before the first, and in random mode."""
        self._feed(split)
        return self._places[split].epoch

    def next_epoch(self, split: str = "train") -> int:
        """The epoch of the batch that comes next: `epoch`, or the one after it where that is used up."""
        epoch = self.epoch(split)
        return epoch if self.batches_left(split, epoch + 1) else epoch + 1

    def steps_per_epoch(self, split: str = "train", epoch: int = 0) -> int:
        """How many batches an epoch has; packed, that may differ from epoch to epoch."""
        return self._feed(split).steps_per_epoch(epoch)

    def batches_left(self, split: str = "train", epochs: int = 1) -> int:
        """Batches of this rank from here to the end of the epoch with number `epochs - 1`; not for random mode."""
        return self._feed(split).steps_left(self._places[split], epochs)

    def __len__(self) -> int:
        """Batches of this rank in the epoch that comes next, of the first split."""
        first = next(iter(self._feeds))
        if self.is_endless(first):
            raise TypeError("batch_sampling_mode is random: the batches never end, so the loader has no length")
        return self.steps_per_epoch(first, self.next_epoch(first))

    def __bool__(self) -> bool:
        """Always true, whatever the length."""
        return True

    def close(self) -> None:
        """End the prefetch thread; the loader can still be used."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._begin_process()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_locks", "_pool", "_ahead")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_process()


def directory_of(dataset_dir: str | Path | None, config: TrainingConfig) -> Path:
    """The argument, else the config's `dataset_dir`."""
    chosen = dataset_dir if dataset_dir is not None else config.dataset_dir
    if chosen is None:
        raise ConfigError("no dataset: give dataset_dir, or set dataset_dir in the config")
    return Path(chosen)


def _register_as_iterable(loader: type) -> None:
    """Let torch's `DataLoader` see an iterable dataset, without importing torch to define the class."""
    from torch.utils.data import IterableDataset

    IterableDataset.register(loader)
