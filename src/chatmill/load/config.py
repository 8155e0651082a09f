"""The training config of the loaders: options with checks, read from XML, YAML or keyword arguments."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from chatmill.errors import ConfigError
from chatmill.label.policy import Policy
from chatmill.load.config_files import OTHER_NAMES, SECTION, ConfigEntry, close_name, read_section
from chatmill.load.long_episodes import LongEpisodes
from chatmill.load.option_checks import Check, Count, Flag, OneOf, OptionalText, Seed, TokenId, checks_of

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _PolicyOption(Check):
    """A policy, or its name."""

    def _typed(self, value: Any, text: bool) -> Policy | str:
        return value if isinstance(value, Policy) else str(value)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Options of both loaders. Strings are accepted for the choices; every value is checked when made."""

    batch_size: Count
    """Rows per batch on one rank."""
    block_size: Count
    """Positions per row; a row is cut from block_size + 1 tokens."""
    dataset_mode: Annotated[DatasetMode, OneOf(members=DatasetMode)] = DatasetMode.TOKEN_STREAM
    batch_sampling_mode: Annotated[SamplingMode | None, OneOf(members=SamplingMode, optional=True)] = None
    """None becomes the mode's default: random for token_stream, epoch for sft_episode."""
    epoch_shuffle: Annotated[bool, Flag(optional=True)] = UNSET
    """Left out: True; the split val is read in order."""
    epoch_drop_last: Annotated[bool, Flag(optional=True)] = UNSET
    """Left out: True; the split val is read whole."""
    epoch_seed: Seed = 1337
    use_loss_mask: Annotated[bool, Flag()] = False
    pad_token_id: TokenId = None
    """None: the tokenizer's eos id."""
    episode_min_tokens: Count = 2
    pack: Annotated[bool, Flag()] = False
    """Several episodes in a row."""
    packing_strategy: OptionalText = None
    """How rows are packed; None: as the build did, else best_fit."""
    policy: Annotated[Policy | str | None, _PolicyOption(optional=True)] = None
    """Choose what is trained from the stored kinds, in place of the stored masks."""
    overflow: Annotated[LongEpisodes | None, OneOf(members=LongEpisodes, optional=True)] = None
    """Episodes longer than a row; None: cut, which is what the loaders do by themselves."""
    device: OptionalText = None
    dataset_dir: OptionalText = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Elements that are not options of the loaders, as they were read; also there as attributes."""
    left_out: frozenset[str] = field(init=False, repr=False, compare=False, default=frozenset())
    """Options that were not asked for and have a default that depends on mode or split."""

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            object.__setattr__(self, name, check(f"<{name}>", getattr(self, name)))
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

    @property
    def wants_masks(self) -> bool:
        """Whether batches are to say what is trained; a policy asks for that by itself."""
        return self.use_loss_mask or self.policy is not None

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
        """The options of one split; val is read in order, whole and the same every time, by default."""
        if split != "val":
            return self
        return self.replace(**dict.fromkeys(self.left_out & {"epoch_shuffle", "epoch_drop_last"}, False))


def load_training_config(path: str | Path | None = None, **options: Any) -> TrainingConfig:
    """Read the `<training>` section of an XML or YAML file; keyword arguments override it, or suffice alone."""
    section = ConfigEntry(name=SECTION, where="the training config") if path is None else read_section(Path(path))
    entries = [entry for entry in section.children if entry.name not in options]
    entries += [ConfigEntry(name=name, value=value, where="option") for name, value in options.items()]
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


def _from_entries(entries: list[ConfigEntry], source: str) -> TrainingConfig:
    values: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for entry in entries:
        if entry.name in CHECKS:
            values[entry.name] = _checked(entry)
        elif entry.name not in OTHER_NAMES and (known := close_name(entry.name, SPEC_OPTIONS)) is not None:
            raise ConfigError(f"{entry.where}: <{entry.name}> is no option; did you mean <{known}>?")
        else:
            extra[entry.name] = entry.plain()
    for name in ("batch_size", "block_size"):
        if values.get(name) is None:
            raise ConfigError(f"{source}: <{name}> is required and missing; give a whole number, 1 or more")
    if extra:
        warnings.warn(
            f"{source}: not options of the loaders, kept as they are: {', '.join(extra)}", UserWarning, stacklevel=3
        )
    return TrainingConfig(**values, extra=extra)


def _checked(entry: ConfigEntry) -> Any:
    """The value of one entry in its type; errors name the place, the element and what is allowed."""
    try:
        return CHECKS[entry.name](f"<{entry.name}>", entry.plain(), text=entry.is_text)
    except ConfigError as error:
        raise ConfigError(f"{entry.where}: {error}") from None


CHECKS: dict[str, Check] = checks_of(TrainingConfig)
"""How each option is checked, in the order of the class."""
OPTIONS = tuple(CHECKS)
SPEC_OPTIONS = OPTIONS[: OPTIONS.index("episode_min_tokens") + 1]
"""The options of the spec, with which a misspelt name is compared: the others have short names."""
