"""Losses as sums and counts: no split of a batch over micro-batches or ranks changes the loss or its gradient.

A mean of means is wrong as soon as two micro-batches, or two ranks, hold different numbers of trained tokens. So
sums and counts are added up over the *global* batch (all micro-batches of a step, all ranks), and divided last:

    weighted_loss         L = sum(weight * loss) / sum(weight)
    span_normalized_loss  L = w_r * mean(loss | span 1) + w_f * mean(loss | span 2)       (spec 5)

One batch:      weighted_loss(token_losses(logits, labels), weights).loss.backward()
Data parallel:  the same with group=, inside DistributedDataParallel as it is (it averages gradients).
Accumulation:   what a loss divides by depends on the labels alone, so the counts of a step come first:

    counts = sum(weight_counts(b.weights, group) for b in micro_batches)  # or span_counts(b.span_id, b.mask, group)
    total = None
    for b in micro_batches:
        part = weighted_loss(token_losses(logits(b), b.labels), b.weights, group=group, counts=counts)
        part.loss.backward()
        total = part.detached() if total is None else total + part.detached()   # in the end, that of one big batch

Alignment: all columns are label-aligned and of one shape; position `t` speaks of the token predicted at `t`
(`chatmill.core.shift`). Polarity: a weight other than 0 means "train on this token".
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from chatmill.core.shift import IGNORE_INDEX
from chatmill.errors import DataError

SPAN_REASONING = 1
"""The span id of reasoning tokens (the analysis channel of Harmony)."""
SPAN_FINAL = 2
"""The span id of answer tokens (the final channel)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    """What both losses share: values are those of all ranks of the group, and the same on each of them.

    With `counts` (accumulation) a result is one micro-batch's share: the shares of a step add up to the result of the
    one big batch. Only `loss` carries a gradient.
    """

    loss: Tensor

    def __add__(self, other: Self) -> Self:
        """Add the shares of two micro-batches of one step."""
        both = {field.name: (getattr(self, field.name), getattr(other, field.name)) for field in fields(self)}
        for name, (left, right) in both.items():
            if not isinstance(left, Tensor) and left != right:
                raise DataError(
                    f"losses of a step with different weights: {name} {left} and {right}; change weights between steps"
                )
        return replace(self, **{name: left + right for name, (left, right) in both.items() if isinstance(left, Tensor)})

    def detached(self) -> Self:
        """Drop the gradient, to keep the values for a log without keeping the graph."""
        return replace(self, loss=self.loss.detach())

    def values(self) -> dict[str, float]:
        """Return everything as Python floats, with one copy from the device."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        wide = _wide(self.loss.device)
        scalars = {name: value.detach().to(wide) for name, value in named.items() if isinstance(value, Tensor)}
        return named | dict(zip(scalars, torch.stack(list(scalars.values())).tolist(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedLoss(_Loss):
    """The weighted mean, and what it is made of."""

    sum: Tensor
    """`sum(weight * loss)`."""
    tokens: Tensor
    """`sum(weight)`: the number of trained tokens if weights are 0 and 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanLoss(_Loss):
    """The loss of spec 5, `w_r * loss_r + w_f * loss_f`, and what it is made of."""

    loss_r: Tensor
    """Mean loss of reasoning tokens; 0 without any."""
    loss_f: Tensor
    """Mean loss of answer tokens; 0 without any."""
    sum_r: Tensor
    """`sum(loss * mask)` over reasoning tokens."""
    sum_f: Tensor
    tokens_r: Tensor
    """`sum(mask)` over reasoning tokens: their number if the mask is 0 and 1."""
    tokens_f: Tensor
    w_r: float
    """The weights as applied."""
    w_f: float


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy of each position, 0 where the label is -100; softmax in float32 (or float64)."""
    _check_shapes(labels=labels, logits=logits[..., 0])
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(
        wide.reshape(-1, wide.shape[-1]), labels.reshape(-1), reduction="none", ignore_index=IGNORE_INDEX
    )
    return losses.view(labels.shape)


def teacher_losses(logits: Tensor, teacher_ids: Tensor, teacher_logprobs: Tensor, teacher_rest: Tensor) -> Tensor:
    """Return KL(teacher || student) of each position, 0 where the teacher has no distribution.

    The k tokens that the teacher names count one by one, and all others as one:
    `sum(p * log(p / q)) + r * log(r / q_r)`, where `r` is the rest mass and `q_r` what the student gives to the tokens
    that are not named. With all tokens named this is the divergence over the vocabulary. `logits` (..., V) have no
    temperature; the others are label-aligned: ids and log-probabilities (..., k), -inf if there is no entry, and
    `teacher_rest` (...).
    """
    _check_shapes(logits=logits[..., 0], teacher_ids=teacher_ids.any(-1), teacher_rest=teacher_rest)
    _check_shapes(teacher_ids=teacher_ids, teacher_logprobs=teacher_logprobs)
    named = torch.isfinite(teacher_logprobs)
    has_teacher = named.any(-1)
    named, ids, rest = named[has_teacher], teacher_ids[has_teacher].long(), teacher_rest[has_teacher]
    if ids.numel() and int(ids.max()) >= logits.shape[-1]:
        raise DataError(f"the teacher names the id {int(ids.max())}, and the student has {logits.shape[-1]:,} logits")
    wide = logits[has_teacher].to(torch.promote_types(logits.dtype, torch.float32))
    total = wide.logsumexp(-1)
    p = torch.where(named, teacher_logprobs[has_teacher], 0).to(wide.dtype)
    q = wide.gather(-1, ids) - total[:, None]
    losses = torch.where(named, p.exp() * (p - q), 0).sum(-1)
    is_named = torch.zeros(wide.shape, dtype=torch.int32, device=wide.device).scatter_add(-1, ids, named.int()) > 0
    has_rest = (rest > 0) & ~is_named.all(-1)
    others = wide.masked_fill(is_named & has_rest[:, None], -torch.inf).logsumexp(-1) - total
    r = torch.where(has_rest, rest, 1).to(wide.dtype)
    losses = losses + torch.where(has_rest, r * (r.log() - others), 0)
    return torch.zeros(has_teacher.shape, dtype=losses.dtype, device=losses.device).masked_scatter(has_teacher, losses)


def weighted_loss(
    per_token_loss: Tensor, weights: Tensor, group: Any | None = None, *, counts: Tensor | None = None
) -> WeightedLoss:
    """`sum(weights * loss) / sum(weights)` over the global batch; 0 if nothing is trained.

    `group` and `counts` (a sum of what `weight_counts` gives), NaN and gradients: as in `span_normalized_loss`.
    """
    _check_shapes(per_token_loss=per_token_loss, weights=weights)
    loss, _, sums, tokens = _normalized(per_token_loss, weights[None], (1.0,), group, counts)
    return WeightedLoss(loss=loss, sum=sums[0], tokens=tokens[0])


def weight_counts(weights: Tensor, group: Any | None = None) -> Tensor:
    """Return what `weighted_loss` divides by, `(1,)`, summed over the ranks of `group`."""
    return _all_sum(_sums(weights[None]), group)


def span_normalized_loss(
    per_token_loss: Tensor,
    span_id: Tensor,
    loss_mask: Tensor | None = None,
    w_r: float = 1.0,
    w_f: float = 1.0,
    group: Any | None = None,
    *,
    counts: Tensor | None = None,
) -> SpanLoss:
    """`w_r * mean(loss | span 1) + w_f * mean(loss | span 2)` over the global batch; a span without tokens gives 0.

    - `loss_mask`: the weight of each position, by default 1 in both spans. Where it is 0, the loss (even NaN) counts
      for nothing. Positions of other span ids never count.
    - `group`: a process group over whose ranks sums and counts are added (every rank calls, equally often); None
      is this process alone. `torch.distributed.group.WORLD` is all ranks.
    - `counts`: what `span_counts` gives, summed over all micro-batches of the step and all ranks, for gradient
      accumulation; by default those of this batch, reduced over `group`.

    Gradient: `loss` has the value of the global batch on every rank, and its gradient on a rank is that rank's
    own share times the number of ranks. So the *mean* over ranks, which DistributedDataParallel takes, is the
    gradient of the global batch; whoever *sums* gradients over ranks divides by the group's size.
    Sums are made in float64, also of bfloat16 losses; `loss`, `loss_r` and `loss_f` are at least float32.
    """
    _check_shapes(per_token_loss=per_token_loss, span_id=span_id, loss_mask=loss_mask)
    loss, *parts = _normalized(per_token_loss, _span_weights(span_id, loss_mask), (w_r, w_f), group, counts)
    (loss_r, loss_f), (sum_r, sum_f), (tokens_r, tokens_f) = parts
    return SpanLoss(loss=loss, loss_r=loss_r, loss_f=loss_f, sum_r=sum_r, sum_f=sum_f, tokens_r=tokens_r,
                    tokens_f=tokens_f, w_r=w_r, w_f=w_f)  # fmt: skip


def span_counts(span_id: Tensor, loss_mask: Tensor | None = None, group: Any | None = None) -> Tensor:
    """Return how much mask the two spans have in one batch, `(2,)`: token counts if the mask is 0 and 1.

    Known before any model has run; summed over the ranks of `group`, if one is given.
    """
    _check_shapes(span_id=span_id, loss_mask=loss_mask)
    return _all_sum(_sums(_span_weights(span_id, loss_mask)), group)


def _normalized(
    per_token_loss: Tensor, weights: Tensor, factors: tuple[float, ...], group: Any | None, counts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`sum(factor * sum(weight * loss) / count)` over the columns of `weights`, `(G, ...)`, one factor for each.

    Also the means, sums and counts of the columns.
    """
    weights = weights.to(_wide(weights.device))
    # The loss of an untrained position may be anything, even NaN: replace it before multiplying.
    local = _sums(torch.where(weights != 0, per_token_loss, 0) * weights)
    sums, here = _all_sum(torch.stack((local.detach(), _sums(weights))), group)
    if counts is not None and (not isinstance(counts, Tensor) or counts.shape != here.shape):
        raise DataError(
            f"counts are {counts!r}; pass the sum of span_counts or weight_counts over the micro-batches of the step"
        )
    step = here if counts is None else counts
    shares = torch.where(step > 0, 1 / torch.where(step > 0, step, 1), 0)
    scales = shares * shares.new_tensor(factors)
    share = (local * scales).sum() * (1 if group is None else torch.distributed.get_world_size(group))
    # Straight-through: the value of all ranks with the gradient of this one.
    loss = share + ((sums * scales).sum() - share.detach())
    dtype = torch.promote_types(per_token_loss.dtype, torch.float32)
    return loss.to(dtype), (sums * shares).to(dtype), sums, here


def _span_weights(span_id: Tensor, loss_mask: Tensor | None) -> Tensor:
    """Compute the weight of each position in span 1 and in span 2, `(2, ...)`."""
    inside = torch.stack([span_id == SPAN_REASONING, span_id == SPAN_FINAL])
    return inside if loss_mask is None else inside * loss_mask


def _sums(columns: Tensor) -> Tensor:
    """Sum each column in float64, in which counts of tokens stay exact."""
    return columns.to(_wide(columns.device)).flatten(1).sum(1)


def _wide(device: torch.device) -> torch.dtype:
    """Choose the dtype of sums; Apple's GPUs have float32 only."""
    return torch.float32 if device.type == "mps" else torch.float64


def _check_shapes(**columns: Tensor | None) -> None:
    """Refuse columns of different shapes, naming all of them."""
    shapes = {name: tuple(column.shape) for name, column in columns.items() if column is not None}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise DataError(f"shapes differ: {listed}; all are label-aligned with one value per position")


def _all_sum(values: Tensor, group: Any | None) -> Tensor:
    """Sum over the ranks of a group (a collective call); unchanged without a group."""
    if group is None:
        return values
    total = values.clone()
    torch.distributed.all_reduce(total, group=group)
    return total
