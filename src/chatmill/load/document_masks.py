"""Attention masks that keep the documents of packed rows apart, from the number of each token's document."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def dense_document_mask(seq_idx: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The causal document mask `(B, 1, T, T)` of segment numbers `(B, T)`, to be added to attention scores.

    0 where query q may see key k (same segment, k <= q), else the lowest value of `dtype` (default: float32). Float,
    because a bool mask fails silently in the eager attention of transformers.
    """
    import torch

    dtype = dtype or torch.float32
    same = seq_idx[:, :, None] == seq_idx[:, None, :]
    allowed = same & torch.ones(same.shape[1:], dtype=torch.bool, device=seq_idx.device).tril()
    return torch.zeros(same.shape, dtype=dtype, device=seq_idx.device).masked_fill(~allowed, torch.finfo(dtype).min)[
        :, None
    ]


def document_mask_mod(seq_idx: torch.Tensor) -> Callable[..., torch.Tensor]:
    """The same rule as a FlexAttention `mask_mod(b, h, q, k)`."""

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q >= k) & (seq_idx[b, q] == seq_idx[b, k])

    return mask_mod


def flex_document_mask(seq_idx: torch.Tensor) -> Any:
    """A FlexAttention `BlockMask` of segment numbers `(B, T)`, for every head; on the device of `seq_idx`."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows, width = seq_idx.shape
    return create_block_mask(
        document_mask_mod(seq_idx), B=rows, H=None, Q_LEN=width, KV_LEN=width, device=str(seq_idx.device)
    )
