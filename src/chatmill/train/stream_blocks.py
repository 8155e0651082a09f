"""The loader of the post-training mode: blocks of the stream in order, each once, those without targets left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from chatmill.core.blocks import boundaries_from_token
from chatmill.core.shift import next_token
from chatmill.errors import DataError
from chatmill.load.packed_row_loader import PackedRowLoader
from chatmill.pack.stream import PackedStream


class StreamBlockLoader(PackedRowLoader):
    """Batches of stream blocks: `(x, y, mask, document_starts)` as a `PackedBatch`, and then no more.

    - x, y: (batch_size, block_size - 1) int64, shifted; y is -100 wherever the shifted mask is 0. mask: float32.
    - A block without a trained target is skipped; `skipped` counts them. The last batch is filled with empty rows.
    - A conversation of a block sees only itself (documents begin after each eos); `isolate=False`: the block is one.
    - With W processes a global step takes W * batch_size blocks, in order; the state is the global position.
    """

    kind = "stream_blocks"
    ends = True
    data = "stream blocks"

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
        self.kept: NDArray[np.int64] = np.flatnonzero(next_token(packed.loss_mask).any(axis=1))
        self.skipped = int(len(packed) - len(self.kept))
        """Blocks with nothing to train."""
        if not len(self.kept):
            raise DataError(
                f"none of the {len(packed)} blocks has a trained token: is there a user span before the assistant's, "
                f"and do both fit into a block of {packed.input_ids.shape[1]} tokens?"
            )
        self._packed = packed
        sizes = (packed.injected + packed.tokens)[self.kept].tolist()
        rows = [packed.input_ids[block, :size] for block, size in zip(self.kept, sizes, strict=True)]
        super().__init__(
            rows,
            [_starts(row, eos_id) if isolate else np.zeros(1, dtype=np.int64) for row in rows],
            batch_size=batch_size,
            pad_id=eos_id,
            shuffle=False,
            split=split,
            rank=rank,
            world_size=world_size,
            weights=[packed.loss_mask[block, :size] for block, size in zip(self.kept, sizes, strict=True)],
            width=packed.input_ids.shape[1],
        )

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

    def sample(self, index: int) -> dict[str, NDArray[Any]]:
        """One kept block: `input_ids` and the token-aligned `loss_mask`, both of block_size."""
        block = self.kept[index]
        return {"input_ids": self._packed.input_ids[block], "loss_mask": self._packed.loss_mask[block]}

    def get_batch(self, split: str = "train") -> tuple[torch.Tensor, ...]:
        """This rank's blocks of the next global step; `StopIteration` behind the last."""
        if not self.batches_left(split):
            raise StopIteration
        return super().get_batch(split)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """The batches from here to the end."""
        while self.batches_left(self.split):
            yield self.get_batch(self.split)


def _starts(row: NDArray[np.int64], eos_id: int) -> NDArray[np.int64]:
    """Where documents begin: at the first token, and behind each eos."""
    return boundaries_from_token(row, np.array([0, len(row)], dtype=np.int64), eos_id, after=True).starts
