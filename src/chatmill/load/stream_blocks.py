"""The loader of spec 2: blocks of the post-training stream in order, each once, those without targets left out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.blocks import boundaries_from_token
from chatmill.core.shift import next_token
from chatmill.errors import DataError
from chatmill.load.config import DatasetMode, SamplingMode, TrainingConfig
from chatmill.load.loader import BatchLoader
from chatmill.load.row_buffer import LaidRows, RowBuffer
from chatmill.load.rows import Ints, Rows
from chatmill.pack.stream import PackedStream

if TYPE_CHECKING:
    import torch

SPLIT = "train"


class StreamBlocks(Rows):
    """The blocks of a stream that train something; the first token of a document is never a target."""

    has_masks = True
    ignores_untrained = True

    def __init__(self, packed: PackedStream, kept: Ints, eos_id: int, *, isolate: bool) -> None:
        """`kept` numbers the blocks; documents begin after each eos, or (`isolate=False`) with the block."""
        super().__init__("stream blocks", width=packed.input_ids.shape[1])
        sizes = (packed.injected + packed.tokens)[kept].tolist()
        self._ids = [packed.input_ids[block, :size] for block, size in zip(kept, sizes, strict=True)]
        self._weights = [packed.loss_mask[block, :size] for block, size in zip(kept, sizes, strict=True)]
        self._starts = [_starts(row, eos_id) if isolate else np.zeros(1, dtype=np.int64) for row in self._ids]
        self.most_documents = max(map(len, self._starts))
        digest = hashlib.sha256(np.array(sizes, dtype=np.int64).tobytes())
        for column in (self._ids, self._starts, self._weights):
            for row in column:
                digest.update(np.ascontiguousarray(row).data)
        self.data, self.fingerprint = self, digest.hexdigest()

    def rows_of(self, epoch: int) -> int:
        """Return all of them."""
        return len(self._ids)

    def lay(self, buffer: RowBuffer, epoch: int, rows: Ints, slots: Ints) -> LaidRows:
        """Copy blocks into their slots."""
        assert buffer.weights is not None
        starts: list[Ints] = [np.empty(0, dtype=np.int64)]
        lengths = starts.copy()
        for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
            ids, document_starts = self._ids[row], self._starts[row]
            buffer.ids[slot, : len(ids)] = ids
            buffer.weights[slot, : len(ids)] = self._weights[row]
            buffer.weights[slot, document_starts] = 0  # the token before belongs to another document
            starts.append(document_starts)
            lengths.append(np.diff(document_starts, append=len(ids)))
        counts = [len(document_starts) for document_starts in starts[1:]]
        return LaidRows(slots=np.repeat(slots, counts), starts=np.concatenate(starts), lengths=np.concatenate(lengths))


class StreamBlockLoader(BatchLoader):
    """Batches of stream blocks: `(x, y, mask, document_starts)` as a `PackedBatch`, and then no more.

    - x, y: (batch_size, block_size - 1) int64, shifted; y is -100 wherever the shifted mask is 0. mask: float32.
    - A block without a trained target is skipped; `skipped` counts them. The last batch is filled with empty rows.
    - A conversation of a block sees only itself (documents begin after each eos); `isolate=False`: the block is one.
    - With W processes a global step takes W * batch_size blocks, in order; the state is the global position.
    """

    kind = "stream_blocks"

    def __init__(
        self,
        packed: PackedStream,
        *,
        batch_size: int,
        eos_id: int,
        isolate: bool = True,
        device: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """`packed` as `pack_post_training_stream` or `pack_transcripts` gave it."""
        self.kept: Ints = np.flatnonzero(next_token(packed.loss_mask).any(axis=1))
        self.skipped = int(len(packed) - len(self.kept))
        """Blocks with nothing to train."""
        if not len(self.kept):
            raise DataError(
                f"none of the {len(packed)} blocks has a trained token: is there a user span before the assistant's, "
                f"and do both fit into a block of {packed.input_ids.shape[1]} tokens?"
            )
        self._packed = packed
        config = TrainingConfig(
            batch_size=batch_size,
            block_size=packed.input_ids.shape[1] - 1,
            dataset_mode=DatasetMode.SFT_EPISODE,
            batch_sampling_mode=SamplingMode.EPOCH,
            epoch_shuffle=False,
            epoch_drop_last=False,
            use_loss_mask=True,
            pad_token_id=eos_id,
            pack=True,
        )
        rows = StreamBlocks(packed, self.kept, eos_id, isolate=isolate)
        where: dict[str, Any] = {"rank": rank, "world_size": world_size, "device": device}
        super().__init__({SPLIT: rows}, config, dataset=rows.name, **where)

    def data_report(self) -> dict[str, Any]:
        """Return what packing left out: the counts of its report, and the assistant's tokens that block edges lost."""
        packed = self._packed
        return {
            **packed.report,
            "blocks_skipped": self.skipped,
            "assistant_tokens": packed.assistant_tokens,
            "trained_tokens": packed.trained_tokens,
            "lost_at_edges": packed.lost_at_edges,
        }

    def sample(self, index: int) -> dict[str, NDArray[Any]]:
        """Return one kept block: `input_ids` and the token-aligned `loss_mask`, both of block_size."""
        block = self.kept[index]
        return {"input_ids": self._packed.input_ids[block], "loss_mask": self._packed.loss_mask[block]}

    def get_batch(self, split: str = SPLIT) -> tuple[torch.Tensor, ...]:
        """Return this rank's blocks of the next global step; `StopIteration` after the last."""
        if not self.batches_left(split):
            raise StopIteration
        return super().get_batch(split)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the batches from here to the end."""
        while self.batches_left(SPLIT):
            yield self.get_batch(SPLIT)


def _starts(row: NDArray[np.int64], eos_id: int) -> NDArray[np.int64]:
    """Return where documents begin: at the first token, and after each eos."""
    return boundaries_from_token([row], eos_id, after=True).starts
