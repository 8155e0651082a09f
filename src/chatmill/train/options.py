"""The options of a training run, checked when made: keyword arguments of `fit`, and keys of a config file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from chatmill.errors import ConfigError, UnknownNameError
from chatmill.structs import typed

Count = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
OptionsT = TypeVar("OptionsT", bound="TrainOptions")


class TrainOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `fit`."""

    steps: Count | None = None
    """Optimizer steps of this phase; post-training ends with its data, if that comes first."""
    epochs: Count | None = None
    """Passes over the data, in place of `steps`."""
    learning_rate: Annotated[float, msgspec.Meta(gt=0)] = 3e-4
    """The highest rate, reached at the end of the warmup."""
    min_lr_ratio: Share = 0.1
    """The cosine ends at this fraction of it."""
    warmup_pct: Share = 0.03
    """Fraction of the phase's steps in which the rate rises."""
    weight_decay: NotNegative = 0.1
    """Of matrices; vectors (norms, biases) have none."""
    clip: NotNegative = 1.0
    """Largest norm of the gradient; 0: no limit."""
    accumulation: Count = 1
    """Batches in one optimizer step."""
    seed: int = 1337
    """Of everything random in a step: dropout at step s is that of seed and s, also after a resume."""
    post_training: bool = False
    """The mode of spec 2: one pass over the data, every row of it."""
    eval_every: Count | None = None
    """Steps between evaluations on val; None: at the end only."""
    save_every: Count | None = None
    """Steps between checkpoints; None: at the end only (and on SIGTERM)."""
    keep: Count = 2
    """Checkpoints that are kept; older ones are removed."""
    log_every: Count = 10
    """Steps between lines of the log."""


def checked(kind: type[OptionsT], settings: Mapping[str, Any]) -> OptionsT:
    """Make options from values, or from text as XML and the environment have it; mistakes are a `ConfigError`."""
    fields = kind.__struct_fields__
    for name in settings:
        if name not in fields:
            raise UnknownNameError("training option", name, list(fields))
    kinds = {field.name: field.type for field in msgspec.structs.fields(kind)}
    values = {name: typed(kinds[name], value, name, text=True) for name, value in settings.items()}
    options: OptionsT = typed(kind, values, "the options")
    if options.steps is not None and options.epochs is not None:
        raise ConfigError(f"steps is {options.steps} and epochs is {options.epochs}: give one of them")
    if options.post_training and options.epochs not in (None, 1):
        raise ConfigError(f"epochs is {options.epochs}, but post_training makes one pass: leave epochs out")
    return options
