"""The options of a training run: one frozen object, checked when made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from chatmill.errors import ConfigError, UnknownNameError
from chatmill.load.config_files import close_name
from chatmill.train.losses import LossKind


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

    steps: int | None = None
    """Optimizer steps of this phase; None: as many as `epochs` take, or as the loader has."""
    epochs: int | None = None
    """Passes over the data, in place of `steps`."""
    learning_rate: float = 3e-4
    """The highest rate, reached at the end of the warmup."""
    min_lr_ratio: float = 0.1
    """The cosine ends at this fraction of it."""
    warmup_pct: float = 0.03
    """Fraction of the phase's steps in which the rate rises."""
    weight_decay: float = 0.1
    """On matrices; vectors (norms, biases) have none."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0
    """Largest norm of the gradient; 0: no limit."""
    accumulation: int = 1
    """Batches of each rank in one optimizer step."""
    loss: LossKind = LossKind.WEIGHTED
    """What is divided by what; `weighted` is the token mean where every weight is 0 or 1."""
    w_r: float = 1.0
    """Weight of reasoning in the loss "span"."""
    w_f: float = 1.0
    """Weight of answers in the loss "span"."""
    precision: Precision = Precision.AUTO
    device: str = "auto"
    """auto: the GPU of this rank, where there is one."""
    compile: bool = False
    """Compile each layer of the model with torch.compile."""
    seed: int = 1337
    """Of weights, and of everything random in a step: dropout at step s is that of seed and s, also after a resume."""
    post_training: bool = False
    """One pass over the data, no second epoch; blocks with nothing to train are skipped and counted."""
    eval_every: int | None = None
    """Steps between evaluations on val; None: at the end only."""
    eval_batches: int | None = None
    """Batches of val in one evaluation, at most; always the same ones. None: all of val (20 where it never ends)."""
    save_every: int | None = None
    """Steps between checkpoints; None: at the end only (and on SIGTERM)."""
    keep: int = 2
    """Checkpoints that are kept; older ones are removed."""
    log_every: int = 10
    """Steps between lines of the log."""

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(f"steps is {self.steps} and epochs is {self.epochs}: give one of them")
        if self.post_training and self.epochs not in (None, 1):
            raise ConfigError(f"epochs is {self.epochs}, but post_training makes one pass: leave epochs out")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> TrainConfig:
        """From keyword arguments; an unknown name is refused with a did-you-mean."""
        for name in options:
            if name not in OPTIONS:
                close = close_name(name, OPTIONS)
                if close is not None:
                    raise ConfigError(f"unknown training option {name!r}; did you mean {close!r}?")
                raise UnknownNameError("training option", name, list(OPTIONS))
        return cls(**options)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Number:
    """Checks a number in a range; text, which the environment gives, is read."""

    least: float
    most: float = math.inf
    whole: bool = False
    optional: bool = False
    above: bool = False
    """`least` itself is not allowed."""

    def __call__(self, name: str, value: Any) -> float | int | None:
        if value is None and self.optional:
            return None
        try:
            if isinstance(value, bool) or (self.whole and isinstance(value, float) and value != int(value)):
                raise ValueError
            number = int(value) if self.whole else float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{name} is {value!r}; allowed: {self.allowed}") from None
        if not self.least <= number <= self.most or (self.above and number == self.least):
            raise ConfigError(f"{name} is {value!r}; allowed: {self.allowed}")
        return number

    @property
    def allowed(self) -> str:
        what = "a whole number" if self.whole else "a number"
        low = f"above {self.least:g}" if self.above else f"from {self.least:g}"
        return f"{what} {low}" + (f" to {self.most:g}" if math.isfinite(self.most) else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """Checks a member of an enumeration."""

    members: type[StrEnum]

    def __call__(self, name: str, value: Any) -> StrEnum:
        if value not in list(self.members):
            raise ConfigError(f"{name} is {value!r}; allowed: {', '.join(self.members)}")
        return self.members(value)


FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def as_flag(name: str, value: Any) -> bool:
    """A bool, or text that means one (an empty one is false)."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in FLAGS or not text:
        return FLAGS.get(text, False)
    raise ConfigError(f"{name} is {value!r}; allowed: {', '.join(FLAGS)}")


def _text(name: str, value: Any) -> str:
    return str(value)


_COUNT, _COUNT_OR_NONE = _Number(least=1, whole=True), _Number(least=1, whole=True, optional=True)
_SHARE = _Number(least=0, most=1)
CHECKS: dict[str, Any] = {
    "steps": _COUNT_OR_NONE,
    "epochs": _COUNT_OR_NONE,
    "learning_rate": _Number(least=0, above=True),
    "min_lr_ratio": _SHARE,
    "warmup_pct": _SHARE,
    "weight_decay": _Number(least=0),
    "beta1": _SHARE,
    "beta2": _SHARE,
    "eps": _Number(least=0, above=True),
    "clip": _Number(least=0),
    "accumulation": _COUNT,
    "loss": _Choice(members=LossKind),
    "w_r": _Number(least=0),
    "w_f": _Number(least=0),
    "precision": _Choice(members=Precision),
    "device": _text,
    "compile": as_flag,
    "seed": _Number(least=0, most=2**32 - 1, whole=True),
    "post_training": as_flag,
    "eval_every": _COUNT_OR_NONE,
    "eval_batches": _COUNT_OR_NONE,
    "save_every": _COUNT_OR_NONE,
    "keep": _COUNT,
    "log_every": _COUNT,
}
OPTIONS = tuple(field.name for field in fields(TrainConfig))
"""All names, in the order of the class."""
