"""Rows on their way to tensors: token ids and weights laid into preallocated arrays, then shifted into x, y, mask.

Slices go straight from the memory map into the buffer, one assignment per episode and column; the widening to
int64 and float32 and the shift then happen once for the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.blocks import TreeGrid
from chatmill.core.shift import IGNORE_INDEX, model_inputs, next_token
from chatmill.core.tokens import ranges
from chatmill.core.trees import Branches

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidRows:
    """The documents that were laid into a buffer; those of one row follow each other."""

    slots: NDArray[np.int64]
    """The row of the buffer that holds each document."""
    starts: NDArray[np.int64]
    """Where it starts in its row, in tokens."""
    lengths: NDArray[np.int64]
    """How many of its tokens were laid."""
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What a batch of these has next to the usual tensors, by name."""


class RowBuffer:
    """`batch_size` rows of `block_size + 1` tokens; what is not laid is padding with weight 0."""

    def __init__(
        self,
        batch_size: int,
        block_size: int,
        *,
        pad_id: int,
        weights: np.dtype[Any] | None,
        pin: bool,
        trees: bool = False,
    ) -> None:
        """`weights`: the type in which weights are laid (uint8 or float32), or None for batches without a mask.

        With `trees` positions and ends are laid too.
        """
        self.batch_size, self.block_size, self.pad_id = batch_size, block_size, pad_id
        self.width = block_size + 1
        """Tokens per row."""
        self.ids: NDArray[np.uint32] = np.empty((batch_size, self.width), dtype=np.uint32)
        self.weights = None if weights is None else np.empty((batch_size, self.width), dtype=weights)
        self._flat_ids = self.ids.reshape(-1)
        self._flat_weights = None if self.weights is None else self.weights.reshape(-1)
        self.tree_columns: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None
        """Position of every token in its tree, and where in its row the tokens end that may look at it."""
        if trees:
            shape = (batch_size, self.width)
            self.tree_columns = np.empty(shape, np.int32), np.empty(shape, np.int32)
        self.pin = pin
        """Whether batches are made in pinned memory, which speeds up copies to a GPU."""

    def clear(self) -> None:
        """Begin a new batch: padding everywhere."""
        self._flat_ids.fill(self.pad_id)
        if self._flat_weights is not None:
            self._flat_weights.fill(0)

    def lay_ids(self, source: NDArray[np.uint32], starts: list[int], lengths: list[int], places: list[int]) -> None:
        """Copy `source[start : start + length]` to each place, counted in tokens over all rows of the buffer."""
        _copy(self._flat_ids, source, starts, lengths, places)

    def lay_weights(self, source: NDArray[Any], starts: list[int], lengths: list[int], places: list[int]) -> None:
        """Do the same for token-aligned weights."""
        if self._flat_weights is not None:
            _copy(self._flat_weights, source, starts, lengths, places)

    def lay_trees(self, branches: Branches, lengths: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        """Lay positions and ends of trees with these lengths at their places; a branch begins with no target."""
        if self.tree_columns is None:
            return
        positions, ends = branches.positions_and_ends(lengths)
        at = ranges(places, lengths)
        self.tree_columns[0].reshape(-1)[at] = positions
        self.tree_columns[1].reshape(-1)[at] = ends + np.repeat(places % self.width, lengths)
        if self._flat_weights is not None:
            self._flat_weights[branches.starts + np.repeat(places, branches.counts)] = 0

    def tree_grid(self, tokens: NDArray[np.int64]) -> TreeGrid | None:
        """What the tokens of `x` see, `tokens` of them in each row; the padding after them is a text of its own."""
        if self.tree_columns is None:
            return None
        positions, ends = (column[:, : self.block_size].copy() for column in self.tree_columns)
        place = np.arange(self.block_size, dtype=np.int32)
        padding = place >= tokens[:, None]
        positions[padding] = np.broadcast_to(place - tokens[:, None].astype(np.int32), padding.shape)[padding]
        ends[padding] = self.block_size
        return TreeGrid(position_ids=positions, ends=np.minimum(ends, np.int32(self.block_size)))

    def document_starts(self, laid: LaidRows, most: int) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """Return where documents start as (rows, most), padded with -1, and how many tokens of each row `x` holds.

        A document of one token in the last place of a row is a target only: it does not begin inside `x`.
        """
        import torch

        starts = np.full((self.batch_size, most), -1, dtype=np.int64)
        starts[:, 0] = 0
        first = np.flatnonzero(np.diff(laid.slots, prepend=-1))
        number = np.arange(len(laid.slots)) - np.repeat(first, np.diff(first, append=len(laid.slots)))
        inside = laid.starts < self.block_size
        starts[laid.slots[inside], number[inside]] = laid.starts[inside]
        tokens = np.bincount(laid.slots, weights=laid.lengths, minlength=self.batch_size).astype(np.int64)
        return torch.from_numpy(starts), np.minimum(tokens, self.block_size)

    def targets(self, values: NDArray[np.float32], laid: LaidRows) -> torch.Tensor:
        """Values of the tokens that were laid as a tensor aligned with y; 0 on padding."""
        wide = np.zeros((self.batch_size, self.width), dtype=np.float32)
        wide.reshape(-1)[ranges(laid.slots * self.width + laid.starts, laid.lengths)] = values
        tensor, array = self._new(np.float32)
        array[...] = next_token(wide)
        return tensor

    def tensors(self, real: int) -> tuple[torch.Tensor, ...]:
        """New contiguous tensors `(x, y)` or `(x, y, mask)`; rows from `real` on are padding.

        Without a mask the targets of padding rows are `IGNORE_INDEX`.
        """
        x, inputs = self._new(np.int64)
        y, targets = self._new(np.int64)
        inputs[...] = model_inputs(self.ids)
        targets[...] = next_token(self.ids)
        if self.weights is None:
            targets[real:] = IGNORE_INDEX
            return x, y
        mask, weights = self._new(np.float32)
        weights[...] = next_token(self.weights)
        return x, y, mask

    def _new(self, dtype: type[np.generic]) -> tuple[torch.Tensor, NDArray[Any]]:
        """Return a tensor and the array that shares its memory; every batch has its own, so none is overwritten.

        The memory is numpy's: torch's allocator gives fresh pages each time, and touching them costs as much as
        the copy. Pinned memory comes from torch, which reuses it.
        """
        import torch

        shape = (self.batch_size, self.block_size)
        if not self.pin:
            array = np.empty(shape, dtype=dtype)
            return torch.from_numpy(array), array
        tensor = torch.empty(shape, dtype=getattr(torch, np.dtype(dtype).name), pin_memory=True)
        return tensor, tensor.numpy()


def _copy(target: NDArray[Any], source: NDArray[Any], starts: list[int], lengths: list[int], places: list[int]) -> None:
    """Slice by slice, without a temporary; equal types go through memoryviews, whose slices are cheaper."""
    to: Any = target.data if target.dtype == source.dtype else target
    out_of: Any = source.data if target.dtype == source.dtype else source
    for start, length, place in zip(starts, lengths, places, strict=True):
        to[place : place + length] = out_of[start : start + length]
