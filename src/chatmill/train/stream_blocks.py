"""The loader of the post-training mode: blocks of the stream in order, each once, those without targets left out."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from chatmill.core.blocks import boundaries_from_token
from chatmill.core.shift import next_token
from chatmill.errors import ConfigError, DataError
from chatmill.load.distributed import rank_and_world
from chatmill.load.packed_batch import PackedBatch
from chatmill.pack.stream import PackedStream, post_training_targets

STATE_VERSION = 1


class StreamBlockLoader:
    """Batches of stream blocks: `(x, y, mask, document_starts)` as a `PackedBatch`, and then no more.

    - x, y: (batch_size, block_size - 1) int64, shifted; y is -100 wherever the shifted mask is 0. mask: float32.
    - A block without a trained target is skipped; `skipped` counts them. The last batch is filled with empty rows.
    - A conversation of a block sees only itself (documents begin after each eos); `isolate=False`: the block is one.
    - With W processes a global step takes W * batch_size blocks, in order; the state is the global position.
    """

    def __init__(
        self,
        packed: PackedStream,
        *,
        batch_size: int,
        eos_id: int,
        isolate: bool = True,
        split: str = "train",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """`packed` as `pack_post_training_stream` or `pack_transcripts` gave it; `split` is the name it answers to."""
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}; it must be 1 or more")
        self.batch_size, self.eos_id, self.isolate, self.split = batch_size, eos_id, isolate, split
        self.rank, self.world_size = rank_and_world(rank, world_size)
        trains = next_token(packed.loss_mask).any(axis=1)
        self.kept: NDArray[np.int64] = np.flatnonzero(trains)
        self.skipped = int(len(packed) - len(self.kept))
        """Blocks with nothing to train."""
        if not len(self.kept):
            raise DataError(
                f"none of the {len(packed)} blocks has a trained token: is there a user span before the assistant's, "
                f"and do both fit into a block of {packed.input_ids.shape[1]} tokens?"
            )
        self._packed = packed
        self._real = (packed.injected + packed.tokens).astype(np.int64)
        self._most = 1 + int((packed.input_ids == eos_id).sum(axis=1).max()) if isolate else 1
        self._position = 0
        self.fingerprint = _fingerprint(packed)

    def __len__(self) -> int:
        """Batches of each rank in the one pass."""
        return math.ceil(len(self.kept) / (self.batch_size * self.world_size))

    def data_report(self) -> dict[str, Any]:
        """What packing left out: the counts of its report, and the assistant's tokens that block edges lost."""
        packed = self._packed
        return {
            **packed.report,
            "blocks_skipped": self.skipped,
            "assistant_tokens": packed.assistant_tokens,
            "trained_tokens": packed.trained_tokens,
            "lost_at_edges": packed.lost_at_edges,
        }

    def batches_left(self) -> int:
        """Batches of each rank that were not given yet."""
        return math.ceil(max(0, len(self.kept) - self._position) / (self.batch_size * self.world_size))

    def sample(self, index: int) -> dict[str, NDArray[Any]]:
        """One kept block: `input_ids` and the token-aligned `loss_mask`, both of block_size."""
        block = self.kept[index]
        return {"input_ids": self._packed.input_ids[block], "loss_mask": self._packed.loss_mask[block]}

    def get_batch(self, split: str = "train") -> PackedBatch:
        """This rank's blocks of the next global step; `StopIteration` when all blocks were given."""
        if split != self.split:
            raise ConfigError(f"this stream of blocks is the split {self.split!r}; it has no {split!r}")
        if self._position >= len(self.kept):
            raise StopIteration
        first = self._position + self.rank * self.batch_size
        self._position += self.batch_size * self.world_size
        return self._batch(self.kept[first : first + self.batch_size])

    def __iter__(self) -> Iterator[PackedBatch]:
        """The batches from here to the end."""
        while self._position < len(self.kept):
            yield self.get_batch()

    def _batch(self, blocks: NDArray[np.int64]) -> PackedBatch:
        size = self._packed.input_ids.shape[1]
        ids = np.full((self.batch_size, size), self.eos_id, dtype=np.int64)
        mask = np.zeros((self.batch_size, size), dtype=np.uint8)
        tokens = np.zeros(self.batch_size, dtype=np.int64)
        ids[: len(blocks)] = self._packed.input_ids[blocks]
        mask[: len(blocks)] = self._packed.loss_mask[blocks]
        tokens[: len(blocks)] = np.minimum(self._real[blocks], size - 1)
        x, y = post_training_targets(ids, mask)
        weights = next_token(mask).astype(np.float32)
        starts = self._starts(x, tokens)
        tensors = (torch.from_numpy(np.ascontiguousarray(values)) for values in (x, y, weights, starts))
        return PackedBatch.of(tuple(tensors), tokens)

    def _starts(self, x: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """(rows, most documents of any block) starts padded with -1; an empty row has the one start 0."""
        starts = np.full((len(x), self._most), -1, dtype=np.int64)
        starts[:, 0] = 0
        if self.isolate:
            offsets = np.concatenate([[0], np.cumsum(tokens)]).astype(np.int64)
            flat = np.concatenate([x[row, :count] for row, count in enumerate(tokens.tolist())])
            found = boundaries_from_token(flat, offsets, self.eos_id, after=True)
            number = np.arange(len(found.starts)) - np.repeat(np.cumsum(found.counts) - found.counts, found.counts)
            starts[found.rows, number] = found.starts
        return starts

    def state_dict(self) -> dict[str, Any]:
        """How many blocks were given, over all ranks."""
        return {"version": STATE_VERSION, "fingerprint": self.fingerprint, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on, with any number of ranks; another stream is refused."""
        if state.get("fingerprint") != self.fingerprint or state.get("version") != STATE_VERSION:
            raise ConfigError("the state belongs to another stream of blocks; open the transcripts the run began with")
        self._position = int(state["position"])


def _fingerprint(packed: PackedStream) -> str:
    digest = hashlib.sha256(repr(packed.input_ids.shape).encode())
    digest.update(np.ascontiguousarray(packed.input_ids).data)
    digest.update(np.ascontiguousarray(packed.loss_mask).data)
    return digest.hexdigest()
