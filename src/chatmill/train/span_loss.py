"""The loss of spec 5: one mean over reasoning tokens plus one over answer tokens, of the whole global batch.

`L = w_r * mean(loss | span 1) + w_f * mean(loss | span 2)`, where a mean is `sum(loss * mask) / sum(mask)` over
the *global* batch: all micro-batches of a step and all ranks. Sums and counts are reduced, never means, so a batch
may be split any way and gives the same loss and the same gradient.

One batch:            span_normalized_loss(loss, span_id, mask).loss.backward()
Data parallel:        the same with group=, inside DistributedDataParallel as it is (it averages gradients).
Accumulation:         the counts of the step come first, because each backward pass needs them:

    counts = sum(span_counts(b.span_id, b.loss_mask, group) for b in micro_batches)
    total = None
    for b in micro_batches:
        part = span_normalized_loss(token_loss(b), b.span_id, b.loss_mask, group=group, counts=counts)
        part.loss.backward()
        total = part.detached() if total is None else total + part.detached()
                                       # in the end, equal to the result of the one big batch

Alignment: `per_token_loss`, `span_id` and `loss_mask` are label-aligned and of one shape: position `t` speaks of the
token that is predicted at `t`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from chatmill.errors import DataError
from chatmill.train.losses import (
    SPAN_FINAL,
    SPAN_REASONING,
    LossKind,
    LossSums,
    Objective,
    SpanLoss,
    all_sum,
    check_shapes,
    span_sums,
    wide_dtype,
)


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

    - `loss_mask`: the weight of each position, by default 1 wherever a span is; where it is 0, whatever the loss
      there (even NaN) counts for nothing. Positions of other span ids never count.
    - `group`: a process group over whose ranks sums and counts are added (every rank calls, equally often); None
      is this process alone. `torch.distributed.group.WORLD` is all ranks.
    - `counts`: what `span_counts` gives, summed over all micro-batches of the step and all ranks, for gradient
      accumulation; by default those of this batch, reduced over `group`.

    Gradient: `loss` has the value of the global batch on every rank, and its gradient on a rank is that rank's
    own share times the number of ranks. So the *mean* over ranks, which DistributedDataParallel takes, is the
    gradient of the global batch; whoever *sums* gradients over ranks divides by the group's size.
    Sums are made in float64, also of bfloat16 losses; `loss`, `loss_r` and `loss_f` are at least float32.
    """
    check_shapes(per_token_loss=per_token_loss, span_id=span_id, loss_mask=loss_mask)
    objective = Objective(kind=LossKind.SPAN, w_r=w_r, w_f=w_f)
    counted = _counted(span_id, loss_mask)
    # Where nothing is trained the loss may be anything, even NaN: it is replaced before it is multiplied.
    own = span_sums(torch.where(counted != 0, per_token_loss, 0) * counted, span_id, objective.spans)
    here = LossSums(sums=own.detach(), counts=span_sums(counted, span_id, objective.spans)).reduced(group)
    step = here.counts
    if counts is not None:
        if not isinstance(counts, Tensor) or tuple(counts.shape) != (2,):
            raise DataError(
                f"counts are {counts!r}; a sum of what span_counts gives is needed, over one micro-batch or more"
            )
        step = torch.cat((torch.zeros_like(counts[:1]), counts))
    scales = objective.scales(step)
    share = (own * scales).sum() * (1 if group is None else torch.distributed.get_world_size(group))
    found = objective.span_loss(LossSums(sums=here.sums, counts=step))
    dtype = torch.promote_types(per_token_loss.dtype, torch.float32)
    return replace(
        found,
        loss=(share + (found.loss - share.detach())).to(dtype),
        loss_r=found.loss_r.to(dtype),
        loss_f=found.loss_f.to(dtype),
        tokens_r=here.counts[SPAN_REASONING],
        tokens_f=here.counts[SPAN_FINAL],
    )


def span_counts(span_id: Tensor, loss_mask: Tensor | None = None, group: Any | None = None) -> Tensor:
    """How much mask the two spans have in one batch, `(2,)`: token counts where the mask is 0 and 1.

    Known before any model has run; summed over the ranks of `group` where one is given.
    """
    check_shapes(span_id=span_id, loss_mask=loss_mask)
    counts = span_sums(_counted(span_id, loss_mask), span_id, SPAN_FINAL + 1)
    return all_sum(counts[SPAN_REASONING:], group)


def _counted(span_id: Tensor, loss_mask: Tensor | None) -> Tensor:
    """What each position counts, wide: its mask, by default 1, in the two spans, and 0 elsewhere."""
    spans = (span_id == SPAN_REASONING) | (span_id == SPAN_FINAL)
    counted = spans.to(wide_dtype(span_id.device))
    return counted if loss_mask is None else counted * loss_mask
