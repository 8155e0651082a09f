"""Training on an export with torchtitan: `ChatmillDataLoader`, which its trainer builds from its config.

Importing this module imports torch and torchtitan; `chatmill` itself never does. It reads the loader protocols of
torchtitan 0.3.0 and of its main branch since August 2026. That branch is on no index: what is known of it is its
source, and it has not been run here.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from chatmill.errors import ConfigError
from chatmill.load.row_source import RowSource

__all__ = ["ChatmillDataLoader", "RowSource"]

BASES = ("torchtitan.components.dataloader", "torchtitan.components.data", "torchtitan.components.data.loader")
"""Where `BaseDataLoader` is: in 0.3.0, and on the main branch."""
Sample = tuple[dict[str, torch.Tensor], torch.Tensor]


def _base_loader() -> Any:
    """Return the class that the data loaders of the installed torchtitan derive from."""
    try:
        package = import_module("torchtitan")
    except ModuleNotFoundError as error:
        if error.name != "torchtitan":
            raise ConfigError(f"torchtitan is installed, and importing it fails: {error}") from error
        raise ConfigError(
            "chatmill.torchtitan needs torchtitan, which is not installed: pip install torchtitan"
        ) from error
    problems = []
    for name in BASES:
        try:
            return import_module(name).BaseDataLoader
        except (ImportError, AttributeError) as error:
            problems.append(f"{name}: {error}")
    raise ConfigError(
        f"torchtitan is installed ({package.__path__[0]}), and its BaseDataLoader cannot be imported. Chatmill knows "
        "torchtitan 0.3.0 and its main branch of August 2026: install what is missing, or one of these. Tried: "
        + "; ".join(problems)
    )


_BaseDataLoader: Any = _base_loader()


class _Rows:
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


class ChatmillDataLoader(_BaseDataLoader):  # type: ignore[misc]
    """A data loader for torchtitan's trainer over the rows of an export; it resumes from torchtitan's checkpoints.

    Batches of torchtitan 0.3.0 are (rows, tokens). Its main branch has no rows in a batch: those of an export are laid
    one after another, and `positions` say where documents begin.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_BaseDataLoader.Config):  # type: ignore[misc]
        """`dataset_path` is a split of the export, such as OUT/train."""

        dataset_path: str | None = None
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
        seq_len: int | None = None,
        local_batch_size: int | None = None,
        max_context_length: int | None = None,
        num_tokens_per_batch: int | None = None,
        **_: Any,
    ) -> None:
        """Take what torchtitan's trainer gives: `seq_len` and `local_batch_size` in 0.3.0, the next two on main."""
        if not config.dataset_path:
            raise ConfigError("dataset_path is missing: give a split of the export, such as OUT/train")
        source = RowSource(config.dataset_path)
        if len(source) < dp_world_size:
            raise ConfigError(f"{source.folder} has {len(source):,} rows for {dp_world_size:,} ranks")
        self._is_flat = num_tokens_per_batch is not None
        if seq_len is not None and local_batch_size is not None:
            _check_length(source, seq_len)
            self._batch_size = local_batch_size
        elif max_context_length is not None and num_tokens_per_batch is not None:
            self._batch_size = _rows_of_tokens(source, max_context_length, num_tokens_per_batch)
        else:
            raise ConfigError(
                "this torchtitan asks for batches neither by seq_len and local_batch_size (0.3.0) nor by "
                "max_context_length and num_tokens_per_batch (main, August 2026): Chatmill does not know it"
            )
        self._rows = _Rows(source, dp_rank, dp_world_size, seed=config.seed, infinite=config.infinite)
        self._rank, self._ranks = dp_rank, dp_world_size

    def __iter__(self) -> Iterator[Sample]:
        """Give batches; after the last epoch the rest is a smaller one, or left out where batches have fixed tokens."""
        rows: list[Sample] = []
        for row in self._rows:
            rows.append(row)
            if len(rows) == self._batch_size:
                yield self._joined(rows)
                rows = []
        if rows and not self._is_flat:
            yield self._joined(rows)

    def _joined(self, rows: list[Sample]) -> Sample:
        join = torch.cat if self._is_flat else torch.stack
        inputs = {name: join([row_inputs[name] for row_inputs, _ in rows]) for name in rows[0][0]}
        return inputs, join([labels for _, labels in rows])

    @property
    def _rank_key(self) -> str:
        """Each rank has a key of its own, since torchtitan joins the states of all ranks."""
        return f"dp_rank_{self._rank}"

    def state_dict(self) -> dict[str, Any]:
        """Return where this rank is, for torchtitan's checkpoint."""
        return {self._rank_key: pickle.dumps(self._rows.state_dict()), "world_size": self._ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a checkpoint was written, with as many ranks as then; an empty state changes nothing."""
        if not state_dict:
            return
        if state_dict.get("world_size") != self._ranks or self._rank_key not in state_dict:
            raise ConfigError(
                f"the checkpoint was written by {state_dict.get('world_size')} data-parallel ranks, and there are "
                f"{self._ranks}: each goes on in rows of its own, so resume with as many"
            )
        state = pickle.loads(state_dict[self._rank_key])
        if set(state) != set(self._rows.state_dict()):
            raise ConfigError("the checkpoint is of the data loader of another Chatmill: resume with that version")
        self._rows.load_state_dict(state)

    def close(self) -> None:
        """Do nothing: rows are mapped files. torchtitan's main branch calls it."""


def _check_length(source: RowSource, seq_len: int) -> None:
    if source.seq_len != seq_len:
        raise ConfigError(
            f"{source.folder} has rows of {source.seq_len:,} tokens, and training.seq_len is {seq_len:,}: set it "
            f"to {source.seq_len}, or export with --max-length {seq_len}"
        )


def _rows_of_tokens(source: RowSource, max_context_length: int, tokens: int) -> int:
    """Return how many rows make a batch of so many tokens."""
    if source.seq_len > max_context_length:
        raise ConfigError(
            f"{source.folder} has rows of {source.seq_len:,} tokens, and training.max_context_length is "
            f"{max_context_length:,}: set it to {source.seq_len}, or export with --max-length {max_context_length}"
        )
    rows, rest = divmod(tokens, source.seq_len)
    if rest:
        raise ConfigError(
            f"{source.folder} has rows of {source.seq_len:,} tokens, which do not fill a batch of {tokens:,}: set "
            "training.num_tokens_per_microbatch_per_dp_rank to a multiple of the rows' length"
        )
    return int(rows)
