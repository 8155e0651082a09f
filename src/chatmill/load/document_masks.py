"""What tokens of packed rows see, as masks for attention: dense tensors, and block masks for FlexAttention.

One rule holds for documents and for trees: token q of a row sees token k when `k <= q < ends[k]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

BLOCK = 128
"""Tokens of the blocks that FlexAttention skips or takes whole."""


def ends_of(seq_idx: torch.Tensor) -> torch.Tensor:
    """Compute the ends of documents from segment numbers `(B, T)`: int32, on the same device."""
    import torch

    width = seq_idx.shape[1]
    places = torch.arange(1, width + 1, device=seq_idx.device, dtype=torch.int32).expand(seq_idx.shape)
    is_last = torch.ones_like(seq_idx, dtype=torch.bool)
    is_last[:, :-1] = seq_idx[:, 1:] != seq_idx[:, :-1]
    ends = torch.where(is_last, places, width).flip(1).cummin(1).values.flip(1)
    return ends.to(torch.int32)


def dense_mask(ends: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a (B, 1, T, T) additive mask of ends `(B, T)`: 0 where a token may look, the lowest float elsewhere.

    Float (float32 unless another dtype is asked for), not bool: transformers' eager attention adds the mask, and a
    bool one would silently do nothing.
    """
    import torch

    dtype = dtype or torch.float32
    place = torch.arange(ends.shape[1], device=ends.device)
    allowed = (place[None, :, None] >= place) & (place[None, :, None] < ends[:, None, :])
    lowest = torch.finfo(dtype).min
    return torch.zeros(allowed.shape, dtype=dtype, device=ends.device).masked_fill(~allowed, lowest)[:, None]


def mask_mod(ends: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return the same rule as a FlexAttention `mask_mod(b, h, q, k)`."""

    def sees(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q >= k) & (q < ends[b, k])

    return sees


def flex_mask(ends: torch.Tensor) -> Any:
    """Make a FlexAttention `BlockMask` from ends `(B, T)`, for every head, on the device of `ends`."""
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    rows, width = ends.shape
    blocks = -(-width // BLOCK)
    padded = torch.full((rows, blocks * BLOCK), 0, dtype=ends.dtype, device=ends.device)
    padded[:, :width] = ends
    parts = padded.view(rows, blocks, BLOCK)
    first = torch.arange(blocks, device=ends.device) * BLOCK  # of each block
    earlier = first[:, None] > first
    visible = (parts.amax(-1)[:, None, :] > first[:, None]) & earlier
    whole = (parts.amin(-1)[:, None, :] >= first[:, None] + BLOCK) & earlier
    visible |= torch.eye(blocks, dtype=torch.bool, device=ends.device)
    return BlockMask.from_kv_blocks(
        *_listed(visible & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod(ends),
        seq_lengths=(width, width),
    )


def _listed(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many blocks of keys each block of queries takes, and their numbers, those first."""
    import torch

    numbers = torch.argsort(chosen.to(torch.int32), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[:, None], numbers.to(torch.int32)[:, None]


def dense_document_mask(seq_idx: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`dense_mask` of documents with the segment numbers `(B, T)`."""
    return dense_mask(ends_of(seq_idx), dtype)


def flex_document_mask(seq_idx: torch.Tensor) -> Any:
    """`flex_mask` of documents with the segment numbers `(B, T)`."""
    return flex_mask(ends_of(seq_idx))
