"""Causal attention that keeps the documents of packed rows apart: SDPA, FlexAttention or varlen, chosen by itself.

A batch is prepared once (`prepare`): its document borders become the one form that the chosen kernel reads. Every
layer then calls `attend` with that form. Rows of one document each need no form at all: plain causal attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from chatmill.core.blocks import Segments
from chatmill.errors import ConfigError
from chatmill.load.document_masks import flex_document_mask


class Attention(StrEnum):
    """Which kernel keeps documents apart."""

    AUTO = "auto"
    """Varlen on a GPU in half precision where torch has it, else FlexAttention on a GPU, else SDPA."""
    SDPA = "sdpa"
    """`scaled_dot_product_attention` with a dense mask: everywhere, in every precision, quadratic in memory."""
    FLEX = "flex"
    """FlexAttention with a block mask, compiled: a GPU, any precision."""
    VARLEN = "varlen"
    """Flash attention over `cu_seqlens`: a GPU, bfloat16 or float16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDocuments:
    """The places of the documents of a (rows, width) batch, as tensors on the batch's device."""

    position_ids: torch.Tensor
    """(rows, width) int64: the place of each token in its document, from 0."""
    seq_idx: torch.Tensor | None = None
    """(rows, width): the number of each token's document in its row; None when each row is one document."""
    cu_seqlens: torch.Tensor | None = None
    """int32: cumulative lengths over the batch as one long row, the last value repeated up to a fixed size."""


def whole_row_documents(shape: Sequence[int], device: torch.device) -> RowDocuments:
    """Each row is one document (padding behind it is never looked at by what comes before)."""
    return RowDocuments(position_ids=torch.arange(shape[1], device=device).expand(*shape))


def documents_of_segments(segments: Segments, device: torch.device, *, most: int | None = None) -> RowDocuments:
    """Documents of packed rows; `most` documents a row at most gives `cu_seqlens` a size that never changes."""
    size = None if most is None else segments.rows * (most + 1) + 1

    def tensor(values: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)

    return RowDocuments(
        position_ids=tensor(segments.position_ids),
        seq_idx=tensor(segments.seq_idx),
        cu_seqlens=tensor(segments.cu_seqlens(size)),
    )


def documents_of_positions(position_ids: torch.Tensor, seq_idx: torch.Tensor | None = None) -> RowDocuments:
    """Documents read from positions that restart at 0, or from `seq_idx`, the number of each token's document."""
    if seq_idx is None:
        seq_idx = (position_ids == 0).cumsum(1) - 1
    begins = torch.ones_like(seq_idx, dtype=torch.bool)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    total = torch.tensor([seq_idx.numel()], device=seq_idx.device)
    cu_seqlens = torch.cat([begins.reshape(-1).nonzero()[:, 0], total]).int()
    return RowDocuments(position_ids=position_ids, seq_idx=seq_idx, cu_seqlens=cu_seqlens)


Form = Any
"""What a kernel reads: None (plain causal), a bool tensor (rows, 1, width, width) for SDPA, an int32 tensor of
`cu_seqlens` for varlen, or a FlexAttention `BlockMask`."""


def choose_attention(asked: Attention | str, device: torch.device, dtype: torch.dtype) -> Attention:
    """The kernel to use on a device for activations of a dtype; one that cannot run there is a `ConfigError`."""
    kind = Attention(asked)
    half = dtype in (torch.bfloat16, torch.float16)
    if kind is Attention.AUTO:
        if device.type != "cuda" or dtype == torch.float64:
            return Attention.SDPA
        return Attention.VARLEN if half and _has_varlen() else Attention.FLEX
    if kind is Attention.VARLEN and (device.type != "cuda" or not half or not _has_varlen()):
        raise ConfigError(
            f"attention 'varlen' needs a CUDA device, bfloat16 or float16, and torch.nn.attention.varlen; here: "
            f"{device.type}, {dtype}, torch {torch.__version__}. Use 'auto'"
        )
    if kind is Attention.FLEX and device.type != "cuda":
        raise ConfigError("attention 'flex' has no backward pass outside CUDA; use 'auto' or 'sdpa'")
    return kind


def prepare(documents: RowDocuments, kind: Attention) -> Form:
    """The borders of a batch in the form that the kernel reads; made once, used by every layer."""
    if documents.seq_idx is None:
        return None
    if kind is Attention.VARLEN:
        return documents.cu_seqlens
    if kind is Attention.FLEX:
        _flex_kernel()
        return flex_document_mask(documents.seq_idx)
    same = documents.seq_idx[:, :, None] == documents.seq_idx[:, None, :]
    return same.tril_()[:, None]


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: Form) -> torch.Tensor:
    """Causal attention inside documents: (rows, heads, width, size) -> the same shape.

    `key` and `value` may have fewer heads (grouped queries): each serves `heads / their heads` query heads.
    """
    grouped = query.shape[1] != key.shape[1]
    if form is None:
        causal = query.shape[2] == key.shape[2]
        if not causal and query.shape[2] > 1:
            raise ConfigError("a cache takes one new token at a time")
        return scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=grouped)
    if isinstance(form, torch.Tensor) and form.ndim == 1:
        return _varlen(query, key, value, form, grouped)
    if isinstance(form, torch.Tensor):
        repeats = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        return scaled_dot_product_attention(query, key, value, attn_mask=form)
    # inside a compiled layer the kernel is compiled with it
    flex = _FOUND["flex" if torch.compiler.is_compiling() else "compiled_flex"]
    out: torch.Tensor = flex(query, key, value, block_mask=form, enable_gqa=grouped)
    return out


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, grouped: bool
) -> torch.Tensor:
    """Rows laid end to end; no document is longer than a row, so its width is a bound that never changes."""
    rows, heads, width, size = query.shape
    options: dict[str, Any] = dict(_FOUND["varlen_causal"])
    if grouped and _FOUND["varlen_groups"]:
        options["enable_gqa"] = True
    elif grouped:
        repeats = heads // key.shape[1]
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    flat = [tensor.transpose(1, 2).reshape(rows * width, -1, size) for tensor in (query, key, value)]
    out: torch.Tensor = _FOUND["varlen"](*flat, cu_seqlens, cu_seqlens, width, width, **options)
    return out.view(rows, width, heads, size).transpose(1, 2)


_FOUND: dict[str, Any] = {}
"""Kernels that were looked for: importing them takes seconds, and compiled code reads them from here."""


def _has_varlen() -> bool:
    """Whether this torch has varlen attention; which arguments say "causal" and "grouped" is noted."""
    if "varlen" not in _FOUND:
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError:
            _FOUND["varlen"] = None
            return False
        known = inspect.signature(varlen_attn).parameters
        _FOUND["varlen_causal"] = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
        _FOUND["varlen_groups"] = "enable_gqa" in known
        _FOUND["varlen"] = varlen_attn
    return _FOUND["varlen"] is not None


def _flex_kernel() -> None:
    if "flex" not in _FOUND:
        from torch.nn.attention.flex_attention import flex_attention

        _FOUND["compiled_flex"] = torch.compile(flex_attention, dynamic=False)
        _FOUND["flex"] = flex_attention
