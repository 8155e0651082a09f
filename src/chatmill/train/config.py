"""The options of a training run: one frozen object, checked when made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from chatmill.errors import ConfigError, UnknownNameError
from chatmill.load.option_checks import (
    Check,
    Count,
    LooseFlag,
    Number,
    OneOf,
    OptionalCount,
    Seed,
    checks_of,
)
from chatmill.train.losses import LossKind

Positive = Annotated[float, Number(above=True)]
NotNegative = Annotated[float, Number()]
Share = Annotated[float, Number(most=1)]


class Precision(StrEnum):
    """In which numbers the linear layers compute; weights and optimizer keep the dtype that the model has."""

    AUTO = "auto"
    """bf16 on a GPU, else fp32."""
    FP32 = "fp32"
    """No autocast: the model's own dtype (float32, or float64 for proofs)."""
    BF16 = "bf16"
    """bfloat16 autocast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Options of `fit`, and of the section `train` of a recipe."""

    steps: OptionalCount = None
    """Optimizer steps of this phase; None: as many as `epochs` take, or as the loader has."""
    epochs: OptionalCount = None
    """Passes over the data, in place of `steps`."""
    learning_rate: Positive = 3e-4
    """The highest rate, reached at the end of the warmup."""
    min_lr_ratio: Share = 0.1
    """The cosine ends at this fraction of it."""
    warmup_pct: Share = 0.03
    """Fraction of the phase's steps in which the rate rises."""
    weight_decay: NotNegative = 0.1
    """On matrices; vectors (norms, biases) have none."""
    beta1: Share = 0.9
    beta2: Share = 0.95
    eps: Positive = 1e-8
    clip: NotNegative = 1.0
    """Largest norm of the gradient; 0: no limit."""
    accumulation: Count = 1
    """Batches of each rank in one optimizer step."""
    loss: Annotated[LossKind, OneOf(members=LossKind)] = LossKind.WEIGHTED
    """What is divided by what; `weighted` is the token mean where every weight is 0 or 1."""
    w_r: NotNegative = 1.0
    """Weight of reasoning in the loss "span"."""
    w_f: NotNegative = 1.0
    """Weight of answers in the loss "span"."""
    precision: Annotated[Precision, OneOf(members=Precision)] = Precision.AUTO
    device: Annotated[str, Check()] = "auto"
    """auto: the GPU of this rank, where there is one."""
    compile: LooseFlag = False
    """Compile each layer of the model with torch.compile."""
    seed: Seed = 1337
    """Of weights, and of everything random in a step: dropout at step s is that of seed and s, also after a resume."""
    post_training: LooseFlag = False
    """One pass over the data, no second epoch; blocks with nothing to train are skipped and counted."""
    eval_every: OptionalCount = None
    """Steps between evaluations on val; None: at the end only."""
    eval_batches: OptionalCount = None
    """Batches of val in one evaluation, at most; always the same ones. None: all of val (20 where it never ends)."""
    save_every: OptionalCount = None
    """Steps between checkpoints; None: at the end only (and on SIGTERM)."""
    keep: Count = 2
    """Checkpoints that are kept; older ones are removed."""
    log_every: Count = 10
    """Steps between lines of the log."""

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name), text=True))
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(f"steps is {self.steps} and epochs is {self.epochs}: give one of them")
        if self.post_training and self.epochs not in (None, 1):
            raise ConfigError(f"epochs is {self.epochs}, but post_training makes one pass: leave epochs out")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> TrainConfig:
        """From keyword arguments; an unknown name is refused with a did-you-mean."""
        for name in options:
            if name not in OPTIONS:
                raise UnknownNameError("training option", name, list(OPTIONS))
        return cls(**options)


CHECKS: dict[str, Check] = checks_of(TrainConfig)
OPTIONS = tuple(CHECKS)
"""All names, in the order of the class."""
