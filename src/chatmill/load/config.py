"""The training config of the loaders: options with checks, read from XML, YAML or keyword arguments."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from chatmill.errors import ConfigError
from chatmill.load.config_files import Entry, read_section
from chatmill.load.order import MAX_SEED
from chatmill.structs import misspelt, typed


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


class RowOrder(StrEnum):
    """How the rows of an epoch are shuffled."""

    GLOBAL = "global"
    """Over the whole dataset, all of which is needed at a time."""
    WINDOWS = "windows"
    """Shards are permuted, then rows inside windows of some shards: each shard is read once an epoch."""


DEFAULT_SAMPLING = {DatasetMode.TOKEN_STREAM: SamplingMode.RANDOM, DatasetMode.SFT_EPISODE: SamplingMode.EPOCH}
Count = Annotated[int, Meta(ge=1)]
LEFT_OUT: Any = None
"""Default of an option that becomes something else if it is left out."""


class TrainingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of both loaders. Strings are accepted for the choices; every value is checked when made."""

    batch_size: Count
    """Rows per batch on one rank."""
    block_size: Count
    """Positions per row; a row is cut from block_size + 1 tokens."""
    dataset_mode: DatasetMode = DatasetMode.TOKEN_STREAM
    batch_sampling_mode: SamplingMode = LEFT_OUT
    """Left out: the mode's default: random for token_stream, epoch for sft_episode."""
    epoch_shuffle: bool = LEFT_OUT
    """Left out: True; the split val is read in order."""
    epoch_drop_last: bool = LEFT_OUT
    """Left out: True; the split val is read whole."""
    epoch_seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] = 1337
    use_loss_mask: bool = False
    pad_token_id: Annotated[int, Meta(ge=0, le=2**32 - 1)] | None = None
    """None: the tokenizer's eos id."""
    episode_min_tokens: Count = 2
    order: RowOrder = RowOrder.GLOBAL
    window: Count = 16
    """Shards of a window, for `order: windows`."""
    prefetch: Annotated[int, Meta(ge=0)] | None = None
    """Bytes of a remote dataset that are fetched ahead; None: this window and the next one."""
    pack: bool = False
    """Several episodes in a row."""
    packing_strategy: str | None = None
    """How rows are packed; None: as the build did, else best_fit."""
    policy: Any = None
    """A policy or its name: choose what is trained from the stored kinds, in place of the stored masks."""
    teacher: bool = False
    """Give the distributions of a teacher next to the targets."""
    logprobs: bool = False
    """Give the log-probabilities of sampled tokens next to the targets."""
    device: str | None = None
    dataset_dir: str | None = None
    extra: dict[str, Any] = {}
    """Elements that are not options of the loaders, as they were read; also there as attributes."""
    left_out: frozenset[str] = frozenset()
    """Options that were not given and have a default that depends on mode or split; found when made."""

    def __post_init__(self) -> None:
        left_out = set()
        for name, kind in KINDS.items():
            value = getattr(self, name)
            if value is LEFT_OUT and name in ("batch_sampling_mode", "epoch_shuffle", "epoch_drop_last"):
                left_out.add(name)
                value = DEFAULT_SAMPLING[self.dataset_mode] if name == "batch_sampling_mode" else True
            elif name in ("device", "dataset_dir") and value is not None:
                value = str(value)
            value = value.item() if hasattr(value, "item") else value  # a number of numpy
            msgspec.structs.force_setattr(self, name, typed(kind, value, f"<{name}>"))
        msgspec.structs.force_setattr(self, "left_out", frozenset(left_out))

    def __getattr__(self, name: str) -> Any:
        """Extra elements are attributes too; only called for names that are not fields."""
        if name in self.extra:
            return self.extra[name]
        raise AttributeError(f"the training config has no {name!r}; it has {', '.join((*KINDS, *self.extra))}")

    @property
    def wants_masks(self) -> bool:
        """Whether batches are to say what is trained; a policy asks for that by itself."""
        return self.use_loss_mask or self.policy is not None

    def replace(self, **options: Any) -> TrainingConfig:
        """Copy with other options; options that nobody set still follow the dataset mode and the split."""
        options_set = {name: getattr(self, name) for name in (*KINDS, "extra") if name not in self.left_out}
        return TrainingConfig(**(options_set | options))

    def for_split(self, split: str) -> TrainingConfig:
        """Return the options of one split; val is read in order, whole and the same every time, by default."""
        if split != "val":
            return self
        return self.replace(**dict.fromkeys(self.left_out & {"epoch_shuffle", "epoch_drop_last"}, False))


KINDS = {
    field.name: field.type
    for field in msgspec.structs.fields(TrainingConfig)
    if field.name not in ("extra", "left_out")
}
"""The types of the options, in the order of the class."""
SPEC_OPTIONS = tuple(KINDS)[: tuple(KINDS).index("episode_min_tokens") + 1]
"""The options of the spec, with which a misspelt name is compared: the others have short names."""


def load_training_config(path: str | Path | None = None, **options: Any) -> TrainingConfig:
    """Read the `<training>` section of an XML or YAML file; keyword arguments override it, or suffice alone."""
    where, entries = ("the training config", []) if path is None else read_section(Path(path))
    overrides = {name: value for name, value in options.items() if value is not None}
    entries = [entry for entry in entries if entry.name not in overrides and entry.value is not None]
    entries += [Entry(name, value, "option") for name, value in overrides.items()]
    values: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for entry in entries:
        place = f"{entry.where}: <{entry.name}>"
        kind = KINDS.get(entry.name)
        if kind is not None:
            values[entry.name] = typed(kind, entry.value, place, text=True) if entry.is_text else entry.value
        elif (match := misspelt(entry.name, SPEC_OPTIONS)) is not None:
            raise ConfigError(f"{place} is no option; did you mean <{match}>?")
        else:
            extra[entry.name] = entry.value
    for name in ("batch_size", "block_size"):
        if values.get(name) is None:
            raise ConfigError(f"{where}: <{name}> is required and missing; give a whole number, 1 or more")
    if extra:
        warnings.warn(
            f"{where}: not options of the loaders, kept as they are: {', '.join(extra)}", UserWarning, stacklevel=2
        )
    try:
        return TrainingConfig(**values, extra=extra)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def as_training_config(config: Any) -> TrainingConfig:
    """Make a config from a `TrainingConfig`, a path, a mapping, or any object with the attributes."""
    if isinstance(config, TrainingConfig):
        return config
    if isinstance(config, str | Path):
        return load_training_config(config)
    if isinstance(config, Mapping):
        return load_training_config(**config)
    values = {name: getattr(config, name, None) for name in KINDS}
    return load_training_config(**{name: value for name, value in values.items() if value is not None})
