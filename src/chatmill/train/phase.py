"""How long a phase is, how far it has come, and its learning rate.

Progress is counted in data: a run may resume with other ranks and batch sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from chatmill.errors import ConfigError
from chatmill.train.config import TrainConfig
from chatmill.train.feed import TrainFeed


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase from here on, in the steps that it takes with the present ranks, batch size and accumulation."""

    steps: int
    """Optimizer steps that the whole phase would take."""
    steps_left: int
    batches_left: int | None
    """Batches of each rank before the data of the phase ends; None: it does not end."""

    @property
    def first(self) -> int:
        """The step of the phase that comes next; this is the number of steps done unless the batches changed."""
        return max(self.steps - self.steps_left, 0)

    def micro_batches(self, number: int, accumulation: int) -> int:
        """Batches of the step `number` from here on: the last step of the data may have fewer than the others."""
        if self.batches_left is None:
            return accumulation
        return max(0, min(accumulation, self.batches_left - number * accumulation))


def phase_of(feed: TrainFeed, config: TrainConfig, *, done: int, first_epoch: int) -> Phase:
    """The phase that `done` steps were made of: as long as asked for, or as the data is.

    Without `steps` the data decides alone. With `steps`, that many are made; post-training never goes over its data
    twice, so there the data may end it earlier.
    """
    total = feed.batches(config, first_epoch)
    if config.post_training and total is None:
        raise ConfigError(
            "post_training ends when its data ends, and this loader never does: give transcripts, or an episode "
            "loader in epoch mode"
        )
    if config.steps is not None and not config.post_training:
        return Phase(steps=config.steps, steps_left=max(0, config.steps - done), batches_left=None)
    asked = config.epochs is not None or config.post_training
    if total is None or (not asked and hasattr(feed.loader, "get_batch")):
        raise ConfigError("how long? Give steps (or epochs, where the loader has them): the loader itself never ends")
    left = feed.batches_left(config, first_epoch)
    if left is None:
        left = max(0, total - done * config.accumulation)
    steps, steps_left = -(-total // config.accumulation), -(-left // config.accumulation)
    if config.steps is not None:
        steps, steps_left = min(steps, config.steps), min(steps_left, max(0, config.steps - done))
    return Phase(steps=steps, steps_left=steps_left, batches_left=left)


def warmup_steps(config: TrainConfig, steps: int) -> int:
    """Steps in which the rate rises: `warmup_pct` of the phase's steps, rounded up."""
    return math.ceil(config.warmup_pct * steps - 1e-9)


def learning_rate(config: TrainConfig, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of a phase of `steps`: a straight rise, then half a cosine down.

    The last step of the warmup has the full rate; the last step of the phase has `min_lr_ratio` of it.
    """
    rising = warmup_steps(config, steps)
    if step < rising:
        return config.learning_rate * (step + 1) / rising
    progress = (step - rising + 1) / max(steps - rising, 1)
    low = config.min_lr_ratio
    return config.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))
