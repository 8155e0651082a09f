"""Cross entropy as sums and counts: token, weighted, document and span means that no split of the batch can change.

A mean of means is wrong as soon as two micro-batches, or two ranks, hold different numbers of trained tokens. So
nothing here divides by what one micro-batch happens to hold. What a loss divides by depends on the labels alone, so
the counts of a whole step are known, and reduced over the ranks, before the first forward pass:

    objective = Objective(kind="token")                      # or "weighted", "document", "span"
    for step in steps:                                       # a step: the micro-batches of this rank
        targets = [objective.targets(b.labels, weights=b.mask, spans=b.spans, documents=b.documents) for b in step]
        counts = step_counts(targets, group)                 # one all_reduce; group None: this process alone
        scales = objective.scales(counts, ranks=world_size)  # DDP averages gradients: ranks undoes the average
        total = None
        for batch, target in zip(step, targets):
            made = linear_cross_entropy(hidden(batch), head, target.labels, target.weights, target.spans, scales=scales)
            # or, from logits: made = cross_entropy(logits(batch), target.labels, target.weights, target.spans, ...)
            made.loss.backward()
            total = made.sums if total is None else total + made.sums
        log(objective.values(total.reduced(group)))          # the loss of the global batch, the same on every rank

Every rank makes the same number of calls; a rank with nothing to train in a step gives sums of 0 and a gradient of 0.
Whoever sums gradients over ranks, instead of averaging them as DistributedDataParallel does, leaves `ranks` at 1.

Alignment: labels, weights, spans and documents are label-aligned and of one shape; position `t` speaks of the token
predicted at `t` (`chatmill.core.shift`). Polarity: a weight other than 0 means "train on this token".
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from chatmill.core.shift import IGNORE_INDEX
from chatmill.errors import ConfigError, DataError, member

SPAN_REASONING = 1
"""The span id of reasoning tokens (the analysis channel of Harmony)."""
SPAN_FINAL = 2
"""The span id of answer tokens (the final channel)."""
SPAN_NAMES = {0: "other", SPAN_REASONING: "reasoning", SPAN_FINAL: "final"}
"""Names of the spans in a log; `other` is what is trained and is no assistant's."""


class LossKind(StrEnum):
    """What is divided by what."""

    TOKEN = "token"
    """Sum over trained tokens / number of trained tokens: every trained token counts the same."""
    WEIGHTED = "weighted"
    """Sum of weight * loss / sum of weights."""
    DOCUMENT = "document"
    """Mean over documents of each document's own (weighted) mean: every document counts the same."""
    SPAN = "span"
    """`w_r` * mean over span 1 + `w_f` * mean over span 2: the loss of spec 5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Sums of weight * loss and of weight, one entry per span `(G,)`; adds up over micro-batches and ranks.

    Wide (float64), without gradient, on the device of the batch. Losses without spans have one entry.
    """

    sums: Tensor
    counts: Tensor

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(sums=self.sums + other.sums, counts=self.counts + other.counts)

    def reduced(self, group: Any | None) -> LossSums:
        """Summed over the ranks of a process group (a collective call); unchanged where `group` is None."""
        sums, counts = all_sum(torch.stack((self.sums, self.counts)), group).unbind()
        return LossSums(sums=sums, counts=counts)

    @property
    def means(self) -> Tensor:
        """The mean loss of each span; 0, never NaN, where it has no tokens."""
        return self.sums * _inverse(self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossResult:
    """One micro-batch: what to call `backward()` on, and what to add up for the log."""

    loss: Tensor
    """`sum(scales * sums)`, a differentiable scalar: this micro-batch's share of the step's loss (times `ranks`)."""
    sums: LossSums


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTargets:
    """What one micro-batch trains; all of one shape, and known before the model runs."""

    labels: Tensor
    """Token ids; `IGNORE_INDEX` wherever nothing is trained, also where the weight given was 0."""
    weights: Tensor
    """What each position counts, wide; 0 where nothing is trained. A document's weights add up to 1 (document)."""
    spans: Tensor | None
    """The entry of `counts` each position belongs to; None: all to the one there is."""
    counts: Tensor
    """Sum of the weights per span `(G,)`, wide: tokens, weight, or documents, as the kind has it."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Which loss is trained; see the module for how a step uses it."""

    kind: LossKind | str = LossKind.TOKEN
    w_r: float = 1.0
    """Weight of span 1 (reasoning); acts on the kind "span" only."""
    w_f: float = 1.0
    """Weight of span 2 (answer); acts on the kind "span" only."""
    ignore_index: int = IGNORE_INDEX

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", member(LossKind, "loss", self.kind))

    def targets(
        self,
        labels: Tensor,
        *,
        weights: Tensor | None = None,
        spans: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> LossTargets:
        """What a micro-batch trains, from its label-aligned columns, all of the shape of `labels`.

        - `weights`: 0 or more per position; 0 is "not trained". The kinds "weighted", "document" and "span" use the
          values, "token" only whether they are 0.
        - `spans`: span numbers, needed by "span"; positions that are neither span 1 nor span 2 are not trained.
        - `documents`: the number of each document in its row (`seq_idx` of the collator; the padding may
          have one of its own). None: each row `(B, T)` is one document. A document cut into two rows is two.
        """
        check_shapes(labels=labels, weights=weights, spans=spans, documents=documents)
        wide = wide_dtype(labels.device)
        counted = (labels != self.ignore_index).to(wide)
        if weights is not None:
            counted = counted * ((weights != 0) if self.kind is LossKind.TOKEN else weights)
        if self.kind is LossKind.SPAN:
            if spans is None:
                raise ConfigError('the loss "span" needs the span number of every position: give spans=')
            counted = counted * ((spans == SPAN_REASONING) | (spans == SPAN_FINAL))
        elif self.kind is LossKind.DOCUMENT:
            counted = counted * _inverse(_document_sums(counted, documents))
        kept_spans = spans if self.kind is LossKind.SPAN else None
        counts = span_sums(counted, kept_spans, self.spans)
        return LossTargets(
            labels=labels.masked_fill(counted == 0, self.ignore_index),
            weights=counted,
            spans=kept_spans,
            counts=counts.round() if self.kind is LossKind.DOCUMENT else counts,  # three thirds are not quite one
        )

    @property
    def spans(self) -> int:
        """Entries of counts and sums: 3 for the kind "span" (entry 0 stays empty), else 1."""
        return SPAN_FINAL + 1 if self.kind is LossKind.SPAN else 1

    def scales(self, counts: Tensor, *, ranks: int = 1) -> Tensor:
        """What each sum is multiplied by to give the loss, `(G,)`: weight / count, and 0 where nothing is counted.

        `counts` are those of the whole step. `ranks`: the number of ranks whose gradients will be *averaged*.
        """
        if tuple(counts.shape) != (self.spans,):
            raise DataError(f"counts have the shape {tuple(counts.shape)}; the loss {self.kind!s} has {self.spans}")
        return _inverse(counts) * self._weights(counts) * ranks

    def loss(self, total: LossSums) -> Tensor:
        """The loss of the sums and counts of a whole step; a wide scalar."""
        return (self.scales(total.counts) * total.sums).sum()

    def span_loss(self, total: LossSums) -> SpanLoss:
        """The sums and counts of a whole step as spec 5 names them; for the kind "span" only."""
        if self.kind is not LossKind.SPAN:
            raise ConfigError(f'the loss {self.kind!s} has no spans: use Objective(kind="span")')
        means = total.means
        return SpanLoss(
            loss=self.loss(total),
            loss_r=means[SPAN_REASONING],
            loss_f=means[SPAN_FINAL],
            sum_r=total.sums[SPAN_REASONING],
            sum_f=total.sums[SPAN_FINAL],
            tokens_r=total.counts[SPAN_REASONING],
            tokens_f=total.counts[SPAN_FINAL],
            w_r=self.w_r,
            w_f=self.w_f,
        )

    def values(self, total: LossSums) -> dict[str, float]:
        """For a log: `loss`, `sum` and `count` of a whole step, or the nine values of spec 5 for the kind "span"."""
        if self.kind is LossKind.SPAN:
            return self.span_loss(total).values()
        loss, summed, count = torch.stack((self.loss(total), total.sums[0], total.counts[0])).tolist()
        return {"loss": loss, "sum": summed, "count": count}

    def _weights(self, like: Tensor) -> Tensor:
        return like.new_tensor([0.0, self.w_r, self.w_f] if self.kind is LossKind.SPAN else [1.0])


def step_counts(targets: Iterable[LossTargets], group: Any | None = None) -> Tensor:
    """The counts of all micro-batches of a step and all ranks of `group`, `(G,)`; a collective call with a group."""
    listed = [target.counts for target in targets]
    if not listed:
        raise DataError("a step has no micro-batch: there is nothing to count")
    return all_sum(functools.reduce(operator.add, listed), group)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    spans: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
) -> LossResult:
    """Cross entropy of logits `(..., V)` as sums per span; softmax in float32 (float64 for float64 logits).

    `labels`, `weights` (default 1) and `spans` (default: one) have the shape `(...)`. `scales` `(G,)` says how many
    spans there are and what each sum counts in `loss`; default: one span, 1.
    """
    check_shapes(labels=labels, logits=logits[..., 0], weights=weights, spans=spans)
    losses = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32)),
        labels.reshape(-1),
        reduction="none",
        ignore_index=ignore_index,
    ).view(labels.shape)
    counted = position_weights(labels, weights, ignore_index)
    scales = checked_scales(scales, spans, labels.device)
    # Where nothing is trained the loss may be anything, even NaN: it is replaced before it is multiplied.
    summed = span_sums(torch.where(counted != 0, losses, 0) * counted, spans, len(scales))
    sums = LossSums(sums=summed.detach(), counts=span_sums(counted, spans, len(scales)))
    return LossResult(loss=(summed * scales).sum().to(losses.dtype), sums=sums)


def position_weights(labels: Tensor, weights: Tensor | None, ignore_index: int) -> Tensor:
    """What each position counts, wide: its weight (default 1), and 0 where the label is `ignore_index`."""
    trained = labels != ignore_index
    wide = wide_dtype(labels.device)
    return trained.to(wide) if weights is None else torch.where(trained, weights.to(wide), 0)


def span_sums(values: Tensor, spans: Tensor | None, count: int) -> Tensor:
    """The sum of `values` over each span number `0 .. count - 1`, `(count,)`; without spans all is span 0."""
    if spans is None:
        total = values.sum()
        return torch.stack((total, *[torch.zeros_like(total)] * (count - 1)))
    return torch.stack([torch.where(spans == span, values, 0).sum() for span in range(count)])


def checked_scales(scales: Tensor | None, spans: Tensor | None, device: torch.device) -> Tensor:
    """The scales, wide, on the device of the batch; spans without scales are refused."""
    if scales is None:
        if spans is not None:
            raise ConfigError("spans= needs scales=, one per span number: Objective.scales, or torch.ones(how_many)")
        return torch.ones(1, dtype=wide_dtype(device), device=device)
    if scales.dim() != 1 or not len(scales):
        raise DataError(f"scales have the shape {tuple(scales.shape)}; one number per span is needed")
    return scales.detach().to(device=device, dtype=wide_dtype(device))


def _document_sums(weights: Tensor, documents: Tensor | None) -> Tensor:
    """For every position the sum of the weights of its document, in the shape of `weights`."""
    rows = weights.reshape(-1, weights.shape[-1])
    if documents is None:
        return rows.sum(-1, keepdim=True).expand_as(rows).reshape(weights.shape)
    numbers = documents.reshape(rows.shape).long()
    row_numbers = torch.arange(len(rows), device=rows.device)[:, None].expand_as(numbers)
    _, own = torch.unique(torch.stack((row_numbers, numbers), -1).reshape(-1, 2), dim=0, return_inverse=True)
    summed = torch.zeros_like(rows).reshape(-1).index_add_(0, own, rows.reshape(-1))
    return summed[own].reshape(weights.shape)


def _inverse(counts: Tensor) -> Tensor:
    """`1 / counts`, and 0 where there is nothing to divide by."""
    return torch.where(counts > 0, 1 / torch.where(counts > 0, counts, 1), 0)


def check_shapes(**columns: Tensor | None) -> None:
    """Refuse columns of different shapes, naming all of them."""
    shapes = {name: tuple(column.shape) for name, column in columns.items() if column is not None}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise DataError(f"shapes differ: {listed}; all are label-aligned with one value per position")


def wide_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums: float64, in which counts of tokens stay exact (Apple's GPUs have float32 only)."""
    return torch.float32 if device.type == "mps" else torch.float64


def all_sum(values: Tensor, group: Any | None) -> Tensor:
    """The sum over the ranks of a group (a collective call); unchanged where `group` is None."""
    if group is None:
        return values
    total = values.clone()
    torch.distributed.all_reduce(total, group=group)
    return total
