"""A batch of packed rows: four tensors, and the boundaries in every form that an attention kernel reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.blocks import DocumentSegments, TreeGrid, boundaries_from_starts
from chatmill.errors import ConfigError
from chatmill.load.boundary_keys import Needs, one_document_a_row
from chatmill.load.model_needs import NO_TREES, needs_of, reads_trees
from chatmill.load.teacher import TEACHER_COLUMNS

if TYPE_CHECKING:
    import torch


class _Four(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor
    mask: torch.Tensor
    document_starts: torch.Tensor


class PackedBatch(_Four):
    """`(x, y, mask, document_starts)`: unpacks as these four, and knows the rest.

    - `x`, `y`: (batch, block) int64; `mask`: float32, aligned with y; 0 on padding and on the first token of every
      document, because the token before it belongs to another one.
    - `document_starts`: (batch, most documents of a row) int64, padded with -1. A row of padding has the one start 0.
    """

    tokens: NDArray[np.int64] | None = None
    """Tokens in each row of `x`; what follows is padding, whatever its id."""
    trees: TreeGrid | None = None
    """What each token sees, where documents are trees."""
    extra: Mapping[str, torch.Tensor] = {}
    """What was asked for next to the four, by name."""

    @classmethod
    def of(
        cls,
        four: tuple[torch.Tensor, ...],
        tokens: NDArray[np.int64],
        trees: TreeGrid | None = None,
        extra: Mapping[str, torch.Tensor] | None = None,
    ) -> PackedBatch:
        """The four tensors with the number of tokens in each row of `x`, and what these see where they are trees."""
        batch = cls(*four)
        batch.tokens, batch.trees, batch.extra = tokens, trees, extra or {}
        return batch

    @property
    def logprobs(self) -> torch.Tensor | None:
        """(batch, block) float32: the log-probability of each target, if asked for (`logprobs=True`)."""
        return self.extra.get("logprobs")

    @property
    def teacher(self) -> tuple[torch.Tensor, ...]:
        """`teacher_ids`, `teacher_logprobs` and `teacher_rest`, if asked for (`teacher=True`)."""
        return tuple(self.extra[name] for name in TEACHER_COLUMNS if name in self.extra)

    @cached_property
    def segments(self) -> DocumentSegments:
        """Documents, and the padding after the last of a row as a segment of its own."""
        if self.tokens is None:
            raise ConfigError(
                "this batch lost the lengths of its rows on the way (torch's default conversion keeps the four tensors "
                "only): give the DataLoader a collate_fn that returns the batch as it is"
            )
        starts = self.document_starts.cpu().numpy().copy()
        starts[self.tokens == 0] = -1
        return replace(boundaries_from_starts(starts, self.tokens).segments(self.x.shape[1]), trees=self.trees)

    @property
    def position_ids(self) -> torch.Tensor:
        """(batch, block): the place of each token in its document, or its depth in its tree, from 0."""
        return self._tensor(self.segments.position_ids)

    @property
    def ends(self) -> torch.Tensor:
        """(batch, block) int32: token q of a row sees token k when `k <= q < ends[k]`, in documents and in trees."""
        return self._tensor(self.segments.ends)

    @property
    def seq_idx(self) -> torch.Tensor:
        """(batch, block) int32: the number of each token's segment, from 0 in its row."""
        return self._tensor(self.segments.seq_idx)

    def cu_seqlens(self, size: int | None = None) -> torch.Tensor:
        """int32 cumulative lengths over the batch as one long row; `size` pads to a fixed count."""
        return self._tensor(self.segments.cu_seqlens(size))

    @property
    def max_seqlen(self) -> int:
        """Tokens in the longest segment."""
        return self.segments.max_seqlen

    def dense_mask(self) -> torch.Tensor:
        """(batch, 1, block, block) additive float mask."""
        from chatmill.load.document_masks import dense_mask

        return dense_mask(self.ends)

    def flex_mask(self) -> Any:
        """Return a FlexAttention `BlockMask`."""
        from chatmill.load.document_masks import flex_mask

        return flex_mask(self.ends)

    def inputs(self, model: Any) -> dict[str, Any]:
        """Make the `inputs` of `model(**inputs)` that keep documents apart.

        `model` is a transformers model, its config, the name of its attention, or its `Needs`. If its kernels want one
        row, the batch is flattened: logits follow `y.flatten()`.
        """
        if self.trees is not None and not reads_trees(model):
            raise ConfigError(NO_TREES)
        needs = needs_of(model)
        if needs is None:
            if int((self.document_starts >= 0).sum(1).max()) > 1:
                raise ConfigError(one_document_a_row(model))
            needs = Needs(keys=frozenset())
        segments, x = self.segments, self.x
        if needs.one_row:
            segments = replace(segments, rows=1, width=x.numel())
            x = x.reshape(1, -1)
        if x.shape[1] % needs.multiple:
            raise ConfigError(
                f"rows have {x.shape[1]} tokens, and kernels of this model want a multiple of {needs.multiple}: choose "
                "such a block_size"
            )
        inputs = needs.inputs(segments, getattr(model, "dtype", None), device=x.device)
        inputs = {
            name: self._tensor(value) if isinstance(value, np.ndarray) else value for name, value in inputs.items()
        }
        return {"input_ids": x, "position_ids": self._tensor(segments.position_ids), "use_cache": False, **inputs}

    def _tensor(self, values: NDArray[Any]) -> torch.Tensor:
        import torch

        return torch.from_numpy(values).to(self.x.device)

    def to(self, device: Any, non_blocking: bool = False) -> PackedBatch:
        """Return the same batch with its tensors on another device."""
        moved = tuple(tensor.to(device, non_blocking=non_blocking) for tensor in self)
        assert self.tokens is not None
        extra = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.extra.items()}
        return PackedBatch.of(moved, self.tokens, self.trees, extra)
