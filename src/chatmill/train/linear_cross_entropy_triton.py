# mypy: ignore-errors
"""The GPU kernels of `linear_cross_entropy`: logits to their gradient in place, and a scaling that is free for 1.

Imported only where a CUDA device is in use and Triton is installed.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

SOFTMAX_BLOCK = 8192
SOFTMAX_WARPS = 8
SOFTMAX_STAGES = 4
SCALE_BLOCK = 4096
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _softmax_gradient(
    logits,
    labels,
    factors,
    losses,
    row_stride,
    vocabulary,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per row: the loss, and `(softmax - one_hot) * factor` written over the logits."""
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * row_stride
    label = tl.load(labels + row)
    at_label = tl.load(base + label).to(tl.float32)
    lanes = tl.arange(0, BLOCK)
    blocks = tl.cdiv(vocabulary, BLOCK)
    highest = float("-inf")
    total = 0.0
    for block in tl.range(0, blocks, num_stages=STAGES):
        columns = block * BLOCK + lanes
        values = tl.load(base + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
        raised = tl.maximum(highest, tl.max(values, 0))
        total = total * tl.exp2((highest - raised) * LOG2_E)
        total += tl.sum(tl.exp2((values - raised) * LOG2_E), 0)
        highest = raised
    log_sum = highest + tl.log2(total) * LN_2
    tl.store(losses + row, log_sum - at_label)
    if GRADIENT:
        factor = tl.load(factors + row)
        # Last block first: what was read last is still in the L2 cache.
        for step in tl.range(0, blocks, num_stages=STAGES):
            columns = (blocks - 1 - step) * BLOCK + lanes
            inside = columns < vocabulary
            values = tl.load(base + columns, mask=inside, other=float("-inf")).to(tl.float32)
            softmax = tl.exp2((values - log_sum) * LOG2_E)
            gradient = tl.where(columns == label, softmax - 1.0, softmax) * factor
            tl.store(base + columns, gradient.to(logits.dtype.element_ty), mask=inside)


def softmax_gradient_(logits: Tensor, labels: Tensor, factors: Tensor, *, gradient: bool) -> Tensor:
    """The losses `(rows,)` in float32; with `gradient`, the logits become their gradient times `factors`."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    block = min(SOFTMAX_BLOCK, max(128, triton.next_power_of_2(logits.shape[1])))
    with torch.cuda.device(logits.device):
        _softmax_gradient[(len(logits),)](
            logits,
            labels,
            factors,
            losses,
            logits.stride(0),
            logits.shape[1],
            gradient,
            block,
            SOFTMAX_STAGES,
            num_warps=SOFTMAX_WARPS,
        )
    return losses


@triton.jit
def _scale(values, scale, count, BLOCK: tl.constexpr):
    """Multiply by a number that only the GPU knows; by 1, nothing is read or written."""
    factor = tl.load(scale)
    if factor != 1.0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, step):
            lanes = start + tl.arange(0, BLOCK)
            inside = lanes < count
            scaled = tl.load(values + lanes, mask=inside, other=0.0).to(tl.float32) * factor
            tl.store(values + lanes, scaled.to(values.dtype.element_ty), mask=inside)


def scale_(values: Tensor, scale: Tensor) -> Tensor:
    """Multiply a contiguous tensor in place by a float32 scalar on the same device; free where it is 1."""
    programs = min(triton.cdiv(values.numel(), SCALE_BLOCK), 8 * _processors(values.device))
    with torch.cuda.device(values.device):
        _scale[(max(1, programs),)](values, scale, values.numel(), SCALE_BLOCK, num_warps=8)
    return values


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
