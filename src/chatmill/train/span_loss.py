"""The loss of spec 5: one mean over reasoning tokens plus one over answer tokens, of the whole global batch.

`L = w_r * mean(loss | span 1) + w_f * mean(loss | span 2)`, where a mean is `sum(loss * mask) / sum(mask)` over
the *global* batch: all micro-batches of a step and all ranks. Sums and counts are reduced, never means, so a batch
may be split any way and gives the same loss and the same gradient.

One batch:            span_normalized_loss(loss, span_id, mask).loss.backward()
Data parallel:        the same with group=, inside DistributedDataParallel as it is (it averages gradients).
Accumulation:         the counts of the step come first, because each backward pass needs them:

    counts = sum_counts(span_counts(b.span_id, b.loss_mask) for b in micro_batches).reduced(group)
    parts = []
    for b in micro_batches:
        part = span_normalized_loss(token_loss(b), b.span_id, b.loss_mask, group=group, counts=counts)
        part.loss.backward()
        parts.append(part.detached())
    total = sum_losses(parts)          # equal to the result of the one big batch

Alignment: `per_token_loss`, `span_id` and `loss_mask` are label-aligned and of one shape: position `t` speaks of the
token that is predicted at `t`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from chatmill.errors import DataError

SPAN_REASONING = 1
"""The span id of reasoning tokens (the analysis channel of Harmony)."""
SPAN_FINAL = 2
"""The span id of answer tokens (the final channel)."""
Part = TypeVar("Part")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanCounts:
    """How much mask each span has: token counts where the mask is 0 and 1. Scalars on the device of the batch."""

    tokens_r: Tensor
    tokens_f: Tensor

    def __add__(self, other: SpanCounts) -> SpanCounts:
        return SpanCounts(tokens_r=self.tokens_r + other.tokens_r, tokens_f=self.tokens_f + other.tokens_f)

    def reduced(self, group: Any | None) -> SpanCounts:
        """Summed over the ranks of a process group (a collective call); unchanged where `group` is None."""
        tokens_r, tokens_f = all_sum(torch.stack((self.tokens_r, self.tokens_f)), group).unbind()
        return SpanCounts(tokens_r=tokens_r, tokens_f=tokens_f)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanLoss:
    """The loss and what it is made of, as scalars on the device of the batch; only `loss` carries a gradient.

    Every value is that of all ranks of the group, and the same on each of them. With `counts` (accumulation) it is
    this micro-batch's share of the step: the shares of a step add up to the result of the one big batch.
    """

    loss: Tensor
    """`w_r * loss_r + w_f * loss_f`; differentiable, see `span_normalized_loss` for the scale on a rank."""
    loss_r: Tensor
    """Mean loss of reasoning tokens; 0 where there are none."""
    loss_f: Tensor
    """Mean loss of answer tokens; 0 where there are none."""
    sum_r: Tensor
    """`sum(loss * mask)` over reasoning tokens."""
    sum_f: Tensor
    tokens_r: Tensor
    """`sum(mask)` over reasoning tokens: their number where the mask is 0 and 1."""
    tokens_f: Tensor
    w_r: float
    """The weights as applied."""
    w_f: float

    def __add__(self, other: SpanLoss) -> SpanLoss:
        """The shares of two micro-batches of one step together."""
        if (self.w_r, self.w_f) != (other.w_r, other.w_f):
            raise DataError(
                f"losses of one step with different weights: w_r {self.w_r} and {other.w_r}, "
                f"w_f {self.w_f} and {other.w_f}; change weights between steps"
            )
        return SpanLoss(
            **{name: getattr(self, name) + getattr(other, name) for name in _SCALARS}, w_r=self.w_r, w_f=self.w_f
        )

    def detached(self) -> SpanLoss:
        """The same without the gradient, to be kept for the log without keeping the graph."""
        return replace(self, loss=self.loss.detach())

    def values(self) -> dict[str, float]:
        """All nine as Python floats for a log: one copy from the device."""
        scalars = torch.stack([getattr(self, name).detach().to(self.sum_r.dtype) for name in _SCALARS]).tolist()
        return {**dict(zip(_SCALARS, scalars, strict=True)), "w_r": self.w_r, "w_f": self.w_f}


_SCALARS = ("loss", "loss_r", "loss_f", "sum_r", "sum_f", "tokens_r", "tokens_f")


def span_normalized_loss(
    per_token_loss: Tensor,
    span_id: Tensor,
    loss_mask: Tensor | None = None,
    w_r: float = 1.0,
    w_f: float = 1.0,
    group: Any | None = None,
    *,
    counts: SpanCounts | None = None,
) -> SpanLoss:
    """`w_r * mean(loss | span 1) + w_f * mean(loss | span 2)` over the global batch; a span without tokens gives 0.

    - `loss_mask`: the weight of each position, by default 1 wherever a span is; where it is 0, whatever the loss
      there (even NaN) counts for nothing. Positions of other span ids never count.
    - `group`: a process group over whose ranks sums and counts are added (every rank calls, equally often); None
      is this process alone. `torch.distributed.group.WORLD` is all ranks.
    - `counts`: those of the whole step, all micro-batches and all ranks, for gradient accumulation; by default
      those of this batch, reduced over `group`.

    Gradient: `loss` has the value of the global batch on every rank, and its gradient on a rank is that rank's
    own share times the number of ranks. So the *mean* over ranks, which DistributedDataParallel takes, is the
    gradient of the global batch; whoever *sums* gradients over ranks divides by the group's size.
    Sums are made in float64, also of bfloat16 losses; `loss`, `loss_r` and `loss_f` are at least float32.
    """
    check_shapes(per_token_loss=per_token_loss, span_id=span_id, loss_mask=loss_mask)
    weights_r, weights_f = _weights(span_id, loss_mask)
    own_r, own_f = _weighted_sum(per_token_loss, weights_r), _weighted_sum(per_token_loss, weights_f)
    here = _count(weights_r), _count(weights_f)
    sum_r, sum_f, tokens_r, tokens_f = all_sum(torch.stack((own_r.detach(), own_f.detach(), *here)), group).unbind()
    total = SpanCounts(tokens_r=tokens_r, tokens_f=tokens_f) if counts is None else counts
    loss_r, loss_f = _mean(sum_r, total.tokens_r), _mean(sum_f, total.tokens_f)
    value = w_r * loss_r + w_f * loss_f
    share = (w_r * _mean(own_r, total.tokens_r) + w_f * _mean(own_f, total.tokens_f)) * _ranks(group)
    dtype = torch.promote_types(per_token_loss.dtype, torch.float32)
    return SpanLoss(
        loss=(share + (value - share.detach())).to(dtype),
        loss_r=loss_r.to(dtype),
        loss_f=loss_f.to(dtype),
        sum_r=sum_r,
        sum_f=sum_f,
        tokens_r=tokens_r,
        tokens_f=tokens_f,
        w_r=w_r,
        w_f=w_f,
    )


def span_counts(span_id: Tensor, loss_mask: Tensor | None = None, group: Any | None = None) -> SpanCounts:
    """The counts of one batch, before any model has run; summed over the ranks of `group` where one is given."""
    check_shapes(span_id=span_id, loss_mask=loss_mask)
    weights_r, weights_f = _weights(span_id, loss_mask)
    return SpanCounts(tokens_r=_count(weights_r), tokens_f=_count(weights_f)).reduced(group)


def sum_counts(counts: Iterable[SpanCounts]) -> SpanCounts:
    """The counts of several micro-batches together; at least one."""
    return functools.reduce(operator.add, _some(counts))


def sum_losses(parts: Iterable[SpanLoss]) -> SpanLoss:
    """The shares of all micro-batches of a step as the result of the one big batch; at least one."""
    return functools.reduce(operator.add, _some(parts))


def _some(parts: Iterable[Part]) -> list[Part]:
    listed = list(parts)
    if not listed:
        raise DataError("a step has no micro-batch: there is nothing to add up")
    return listed


def check_shapes(**columns: Tensor | None) -> None:
    """Refuse columns of different shapes, naming all of them."""
    shapes = {name: tuple(column.shape) for name, column in columns.items() if column is not None}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise DataError(f"shapes differ: {listed}; all are label-aligned with one value per position")


def _weights(span_id: Tensor, loss_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The weight of every position in span 1 and in span 2, bool or float."""
    reasoning, final = span_id == SPAN_REASONING, span_id == SPAN_FINAL
    if loss_mask is None:
        return reasoning, final
    return loss_mask * reasoning, loss_mask * final


def _weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """`sum(losses * weights)`; losses where the weight is 0 are left out, so a NaN there does no harm."""
    kept = torch.where(weights != 0, losses, 0)
    wide = wide_dtype(losses.device)
    return kept.sum(dtype=wide) if weights.dtype == torch.bool else (kept.to(wide) * weights).sum()


def _count(weights: Tensor) -> Tensor:
    return weights.sum(dtype=wide_dtype(weights.device))


def wide_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums: float64, in which counts of tokens stay exact (Apple's GPUs have float32 only)."""
    return torch.float32 if device.type == "mps" else torch.float64


def _mean(total: Tensor, tokens: Tensor) -> Tensor:
    """`total / tokens`, and 0 (with a gradient of 0) where there are no tokens."""
    return torch.where(tokens > 0, total / torch.where(tokens > 0, tokens, 1), 0)


def all_sum(values: Tensor, group: Any | None) -> Tensor:
    """The sum over the ranks of a group (a collective call); unchanged where `group` is None."""
    if group is None:
        return values
    total = values.clone()
    torch.distributed.all_reduce(total, group=group)
    return total


def _ranks(group: Any | None) -> int:
    return 1 if group is None else torch.distributed.get_world_size(group)
