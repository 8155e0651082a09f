"""The reference loop: `fit` trains a transformers model on a loader, one process, resumable at any step.

It shows how batches of the loaders become gradients (masks as weights, packed documents kept apart, sums and counts
divided last) and implements the post-training mode of spec 2. Large runs belong in a trainer made for them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chatmill.core.shift import IGNORE_INDEX
from chatmill.errors import ConfigError, DataError
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.load.loader import BatchLoader
from chatmill.load.packed_batch import PackedBatch
from chatmill.load.placement import named_device
from chatmill.train.checkpoint import RunState, checkpoints, load_checkpoint, read_state, save_checkpoint
from chatmill.train.isolation import check_isolation
from chatmill.train.losses import WeightedLoss, token_losses, weight_counts, weighted_loss
from chatmill.train.options import TrainOptions, checked

log = logging.getLogger("chatmill.train")
LOG = "log.jsonl"
PROBE = (8, 1, 7, 16)
"""Lengths of the documents of the row on which isolation is proved."""


class RunOutcome(StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """By SIGTERM or SIGINT, after the step it was in; a checkpoint was saved."""
    ALREADY_FINISHED = "already_finished"
    """The newest checkpoint has all steps; nothing was done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """What a run did."""

    outcome: RunOutcome
    step: int
    """Optimizer steps since the beginning of the run."""
    loss: float | None
    """Of the last step; None if none was made."""
    history: tuple[dict[str, Any], ...]
    """What was logged, one mapping per logging step and evaluation."""
    checkpoint: Path | None
    """The last one that was saved."""
    data: dict[str, Any] = field(default_factory=dict)
    """What of the data is not read, as the loader counts it (`data_report`): blocks skipped, tokens left out ..."""
    signal: int | None = None
    """The signal that stopped the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch, label-aligned."""

    inputs: dict[str, Any]
    """What the model is called with; `labels` and `weights` have the shape of `input_ids`."""
    labels: torch.Tensor
    weights: torch.Tensor


def fit(
    model: Any,
    loader: BatchLoader,
    *,
    out: str | Path | None = None,
    resume: bool = True,
    tokenizer: str | None = None,
    **options: Any,
) -> FitResult:
    """Train a causal language model of transformers on a loader of spec 4 or a `StreamBlockLoader`.

    - `out`: folder of log and checkpoints; a run that finds checkpoints there resumes from the newest (`resume`),
      also with another batch size or accumulation: progress is counted in data.
    - `tokenizer`: its fingerprint. With another mode, data or tokenizer than the checkpoint's, a new phase begins.
    - `options`: those of `TrainOptions`.
    """
    run = _Run(model, loader, None if out is None else Path(out), checked(TrainOptions, options))
    run.begin(tokenizer, resume=resume)
    return run.go()


class _Run:
    """One call of `fit`."""

    def __init__(self, model: Any, loader: BatchLoader, out: Path | None, options: TrainOptions) -> None:
        self.loader, self.out, self.options = loader, out, options
        self.model = model.to(named_device(loader.device))
        self.optimizer = make_optimizer(model, options)
        if options.post_training:
            _refuse_partial_pass(loader)
        self.history: list[dict[str, Any]] = []
        self.saved: Path | None = None
        self.signal: int | None = None
        self._isolated = self._trained = False

    def begin(self, tokenizer: str | None, *, resume: bool) -> None:
        """Start at step 0, or at the newest checkpoint of `out`."""
        mode = "post_training" if self.options.post_training else "training"
        spec = {"mode": mode, "data": self._position()["splits"]["train"]["fingerprint"], "tokenizer": tokenizer}
        self.state = RunState(step=0, phase_start=0, spec=spec, loader=None)
        saved = [] if self.out is None else checkpoints(self.out)
        if not saved:
            return
        folder = saved[-1]
        if not resume:
            raise ConfigError(f"{self.out} holds checkpoints up to {folder.name}: resume, or choose another folder")
        stored = read_state(folder)
        load_checkpoint(folder, self.model, self.optimizer)
        self.saved = folder
        changed = [f"{name} ({stored.spec[name]} -> {spec[name]})" for name in spec if stored.spec[name] != spec[name]]
        if changed:
            said = "the training spec differs from that of %s: %s; the warmup restarts"
            log.info(said, folder.name, ", ".join(changed))
            self.state = replace(self.state, step=stored.step, phase_start=stored.step)
        else:
            log.info("resuming from %s", folder.name)
            self.loader.load_state_dict(stored.loader)
            self.state = stored

    def go(self) -> FitResult:
        """Run the phase to its end, or until a signal."""
        total, left, batches = self._length()
        first, end = total - left, self.state.step + left
        if not left:
            return self._result(RunOutcome.ALREADY_FINISHED)
        if skipped := getattr(self.loader, "skipped", 0):
            log.info("%d blocks have nothing to train and are skipped", skipped)
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
        with self._signals():
            for number in range(left):
                count = self.options.accumulation if batches is None else min(self.options.accumulation, batches)
                batches = None if batches is None else batches - count
                self._step(count, learning_rate(self.options, first + number, total), last=self.state.step + 1 == end)
                if self.signal is not None and number + 1 < left:
                    self._save()
                    return self._result(RunOutcome.STOPPED)
        return self._result(RunOutcome.FINISHED)

    def _length(self) -> tuple[int, int, int | None]:
        """Steps of the whole phase, steps left of it, and batches left before its data ends (None: it does not).

        Data is counted in the batches and accumulation of now, so a run may resume with others.
        """
        options, done = self.options, self.state.step - self.state.phase_start
        if options.steps is not None and not options.post_training:
            return options.steps, max(0, options.steps - done), None
        epochs = 1 if options.post_training else options.epochs
        if epochs is None:
            raise ConfigError("set steps or epochs")
        if self.loader.is_endless():
            raise ConfigError(
                "this loader draws at random and never ends: give steps, or read episodes in epoch mode or transcripts"
            )
        in_all = sum(self.loader.steps_per_epoch(epoch=epoch) for epoch in range(epochs))
        batches = self.loader.batches_left(epochs=epochs)
        total, left = math.ceil(in_all / options.accumulation), math.ceil(batches / options.accumulation)
        if options.steps is not None:
            total, left = min(total, options.steps), min(left, max(0, options.steps - done))
        return total, left, batches

    def _step(self, count: int, rate: float, *, last: bool) -> None:
        """Take one optimizer step over `count` micro-batches; log, evaluate and save if it is time to."""
        options, step = self.options, self.state.step + 1
        torch.manual_seed(options.seed * 1_000_003 + step)
        result = self._gradients([self._batch(self.loader.get_batch()) for _ in range(count)])
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), options.clip or math.inf)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.state = replace(self.state, step=step)
        if last or step % options.log_every == 0:
            self._log({"step": step, **result.values(), "lr": rate, "grad_norm": float(norm)})
        if last and not self._trained:
            raise DataError(
                f"no token was trained in {step:,} steps: every label is masked. Rows may be too short to reach the "
                "first answer (block_size), or the policy trains nothing here: `chatmill inspect` shows what is trained"
            )
        if last or (options.eval_every and step % options.eval_every == 0):
            self._evaluate()
        if last or (options.save_every and step % options.save_every == 0):
            self._save()

    def _gradients(self, batches: list[Batch]) -> WeightedLoss:
        """Add the gradient of the step's loss to the parameters' own; the counts of the step come first."""
        self.model.train()
        counts = torch.stack([weight_counts(batch.weights) for batch in batches]).sum(0)
        self._trained = self._trained or bool(counts.any())
        total: Any = None
        for batch in batches:
            part = self._loss(batch, counts)
            part.loss.backward()  # type: ignore[no-untyped-call]
            total = part.detached() if total is None else total + part.detached()
        return total  # type: ignore[no-any-return]

    def _loss(self, batch: Batch, counts: torch.Tensor) -> WeightedLoss:
        losses = token_losses(self.model(**batch.inputs).logits, batch.labels)
        return weighted_loss(losses, batch.weights, counts=counts)

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Measure the loss on all of val, in order; nothing without val, or if it never ends."""
        loader = self.loader
        if not isinstance(loader, GPTEpisodeDataLoader) or "val" not in loader.splits or loader.is_endless("val"):
            return
        self.model.eval()
        unit = torch.ones(1, device=self.model.device)
        parts = [self._loss(self._batch(loaded), unit).values() for loaded in loader.one_pass("val")]
        total, tokens = (sum(part[name] for part in parts) for name in ("sum", "tokens"))
        self._log({"step": self.state.step, "val_loss": total / max(tokens, 1e-9), "val_tokens": tokens})

    def _batch(self, loaded: tuple[torch.Tensor, ...]) -> Batch:
        """Turn a batch of the loader into model inputs, labels and weights; masks are weights."""
        x, y, *mask = loaded[:3]
        inputs: dict[str, Any] = {"input_ids": x, "use_cache": False}
        if isinstance(loaded, PackedBatch):
            self._prove_isolation()
            inputs = loaded.inputs(self.model)
        rows = len(self.model.get_input_embeddings().weight)
        if (largest := max(int(x.max()), int(y.max()))) >= rows:
            raise DataError(
                f"the data has the id {largest:,}, and the model has {rows:,} embeddings: they do not belong together. "
                "Build the data with the model's own tokenizer, or resize the model (model.resize_token_embeddings)"
            )
        weights = (y != IGNORE_INDEX).float() * (mask[0] if mask else 1)
        shape = inputs["input_ids"].shape  # one row where the kernels of the model want it so
        return Batch(
            inputs=inputs,
            labels=y.reshape(shape),
            weights=weights.reshape(shape),
        )

    def _prove_isolation(self) -> None:
        """Refuse a model that lets packed documents see each other, before its first packed batch."""
        if self._isolated:
            return
        ids = torch.randint(0, 97, (1, sum(PROBE)), generator=torch.Generator().manual_seed(0)).to(self.model.device)
        ids %= len(self.model.get_input_embeddings().weight)
        starts = torch.tensor([[0, *PROBE[:-1]]]).cumsum(1)
        probe = PackedBatch.of((ids, ids, torch.ones_like(ids), starts), np.array([sum(PROBE)]))
        one_each = "train it on rows of one episode each (pack: false)"
        try:
            report = check_isolation(self.model, probe.inputs(self.model))
        except ValueError as error:  # transformers, where a kernel is missing that reads boundaries
            raise ConfigError(
                f"{type(self.model).__name__} cannot read packed rows here: {error}\nOr {one_each}"
            ) from error
        if not report.passed:
            raise ConfigError(
                f"{type(self.model).__name__} lets packed documents see each other; {one_each}.\n{report}"
            )
        self._isolated = True

    def _log(self, values: dict[str, Any]) -> None:
        self.history.append(values)
        if self.out is not None:
            with (self.out / LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")
        log.info(
            "  ".join(f"{name} {value:.4g}" if name != "step" else f"step {value}" for name, value in values.items())
        )

    def _save(self) -> None:
        if self.out is not None:
            state = replace(self.state, loader=self._position())
            self.saved = save_checkpoint(self.out, self.model, self.optimizer, state, keep=self.options.keep)

    def _position(self) -> dict[str, Any]:
        """Return the loader's position in train; other splits may change between runs."""
        state = self.loader.state_dict()
        return {**state, "splits": {"train": state["splits"]["train"]}}

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT end the run after the step it is in; a second one ends it at once."""

        def note(number: int, frame: Any) -> None:
            if self.signal is not None:
                raise KeyboardInterrupt
            self.signal = number

        previous = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError):  # not in the main thread, where signals belong to the caller
                previous[number] = signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _result(self, outcome: RunOutcome) -> FitResult:
        report = getattr(self.loader, "data_report", dict)
        return FitResult(
            outcome=outcome,
            step=self.state.step,
            loss=next((values["loss"] for values in reversed(self.history) if "loss" in values), None),
            history=tuple(self.history),
            checkpoint=self.saved,
            data=report(),
            signal=self.signal if outcome is RunOutcome.STOPPED else None,
        )


def learning_rate(options: TrainOptions, step: int, steps: int) -> float:
    """Compute the rate of step `step` (from 0) of `steps`: linear warm-up, then cosine decay.

    The last step of the warmup has the full rate; the last step of the phase has `min_lr_ratio` of it.
    """
    rising = math.ceil(options.warmup_pct * steps - 1e-9)
    if step < rising:
        return options.learning_rate * (step + 1) / rising
    progress = (step - rising + 1) / max(steps - rising, 1)
    low = options.min_lr_ratio
    return options.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def make_optimizer(model: torch.nn.Module, options: TrainOptions) -> torch.optim.AdamW:
    """AdamW; matrices decay, vectors do not. The rate is set at each step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=options.learning_rate, betas=(0.9, 0.95)
    )


def _refuse_partial_pass(loader: Any) -> None:
    """Refuse a loader whose one pass would leave rows out, or train every token."""
    if not isinstance(loader, GPTEpisodeDataLoader):
        return
    if not loader.gives_masks():
        raise ConfigError(
            f"post_training trains assistant tokens only, but the loader of {loader.directory} trains every token: "
            "set policy to assistant (if kinds are stored), or use_loss_mask to true"
        )
    if loader.config.epoch_drop_last:
        raise ConfigError("post_training sees every row once: set epoch_drop_last to false")
