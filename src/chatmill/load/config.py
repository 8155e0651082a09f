"""The training config of the loaders: options with checks, read from XML, YAML or keyword arguments."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from chatmill.errors import ConfigError
from chatmill.load.config_files import OTHER_NAMES, Entry, Section, close_name, read_section
from chatmill.load.long_episodes import LongEpisodes
from chatmill.load.order import MAX_SEED

UNSET: Any = None
"""Default of an option that becomes something else where it is left out."""


class DatasetMode(StrEnum):
    """Which loader reads the dataset."""

    TOKEN_STREAM = "token_stream"
    """Random windows of a flat stream of tokens."""
    SFT_EPISODE = "sft_episode"
    """Whole conversations, one per row (or several, packed)."""


class SamplingMode(StrEnum):
    """How rows are chosen."""

    RANDOM = "random"
    """With replacement, from one endless stream of draws."""
    EPOCH = "epoch"
    """Each episode once per epoch."""


DEFAULT_SAMPLING = {DatasetMode.TOKEN_STREAM: SamplingMode.RANDOM, DatasetMode.SFT_EPISODE: SamplingMode.EPOCH}


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Options of both loaders. Strings are accepted for the choices; every value is checked when made."""

    batch_size: int
    """Rows per batch on one rank."""
    block_size: int
    """Positions per row; a row is cut from block_size + 1 tokens."""
    dataset_mode: DatasetMode = DatasetMode.TOKEN_STREAM
    batch_sampling_mode: SamplingMode | None = None
    """None becomes the mode's default: random for token_stream, epoch for sft_episode."""
    epoch_shuffle: bool = UNSET
    """Left out: True; the split val is read in order."""
    epoch_drop_last: bool = UNSET
    """Left out: True; the split val is read whole."""
    epoch_seed: int = 1337
    use_loss_mask: bool = False
    pad_token_id: int | None = None
    """None: the tokenizer's eos id."""
    episode_min_tokens: int = 2
    pack: bool = False
    """Several episodes in a row."""
    packing_strategy: str | None = None
    """How rows are packed; None: best_fit."""
    policy: str | None = None
    """Choose what is trained from the stored kinds, in place of the stored masks."""
    overflow: LongEpisodes | None = None
    """Episodes longer than a row; None: cut, which is what the loaders do by themselves."""
    device: str | None = None
    dataset_dir: str | None = None
    val: Mapping[str, Any] = field(default_factory=dict)
    """Options of the split val, where they differ (`VAL_OPTIONS`)."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Elements that are not options of the loaders, as they were read; also there as attributes."""
    left_out: frozenset[str] = field(init=False, repr=False, compare=False, default=frozenset())
    """Options that were not asked for and have a default that depends on mode or split."""

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        defaults = {
            "batch_sampling_mode": DEFAULT_SAMPLING[self.dataset_mode],
            "epoch_shuffle": True,
            "epoch_drop_last": True,
        }
        left_out = frozenset(name for name in defaults if getattr(self, name) is None)
        for name in left_out:
            object.__setattr__(self, name, defaults[name])
        object.__setattr__(self, "left_out", left_out)

    def __getattr__(self, name: str) -> Any:
        """Extra elements are attributes too; only called for names that are not fields."""
        extra = self.__dict__.get("extra", {})
        if name in extra:
            return extra[name]
        raise AttributeError(f"the training config has no {name!r}; it has {', '.join((*OPTIONS, *extra))}")

    def sampling_in(self, mode: DatasetMode) -> SamplingMode:
        """The sampling mode of a loader of `mode`: what was asked for, else that loader's default."""
        if "batch_sampling_mode" in self.left_out or self.batch_sampling_mode is None:
            return DEFAULT_SAMPLING[mode]
        return self.batch_sampling_mode

    def replace(self, **options: Any) -> TrainingConfig:
        """A copy with other options; what was never asked for keeps following the dataset mode and the split."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init and f.name not in self.left_out}
        return TrainingConfig(**(values | options))

    def for_split(self, split: str) -> TrainingConfig:
        """The options of one split: val is evaluated in order, whole, and the same every time, unless they say else."""
        if split != "val":
            return self
        whole = {name: False for name in ("epoch_shuffle", "epoch_drop_last") if name in self.left_out}
        return self.replace(**(whole | dict(self.val)))


def load_training_config(path: str | Path | None = None, **options: Any) -> TrainingConfig:
    """Read the `<training>` section of an XML or YAML file; keyword arguments override it, or stand alone."""
    section = read_section(Path(path)) if path is not None else Section(entries=[], where="the training config")
    entries = [entry for entry in section.entries if entry.name not in options]
    entries += [Entry(name=name, value=value, where="option") for name, value in options.items()]
    return _from_entries(entries, section.where)


def as_training_config(config: Any) -> TrainingConfig:
    """A config from what users hold: a `TrainingConfig`, a path, a mapping, or any object with the attributes."""
    if isinstance(config, TrainingConfig):
        return config
    if isinstance(config, str | Path):
        return load_training_config(config)
    if isinstance(config, Mapping):
        return load_training_config(**config)
    found = {name: getattr(config, name, None) for name in OPTIONS}
    return load_training_config(**{name: value for name, value in found.items() if value is not None})


def _from_entries(entries: list[Entry], source: str) -> TrainingConfig:
    values: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for entry in entries:
        if entry.name in CHECKS:
            values[entry.name] = _checked(entry)
        elif entry.name not in OTHER_NAMES and (known := close_name(entry.name, SPEC_OPTIONS)) is not None:
            raise ConfigError(f"{entry.where}: <{entry.name}> is no option; did you mean <{known}>?")
        else:
            extra[entry.name] = entry.value
    for name in ("batch_size", "block_size"):
        if values.get(name) is None:
            raise ConfigError(f"{source}: <{name}> is required and missing; give a whole number, 1 or more")
    if extra:
        warnings.warn(
            f"{source}: not options of the loaders, kept as they are: {', '.join(extra)}", UserWarning, stacklevel=3
        )
    return TrainingConfig(**values, extra=extra)


def _checked(entry: Entry) -> Any:
    """The value of one entry in its type; errors name the place, the element and what is allowed."""
    value = entry.value
    try:
        if entry.is_text:
            value = _from_text(entry.name, value)
        return CHECKS[entry.name](entry.name, value)
    except ConfigError as error:
        raise ConfigError(f"{entry.where}: {error}") from None


def _from_text(name: str, text: str) -> Any:
    """XML knows only text: turn it into the type that the option has."""
    check = CHECKS[name]
    if check in (_flag, _optional_flag):
        flags = {"true": True, "1": True, "false": False, "0": False}
        if text.lower() not in flags:
            raise ConfigError(f"<{name}> is {text!r}; allowed: true, false")
        return flags[text.lower()]
    if isinstance(check, _Whole):
        try:
            return int(text)
        except ValueError:
            raise ConfigError(f"<{name}> is {text!r}; allowed: {check.allowed}") from None
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """Checks a whole number in a range."""

    least: int
    most: int | None = None
    optional: bool = False

    @property
    def allowed(self) -> str:
        return f"a whole number, {self.least}" + (f" to {self.most}" if self.most is not None else " or more")

    def __call__(self, name: str, value: Any) -> int | None:
        if value is None and self.optional:
            return None
        whole = not isinstance(value, bool) and hasattr(value, "__index__")
        if not whole or value < self.least or (self.most is not None and value > self.most):
            raise ConfigError(f"<{name}> is {value!r}; allowed: {self.allowed}")
        return int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """Checks a member of an enumeration."""

    members: type[StrEnum]
    optional: bool = False

    def __call__(self, name: str, value: Any) -> StrEnum | None:
        if value is None and self.optional:
            return None
        if value not in list(self.members):
            raise ConfigError(f"<{name}> is {value!r}; allowed: {', '.join(self.members)}")
        return self.members(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"<{name}> is {value!r}; allowed: true, false")
    return value


def _optional_flag(name: str, value: Any) -> bool | None:
    return None if value is None else _flag(name, value)


def _text(name: str, value: Any) -> str | None:
    return None if value is None else str(value)


def _val_options(name: str, value: Any) -> dict[str, Any]:
    """The options of the split val: a mapping, or the elements below `<val>`."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"<{name}> is {value!r}; allowed: options of the split val: {', '.join(VAL_OPTIONS)}")
    checked = {}
    for option, given in value.items():
        if option not in VAL_OPTIONS:
            raise ConfigError(f"<{name}> has no option <{option}>; allowed: {', '.join(VAL_OPTIONS)}")
        own = _from_text(option, given) if isinstance(given, str) else given
        checked[option] = CHECKS[option](option, own)
    return checked


SPEC_OPTIONS: dict[str, Any] = {
    "batch_size": _Whole(least=1),
    "block_size": _Whole(least=1),
    "dataset_mode": _Choice(members=DatasetMode),
    "batch_sampling_mode": _Choice(members=SamplingMode, optional=True),
    "epoch_shuffle": _optional_flag,
    "epoch_drop_last": _optional_flag,
    "epoch_seed": _Whole(least=0, most=MAX_SEED),
    "use_loss_mask": _flag,
    "pad_token_id": _Whole(least=0, most=2**32 - 1, optional=True),
    "episode_min_tokens": _Whole(least=1),
}
"""The options a misspelt name is compared with, and how each is checked."""
CHECKS: dict[str, Any] = {**SPEC_OPTIONS, "pack": _flag, "packing_strategy": _text, "policy": _text,
                          "overflow": _Choice(members=LongEpisodes, optional=True),
                          "device": _text, "dataset_dir": _text, "val": _val_options}  # fmt: skip
VAL_OPTIONS = ("batch_size", "batch_sampling_mode", "epoch_shuffle", "epoch_drop_last", "epoch_seed")
"""What the split val may have of its own."""
OPTIONS = tuple(CHECKS)
