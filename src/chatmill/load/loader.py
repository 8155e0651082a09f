"""One loader over the rows of its splits: which rows a step takes, batches, the state a run resumes from, iteration."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from chatmill.core.shift import IGNORE_INDEX
from chatmill.errors import ConfigError, need
from chatmill.load.config import SamplingMode, TrainingConfig
from chatmill.load.order import Draws, EpochPlace, RankShare, epoch_step, steps_per_epoch
from chatmill.load.packed_batch import PackedBatch
from chatmill.load.placement import named_device, rank_and_world
from chatmill.load.row_buffer import RowBuffer
from chatmill.load.rows import Ints, Rows
from chatmill.store.episode_layout import dataset_folder

if TYPE_CHECKING:
    import torch

STATE_VERSION = 2
"""1 held fingerprints of the bytes of tokens; since 2 they are those of the digests in the manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStep:
    """This rank's rows of one global step; the batch's other rows are padding."""

    epoch: int
    rows: Ints
    begins: bool
    """Whether an epoch begins with this global step."""
    after: EpochPlace
    """Where the next global step begins."""


class BatchLoader:
    """`get_batch`, `state_dict`, `load_state_dict` over the rows of the splits; also an iterable dataset of torch."""

    kind: str
    """The name of this kind of loader in a state."""
    keeps: Any = None
    """What must live as long as the loader: the folder of a dataset that was never saved."""

    def __init__(
        self,
        rows: Mapping[str, Rows],
        config: TrainingConfig,
        *,
        dataset: str,
        rank: int | None = None,
        world_size: int | None = None,
        device: Any = None,
        pin_memory: bool | None = None,
    ) -> None:
        """`dataset` names the data in errors. Memory is pinned for a GPU, unless `pin_memory` says otherwise."""
        need("torch", "batches of tensors")
        from torch.utils.data import IterableDataset

        IterableDataset.register(type(self))  # not a base class: torch is not imported to define one
        self.config, self._dataset, self._rows = config, dataset, dict(rows)
        self.batch_size, self.block_size, self.pad_token_id = config.batch_size, config.block_size, config.pad_token_id
        self.rank, self.world_size = rank_and_world(rank, world_size)
        self.device = next(choice for choice in (device, config.device, "cpu") if choice is not None)
        if isinstance(self.device, str) and self.device != "cpu":
            named_device(self.device, present=False)  # a worker process may not see the GPU that its batches go to
        self._pin = str(self.device).startswith("cuda") if pin_memory is None else pin_memory
        self._share = RankShare(batch_size=config.batch_size, rank=self.rank, world_size=self.world_size)
        self._configs = {split: config.for_split(split) for split in rows}
        self._draws: dict[str, Draws] = {}
        for split, split_rows in self._rows.items():
            if split_rows.has_trees and not config.pack:
                raise ConfigError(
                    f"{split_rows.name}: its episodes are trees, and batches without boundaries would read their "
                    "branches as one text: read them packed (pack=True; packed=True in to_torch), or build with "
                    "expand: turns"
                )
            if config.batch_sampling_mode is SamplingMode.RANDOM:
                self._draws[split] = Draws(config.epoch_seed, split_rows.rows_of(0))
        self._places = {split: EpochPlace() for split in rows}
        self._last: dict[str, RowStep] = {}
        """The step that was delivered last, by split."""
        self._worker: tuple[int, int] | None = None
        self._buffers: dict[str, RowBuffer] = {}
        self._lock = threading.RLock()
        """A buffer holds one batch at a time."""

    def get_batch(self, split: str = "train") -> tuple[torch.Tensor, ...]:
        """Return the next batch of a split: this rank's rows of the next global step."""
        self.rows(split)
        step = self._step_at(split, self._places[split])
        tensors = self.batch_of(step, split)
        self._places[split], self._last[split] = step.after, step
        if step.begins:
            self._announce(split, step.epoch)
        return self._to_device(tensors)

    def _to_device(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if str(self.device) == "cpu" or self._worker is not None:
            return tensors
        if isinstance(tensors, PackedBatch):
            return tensors.to(self.device, non_blocking=True)
        return tuple(tensor.to(self.device, non_blocking=True) for tensor in tensors)

    def _announce(self, split: str, epoch: int) -> None:
        """Log that an epoch of a split begins."""

    def _step_at(self, split: str, place: EpochPlace) -> RowStep:
        """Return the global step at a place, as this rank sees it."""
        share, rows = self._share, self._rows[split]
        if split in self._draws:
            chosen = self._draws[split].take(place.position + share.first, share.batch_size)
            after = EpochPlace(position=place.position + share.step)
            return RowStep(epoch=0, rows=chosen, begins=False, after=after)
        drop_last = self._configs[split].epoch_drop_last
        place, real, after = epoch_step(place, rows.rows_of, share, drop_last=drop_last, name=rows.name)
        chosen = rows.select(place.epoch, place.position + share.first, real)
        return RowStep(epoch=place.epoch, rows=chosen, begins=place.position == 0, after=after)

    def batch_of(self, step: RowStep, split: str = "train") -> tuple[torch.Tensor, ...]:
        """Return the batch of a step on the CPU: `(x, y)`, `(x, y, mask)` or a `PackedBatch`, filled up with padding.

        Log-probabilities and what a teacher says follow the mask, or are in the packed batch.
        """
        with self._lock:
            if split not in self._buffers:
                self._buffers[split] = self._new_buffer(split)
            buffer, rows = self._buffers[split], self._rows[split]
            buffer.clear()
            laid = rows.lay(buffer, step.epoch, step.rows, np.arange(len(step.rows)))
            tensors = buffer.tensors(len(step.rows))
            if not self.config.pack:
                return (*tensors, *laid.extra.values())
            if rows.ignores_untrained:
                tensors[1][tensors[2] == 0] = IGNORE_INDEX
            starts, tokens = buffer.document_starts(laid, rows.most_documents)
            return PackedBatch.of((*tensors, starts), tokens, buffer.tree_grid(tokens), laid.extra)

    def _new_buffer(self, split: str) -> RowBuffer:
        rows = self._rows[split]
        dtype = rows.weight_dtype if self.gives_masks(split) or self.config.pack else None
        pad_id, pin = self.config.pad_token_id or 0, self._pin
        return RowBuffer(self.batch_size, self.block_size, pad_id=pad_id, weights=dtype, pin=pin, trees=rows.has_trees)

    def last_step(self, split: str = "train") -> RowStep:
        """Return the step that `get_batch` gave last."""
        if split not in self._last:
            raise ConfigError(f"get_batch({split!r}) was not called yet: there is no last batch")
        return self._last[split]

    @property
    def splits(self) -> tuple[str, ...]:
        """Those that can be read."""
        return tuple(self._rows)

    def rows(self, split: str = "train") -> Rows:
        """Return the rows of a split; one that is not there is an error."""
        if split not in self._rows:
            raise ConfigError(f"{self._dataset}: there is no split {split!r} (there is: {', '.join(self._rows)})")
        return self._rows[split]

    def gives_masks(self, split: str = "train") -> bool:
        """Return whether batches say which tokens are trained, from stored masks or a policy; else every token is."""
        return self.config.wants_masks and self.rows(split).has_masks

    def rows_per_epoch(self, split: str = "train") -> int:
        """Rows of the first epoch, over all ranks."""
        return self.rows(split).rows_of(0)

    def _order(self, split: str) -> dict[str, Any]:
        """Return the options that give a place its meaning: a state is refused if one of them differs."""
        config = self._configs[split]
        order: dict[str, Any] = {
            "batch_sampling_mode": str(config.batch_sampling_mode),
            "epoch_seed": config.epoch_seed,
        }
        if config.batch_sampling_mode is SamplingMode.EPOCH or config.pack:
            order["epoch_shuffle"] = config.epoch_shuffle
        if config.pack:
            order["block_size"] = config.block_size
        return {**order, **self._rows[split].order_facts}

    def state_dict(self) -> dict[str, Any]:
        """Return the place of each split, with the fingerprint of its data; plain values that JSON can hold."""
        return {
            "version": STATE_VERSION,
            "loader": self.kind,
            "worker": list(self._worker) if self._worker else None,
            "splits": {
                split: {
                    "fingerprint": rows.data.fingerprint,
                    "order": self._order(split),
                    "place": asdict(self._places[split]),
                }
                for split, rows in self._rows.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where a state was taken, with any number of ranks; another dataset or order is refused."""
        version, kind = state.get("version"), state.get("loader")
        if kind != self.kind:
            raise ConfigError(
                f"{self._dataset}: this is a state of loader {kind!r}; a state of loader {self.kind!r} is needed"
            )
        if version != STATE_VERSION:
            raise ConfigError(
                f"{self._dataset}: another version of Chatmill saved this state (state version {version!r}); this one "
                f"reads state version {STATE_VERSION}: finish the epoch with the version that saved it, or begin anew"
            )
        places = dict(self._places)
        for split, saved in state["splits"].items():
            fingerprint = self.rows(split).data.fingerprint
            if saved["fingerprint"] != fingerprint:
                raise ConfigError(
                    f"{self._dataset}: the state belongs to another dataset: its {split} split has the fingerprint "
                    f"{saved['fingerprint']}, this one {fingerprint}; open the dataset that the run began with"
                )
            order = self._order(split)
            for name in sorted(saved["order"].keys() | order.keys()):
                before, now = saved["order"].get(name), order.get(name)
                if before != now:
                    raise ConfigError(
                        f"{self._dataset}: {split}: the state was taken with {name} = {before!r}, this loader has "
                        f"{now!r}: its position would mean other rows; use the options that the run began with"
                    )
            places[split] = EpochPlace(**{name: int(value) for name, value in saved["place"].items()})
        self._places = places
        worker = state.get("worker")
        self._worker = (int(worker[0]), int(worker[1])) if worker else None

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
        self._enter_worker((info.id, info.num_workers))
        while True:
            batch = self.get_batch()
            self._skip(info.num_workers - 1)
            yield batch

    def _enter_worker(self, worker: tuple[int, int]) -> None:
        """Take this worker's part; after a resume the state is already that of the worker.

        A forked process cannot use CUDA, which pinned memory would.
        """
        self._pin, self._buffers, self._lock = False, {}, threading.RLock()
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
            self._places["train"] = self._step_at("train", self._places["train"]).after

    def is_endless(self, split: str = "train") -> bool:
        """Return whether the rows of a split are drawn at random, without end."""
        self.rows(split)
        return split in self._draws

    def epoch(self, split: str = "train") -> int:
        """Return the epoch of the last delivered batch; 0 before the first, and in random mode."""
        self.rows(split)
        return self._places[split].epoch

    def next_epoch(self, split: str = "train") -> int:
        """Return the epoch of the batch that comes next: `epoch`, or the one after it if that is used up."""
        epoch = self.epoch(split)
        return epoch if self.batches_left(split, epoch + 1) else epoch + 1

    def steps_per_epoch(self, split: str = "train", epoch: int = 0) -> int:
        """Return how many batches an epoch has; packed, that may differ from epoch to epoch."""
        return self._steps(split, self.rows(split).rows_of(epoch))

    def _steps(self, split: str, rows: int) -> int:
        return steps_per_epoch(rows, self._share, drop_last=self._configs[split].epoch_drop_last)

    def batches_left(self, split: str = "train", epochs: int = 1) -> int:
        """Batches of this rank from here to the end of the epoch with number `epochs - 1`; not for random mode."""
        rows, place = self.rows(split), self._places[split]
        if place.epoch >= epochs:
            return 0
        here = self._steps(split, max(0, rows.rows_of(place.epoch) - place.position))
        return here + sum(self.steps_per_epoch(split, epoch) for epoch in range(place.epoch + 1, epochs))

    def one_pass(self, split: str = "val") -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the batches of the first epoch of a split, then no more: an evaluation.

        It does not move the split: `get_batch` continues as if nothing had been read. Every rank has as many batches.
        """
        if self.is_endless(split):
            raise ConfigError(f"batch_sampling_mode of {split} is random, which has no end: give epoch")
        place = EpochPlace()
        for _ in range(self.steps_per_epoch(split)):
            step = self._step_at(split, place)
            yield self._to_device(self.batch_of(step, split))
            place = step.after

    def step_number(self, number: int, split: str = "train") -> RowStep:
        """Return the step with this number, counted from the first one (0) of epoch 0."""
        if number < 0:
            raise ConfigError(f"batch {number}: batches are counted from 0")
        epoch = 0
        while not self.is_endless(split) and 0 < (steps := self.steps_per_epoch(split, epoch)) <= number:
            number, epoch = number - steps, epoch + 1
        return self._step_at(split, EpochPlace(epoch=epoch, position=number * self._share.step))

    def __len__(self) -> int:
        """Batches of this rank in the epoch that comes next, of the first split."""
        first = next(iter(self._rows))
        if self.is_endless(first):
            raise TypeError("batch_sampling_mode is random: the batches never end, so the loader has no length")
        return self.steps_per_epoch(first, self.next_epoch(first))

    def __bool__(self) -> bool:
        """Always true, whatever the length."""
        return True

    def __getstate__(self) -> dict[str, Any]:
        """Another process has buffers and a lock of its own."""
        return {name: value for name, value in vars(self).items() if name not in ("_buffers", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._buffers, self._lock = {}, threading.RLock()


def directory_of(dataset_dir: str | Path | None, config: TrainingConfig) -> Path:
    """Return the argument, else the config's `dataset_dir`."""
    chosen = dataset_dir if dataset_dir is not None else config.dataset_dir
    if chosen is None:
        raise ConfigError("no dataset: give dataset_dir, or set dataset_dir in the config")
    return dataset_folder(chosen)
