"""One optimizer step: micro-batches to sums and counts, gradients, and AdamW; equal for any split of the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from chatmill.errors import ConfigError
from chatmill.train.batch import TrainBatch
from chatmill.train.config import Precision, TrainConfig
from chatmill.train.linear_cross_entropy import linear_cross_entropy
from chatmill.train.losses import (
    SPAN_NAMES,
    LossKind,
    LossSums,
    LossTargets,
    Objective,
    cross_entropy,
    step_counts,
)
from chatmill.train.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One optimizer step of this rank: sums that are yet to be reduced."""

    sums: LossSums
    """Per span: 0 other, 1 reasoning, 2 final; one entry where spans are not known."""
    trained: torch.Tensor
    """Trained tokens of this rank."""
    positions: int
    """Positions of this rank, padding included."""
    grad_norm: torch.Tensor | None = None
    """Before clipping; None before the update."""


class LossModule(nn.Module):
    """Model and loss as one module, so that data parallelism sees one forward call."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: TrainBatch, target: LossTargets, scales: torch.Tensor) -> tuple[torch.Tensor, LossSums]:
        """The share of the step's loss, and its sums per span."""
        model = self.model
        if model.head_is_linear:
            hidden = model.hidden_states(batch.input_ids, batch.documents)
            made = linear_cross_entropy(
                hidden, model.head_weight, target.labels, target.weights, batch.spans, scales=scales
            )
        else:
            logits = model.logits(batch.input_ids, batch.documents)
            made = cross_entropy(logits, target.labels, target.weights, batch.spans, scales=scales)
        return made.loss, made.sums


class Stepper:
    """A model with its optimizer on this rank: one step, or one evaluation; when and how often is decided by `fit`."""

    def __init__(self, model: Any, config: TrainConfig, ranks: Ranks) -> None:
        """Moves the model to the rank's device."""
        self.model, self.config, self.ranks = model.to(ranks.device), config, ranks
        self.objective = Objective(kind=config.loss, w_r=config.w_r, w_f=config.w_f)
        self.optimizer = make_optimizer(model, config)
        if config.compile:
            model.compile_layers()
        loss_module: nn.Module = LossModule(model)
        if ranks.group is not None:
            devices = [ranks.device] if ranks.device.type == "cuda" else None
            loss_module = DistributedDataParallel(loss_module, device_ids=devices)
        self._forward = loss_module
        half = config.precision is Precision.BF16
        self._autocast = half or (config.precision is Precision.AUTO and ranks.device.type == "cuda")

    def step(self, batches: Sequence[TrainBatch], rate: float) -> StepResult:
        """One optimizer step over the micro-batches of this rank; the loss is that of all ranks' batches as one."""
        result = self.gradients(batches)
        limit = self.config.clip or float("inf")
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return replace(result, grad_norm=norm)

    def gradients(self, batches: Sequence[TrainBatch]) -> StepResult:
        """Add the gradient of the step's loss to the parameters' own.

        Counts come first, from the labels of all micro-batches and ranks; so each backward pass is already divided
        by what the whole step holds.
        """
        targets = [self._targets(batch) for batch in batches]
        scales = self.objective.scales(step_counts(targets, self.ranks.group), ranks=self.ranks.world)
        self.model.train()
        total = self._empty_sums(batches)
        for number, (batch, target) in enumerate(zip(batches, targets, strict=True)):
            with self._maybe_no_sync(number + 1 < len(batches)):
                loss, sums = self._run(batch, target, scales)
                loss.backward()  # type: ignore[no-untyped-call]
            total = total + sums
        trained = torch.stack([(target.labels != self.objective.ignore_index).sum() for target in targets]).sum()
        positions = sum(batch.input_ids.numel() for batch in batches)
        return StepResult(sums=total, trained=trained, positions=positions)

    @torch.no_grad()
    def evaluate(self, batches: Iterator[TrainBatch]) -> tuple[float, float]:
        """Loss over batches of all ranks, and what it was divided by."""
        self.model.eval()
        total = None
        for batch in batches:
            target = self._targets(batch)
            _, sums = self._run(batch, target, torch.ones_like(target.counts))
            total = sums if total is None else total + sums
        if total is None:
            raise ConfigError("the val split gave no batch: nothing to evaluate")
        reduced = self._grouped(total.reduced(self.ranks.group))
        return float(self.objective.loss(reduced)), float(reduced.counts.sum())

    def _targets(self, batch: TrainBatch) -> LossTargets:
        spans, documents = batch.spans, batch.documents.seq_idx
        if spans is None and self.objective.kind is LossKind.SPAN:
            raise ConfigError(
                'the loss "span" must know reasoning from answers: read a dataset that stores kinds (chatmill build '
                "writes them) through an episode loader, or give batches with span_id"
            )
        return self.objective.targets(batch.labels, weights=batch.weights, spans=spans, documents=documents)

    def _run(self, batch: TrainBatch, target: LossTargets, scales: torch.Tensor) -> tuple[torch.Tensor, LossSums]:
        """Forward; losses that do not need spans are summed per span all the same, for the log."""
        if batch.spans is not None:
            scales = scales.expand(len(SPAN_NAMES))
        with torch.autocast(self.ranks.device.type, dtype=torch.bfloat16, enabled=self._autocast):
            made: tuple[torch.Tensor, LossSums] = self._forward(batch, target, scales)
        return made

    def _grouped(self, sums: LossSums) -> LossSums:
        """Sums per span as the loss wants them: one entry, unless it is the loss of spans."""
        if self.objective.spans == len(sums.sums):
            return sums
        return LossSums(sums=sums.sums.sum()[None], counts=sums.counts.sum()[None])

    def values(self, result: StepResult) -> dict[str, Any]:
        """The numbers of a step for the log, over all ranks: every rank calls."""
        group = self.ranks.group
        total = result.sums.reduced(group)
        extra = LossSums(sums=result.trained.double()[None], counts=result.trained.double()[None]).reduced(group)
        values: dict[str, Any] = self.objective.values(self._grouped(total))
        values["trained_tokens"] = int(extra.sums)
        if result.grad_norm is not None:
            values["grad_norm"] = float(result.grad_norm)
        if len(total.sums) > 1:
            means, counts = total.means.tolist(), total.counts.tolist()
            values["spans"] = {
                name: {"loss": means[span], "tokens": counts[span]} for span, name in SPAN_NAMES.items() if counts[span]
            }
        return values

    def _empty_sums(self, batches: Sequence[TrainBatch]) -> LossSums:
        known = self.objective.spans > 1 or any(batch.spans is not None for batch in batches)
        zeros = torch.zeros(len(SPAN_NAMES) if known else 1, dtype=torch.float64, device=self.ranks.device)
        return LossSums(sums=zeros, counts=zeros)

    def _maybe_no_sync(self, more: bool) -> Any:
        """Gradients are exchanged once a step, with its last micro-batch."""
        waits = more and isinstance(self._forward, DistributedDataParallel)
        return self._forward.no_sync() if waits else contextlib.nullcontext()  # type: ignore[operator]


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; matrices decay, vectors do not. The rate is set at each step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    on_gpu = bool(trained) and all(p.is_cuda for p in trained)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=on_gpu,
    )
