"""A training run: `fit` takes steps until the phase ends, and logs, evaluates, saves and resumes between them.

fit(model, loader)
  joined_ranks     which process this is                 ranks.py
  TrainFeed        the next micro-batch                  feed.py, batch.py
  Phase            how much is left, and the rate        phase.py
  Stepper.step     counts -> forward, backward -> AdamW  step.py, losses.py
  RunLog           lines, JSONL, TensorBoard, a bar      log.py
  save_checkpoint  atomically, with the loader's place   checkpoint.py
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from chatmill.errors import ConfigError, DataError
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.train.batch import TrainBatch
from chatmill.train.checkpoint import RunState, TrainingSpec, checkpoints, load_optimizer, read_state, save_checkpoint
from chatmill.train.config import TrainConfig
from chatmill.train.feed import TrainFeed
from chatmill.train.log import RunLog, write_settings
from chatmill.train.phase import Phase, learning_rate, phase_of, warmup_steps
from chatmill.train.ranks import Ranks, joined_ranks
from chatmill.train.step import Stepper, StepResult

log = logging.getLogger("chatmill.train")
ENDLESS_EVAL_BATCHES = 20
"""Batches of one evaluation on a val split that never ends (random mode, token streams)."""


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
    """Of the last step; None when none was made."""
    history: tuple[dict[str, Any], ...]
    """What was logged, one mapping per logging step and evaluation."""
    skipped_blocks: int
    """Blocks without anything to train that were left out."""
    checkpoint: Path | None
    """The last one that was saved."""
    signal: int | None = None
    """The signal that stopped the run."""
    data: dict[str, Any] = field(default_factory=dict)
    """What of the data is not read, as the loader counts it (`data_report`): tokens, records, rows left out."""


def fit(
    model: Any,
    loader: Any,
    *,
    val_loader: Any = None,
    out: str | Path | None = None,
    resume: bool = True,
    config: TrainConfig | None = None,
    tokenizer: Any = None,
    notes: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    progress: bool = False,
    **options: Any,
) -> FitResult:
    """Train a model on a loader of spec 4, on stream blocks, or on any iterable of batches.

    - `val_loader`: what `eval_every` reads its split "val" from; default: `loader`, where it has that split.
    - `out`: folder of log and checkpoints; a run that finds checkpoints there resumes from the newest (`resume`).
    - `tokenizer`: only its fingerprint is used, to see a changed training spec. `notes` are kept in checkpoints.
    - `settings`: what else the run was made of; it is written to `run.json` in `out`, beside the whole `config`.
    - `options`: those of `TrainConfig`, in place of `config`. Environment variables are read by `chatmill train` alone.
    """
    if config is None:
        config = TrainConfig.of(options)
    elif options:
        raise ConfigError(f"give config or single options, not both: {', '.join(options)}")
    torch.manual_seed(config.seed)
    with joined_ranks(config.device) as ranks:
        run = _TrainingRun(model, loader, val_loader, Path(out) if out is not None else None, config, ranks)
        run.settings = {**(settings or {}), "train": asdict(config), "ranks": ranks.world}
        run.begin(tokenizer, notes or {}, resume=resume)
        return run.go(progress=progress)


class _TrainingRun:
    """One call of `fit`: its state, and the loop."""

    def __init__(
        self, model: Any, loader: Any, val_loader: Any, out: Path | None, config: TrainConfig, ranks: Ranks
    ) -> None:
        self.out, self.config, self.ranks = out, config, ranks
        how: dict[str, Any] = {"assistant_only": config.post_training, "vocabulary": len(model.head_weight)}
        self.feed = TrainFeed(loader, ranks.device, **how)
        self.phase: Phase = phase_of(self.feed, config, done=0, first_epoch=self.feed.first_epoch())
        if config.post_training:
            self.feed.refuse_partial_pass()
        self.stepper = Stepper(model, config, ranks)
        self.val, self._val_state = _val_feed(loader, val_loader, ranks, **how)
        report = getattr(loader, "data_report", None)
        self.data: dict[str, Any] = {} if report is None else report()
        self.settings: dict[str, Any] = {}
        """All that the run is made of, for its folder."""
        self.history: list[dict[str, Any]] = []
        self.loss: float | None = None
        self.saved: Path | None = None
        self.signal: int | None = None
        """The first signal that this process got."""
        self.stopped = False
        """Whether the ranks agreed to stop."""
        self._unlogged: list[tuple[StepResult, float]] = []
        self._clock = time.perf_counter()
        self._trained: torch.Tensor | int = 0
        """Trained tokens of this rank."""
        self._evaluated = self._saved_step = -1
        self._progress = ""

    def begin(self, tokenizer: Any, notes: dict[str, Any], *, resume: bool) -> None:
        """Start at step 0, or at the newest checkpoint of `out`."""
        mode = "post_training" if self.config.post_training else "training"
        fingerprint = getattr(tokenizer, "fingerprint", None)
        spec = TrainingSpec(mode=mode, data=self.feed.fingerprint, tokenizer=fingerprint)
        first_epoch = self.feed.first_epoch()
        self.state = RunState(step=0, phase_start=0, spec=spec, loader=None, first_epoch=first_epoch, notes=notes)
        known = checkpoints(self.out) if self.out is not None else []
        if not known:
            self.feed.refuse_used(self.config)
            return
        folder = known[-1][1]
        if not resume:
            raise ConfigError(f"{self.out} holds checkpoints up to {folder.name}: resume, or choose another folder")
        stored = read_state(folder)
        self.stepper.model.load_weights(folder)
        load_optimizer(folder, self.stepper.model, self.stepper.optimizer)
        changed = spec.differences(stored.spec)
        self.state = replace(stored, spec=spec, notes=notes or stored.notes)
        if changed:
            self.feed.refuse_used(self.config)
            self.state = replace(self.state, phase_start=stored.step, first_epoch=first_epoch)
            self._say(
                f"the training spec differs from that of {folder.name}: {', '.join(changed)}; the warmup restarts"
            )
        else:
            self.feed.load_state(stored.loader)
            if self.config.post_training:
                self.feed.refuse_partial_pass()
            self._say(f"resuming from {folder.name}")
        self.saved, self._saved_step = folder, stored.step
        done = self.state.step - self.state.phase_start
        self.phase = phase_of(self.feed, self.config, done=done, first_epoch=self.state.first_epoch)

    def go(self, *, progress: bool) -> FitResult:
        """Run the phase to its end, or until a signal."""
        end = self.state.step + self.phase.steps_left
        skipped = int(getattr(self.feed.loader, "skipped", 0))
        if not self.phase.steps_left:
            self._say(f"step {self.state.step} of {end}: nothing left to train")
            return self._result(RunOutcome.ALREADY_FINISHED, skipped)
        self._clock = time.perf_counter()
        self.log = RunLog(
            self.out,
            steps=end,
            done=self.state.step,
            active=self.ranks.first,
            bar=progress,
        )
        self.log.event("start", step=self.state.step, steps=end, warmup=warmup_steps(self.config, self.phase.steps),
                       phase_start=self.state.phase_start, skipped_blocks=skipped, ranks=self.ranks.world,
                       data=self.data, config=self.settings)  # fmt: skip
        if self.out is not None and self.ranks.first:
            write_settings(self.out, self.settings)
        if skipped:
            self._say(f"{skipped} blocks have nothing to train and are skipped")
        try:
            with self._signals():
                self._loop(end)
        finally:
            self.log.close()
        return self._result(RunOutcome.STOPPED if self.stopped else RunOutcome.FINISHED, skipped)

    def _loop(self, end: int) -> None:
        """Steps until the end, the end of the data, or a signal; then what is left to log, measure and save.

        All ranks stop at the same step: what counts is what they agreed on, not what one of them has seen.
        """
        config, phase, begun_at = self.config, self.phase, self.state.step
        while self.state.step < end and not self.stopped:
            number = self.state.step - begun_at
            batches = self._micro_batches(phase.micro_batches(number, config.accumulation))
            if not batches:
                break
            torch.manual_seed(_seed_of(config.seed, self.state.step, self.ranks.rank))
            rate = learning_rate(config, phase.first + number, phase.steps)
            result = self.stepper.step(batches, rate)
            self.state = replace(self.state, step=self.state.step + 1)
            self._unlogged.append((result, rate))
            self._trained = self._trained + result.trained
            if _due(self.state.step, config.log_every):
                self._log_step()
            self.log.advance(self.state.step, self._progress)
            if _due(self.state.step, config.eval_every):
                self._evaluate()
            self.stopped = self.ranks.any(self.signal is not None)
            if not self.stopped and _due(self.state.step, config.save_every):
                self._save()
        self._log_step()
        if not self.stopped:
            self._refuse_nothing_trained()
            self._evaluate()
        self._save()

    def _refuse_nothing_trained(self) -> None:
        """A run without a single target has a loss of 0 and looks finished."""
        if not self.ranks.any(bool(self._trained > 0)):
            raise DataError(
                f"no token was trained in {self.state.step:,} steps: every label is masked. Rows may be too short to "
                "reach the first answer (block_size, overflow), or the policy trains nothing here: `chatmill inspect` "
                "shows what is trained"
            )

    def _log_step(self) -> None:
        """The newest step's numbers; the rate of tokens is that since the last time."""
        if not self._unlogged:
            return
        result, rate = self._unlogged[-1]
        values = self.stepper.values(result)
        positions = sum(one.positions for one, _ in self._unlogged) * self.ranks.world
        now = time.perf_counter()
        per_second = positions / max(now - self._clock, 1e-9)
        self._unlogged, self._clock, self.loss = [], now, values["loss"]
        self._progress = f"loss {self.loss:.4f}  {per_second:,.0f} tokens/s"
        self._log({"step": self.state.step, **values, "lr": rate, "tokens_per_s": per_second})

    def _micro_batches(self, count: int) -> list[TrainBatch]:
        taken = (self.feed.next() for _ in range(count))
        return [batch for batch in taken if batch is not None]

    def _evaluate(self) -> None:
        """On val, once a step at most; nothing without val."""
        if self.val is None or self._evaluated == self.state.step:
            return
        self._evaluated = self.state.step
        self.val.begin_again(self._val_state)
        own = self.val.batches(TrainConfig())
        limit = self.config.eval_batches or own or ENDLESS_EVAL_BATCHES
        count = limit if own is None else min(limit, own)
        found = (self.val.next() for _ in range(count))
        loss, tokens = self.stepper.evaluate(batch for batch in found if batch is not None)
        part = {} if own is None or count == own else {"val_batches": count, "val_batches_in_all": own}
        self._log({"step": self.state.step, "val_loss": loss, "val_tokens": tokens, **part})

    def _log(self, values: dict[str, Any]) -> None:
        self.history.append(values)
        self.log.values(values)

    def _save(self) -> None:
        """Once a step at most; nothing without a folder."""
        if self.out is None or self._saved_step == self.state.step:
            return
        self._saved_step = self.state.step
        state = replace(self.state, loader=self.feed.state())
        if self.ranks.first:
            stepper = self.stepper
            self.saved = save_checkpoint(self.out, stepper.model, stepper.optimizer, state, keep=self.config.keep)
            self.log.event("checkpoint", step=state.step, path=str(self.saved))
        self.ranks.wait()

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

    def _result(self, outcome: RunOutcome, skipped: int) -> FitResult:
        return FitResult(
            outcome=outcome,
            step=self.state.step,
            loss=self.loss,
            history=tuple(self.history),
            skipped_blocks=skipped,
            checkpoint=self.saved,
            signal=(self.signal or signal.SIGTERM) if self.stopped else None,
            data=self.data,
        )

    def _say(self, text: str) -> None:
        if self.ranks.first:
            log.info(text)


def _val_feed(loader: Any, val_loader: Any, ranks: Ranks, **how: Any) -> tuple[TrainFeed | None, Any]:
    """What is evaluated on, and the state that brings it back to its beginning; None without a split val."""
    source = loader if val_loader is None else val_loader
    start_of = getattr(source, "start_of", None)
    state = None if start_of is None else start_of("val")
    if state is None and val_loader is None:
        return None, None
    if start_of is None and hasattr(source, "get_batch") and hasattr(source, "state_dict"):
        state = source.state_dict()
    if state is not None and isinstance(source, GPTEpisodeDataLoader) and not source.steps_per_epoch("val"):
        raise ConfigError(
            f"{source.directory}: val has fewer rows than a batch, and epoch_drop_last drops them all: leave "
            'epoch_drop_last out, or give val={"epoch_drop_last": False}'
        )
    return TrainFeed(source, ranks.device, "val", **how), state


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _seed_of(seed: int, step: int, rank: int) -> int:
    """What is random in a step depends on these three alone, so a resumed run draws the same."""
    return (seed * 1_000_003 + step) * 4099 + rank
