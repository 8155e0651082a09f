"""Recipes of `chatmill train`: model, data and options, checked, with overrides from the environment."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

from chatmill.cli.train_xml import NOT_IN_DATA, read_xml_recipe
from chatmill.errors import ConfigError
from chatmill.load.config import CHECKS as LOADER_OPTIONS
from chatmill.load.config import TrainingConfig
from chatmill.load.option_checks import (
    LOOSE_FLAGS,
    Check,
    Count,
    Flag,
    LooseFlag,
    OptionalCount,
    OptionalText,
    as_flag,
    checks_of,
)
from chatmill.train.config import CHECKS, TrainConfig
from chatmill.train.gpt import GPTConfig
from chatmill.yaml_files import read_mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileNames(Check):
    """File names or globs: a list, or a text with spaces between them."""

    def _typed(self, value: Any, text: bool) -> tuple[str, ...]:
        return tuple(value.split() if isinstance(value, str) else map(str, value))

    @property
    def _allowed(self) -> str:
        return "file names"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mapping(Check):
    """Options of something else, which checks them."""

    def _typed(self, value: Any, text: bool) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise TypeError
        return value

    @property
    def _allowed(self) -> str:
        return "a mapping of options"


Files = Annotated[tuple[str, ...], _FileNames(optional=True)]
Options = Annotated[dict[str, Any], _Mapping(optional=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    """What is read, and how it becomes batches."""

    dataset: OptionalText = None
    """Folder of a dataset: episodes (made by `chatmill build`), or flat token files."""
    transcripts: Files = ()
    """Files of marker transcripts, for the post-training mode."""
    val_transcripts: Files = ()
    texts: Files = ()
    """Files of plain text records, `{"text": ...}` a line; they are packed as `packing` says."""
    val_texts: Files = ()
    rows: Files = ()
    """Files of packed rows, made by `chatmill pack`."""
    val_rows: Files = ()
    packing: Options = field(default_factory=dict)
    """Options of `block_tokenize_fn` for `texts`; `max_length` is block_size where it is left out."""
    batch_size: Count = 8
    """Rows per batch on one rank."""
    block_size: OptionalCount = None
    """Positions per row; default: what the dataset's pack plan needs, else 1024."""
    pack: LooseFlag = True
    """Several episodes in a row."""
    check: LooseFlag = False
    """Compare files with the hashes of their manifest before they are read."""
    isolate: LooseFlag = True
    """Conversations of a stream block do not see each other."""
    drop_last: LooseFlag = False
    """Leave the last stream block out when it is not full."""
    loader: dict[str, Any] = field(default_factory=dict)
    """The other options of the loaders (`TrainingConfig`), as far as they are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRecipe:
    """A checked recipe."""

    out: Path
    """Folder of log and checkpoints."""
    model: dict[str, Any]
    """Sizes of a GPT, or `path` of a model folder (with `random_weights`)."""
    data: DataSection
    train: TrainConfig
    attention: str = "auto"
    tokenizer: str | None = None
    """Default: what the dataset's manifest names."""
    template: str | None = None
    add_control_tokens: bool = False
    """Add the template's control tokens to the tokenizer where it lacks them."""
    defaults_of_loader: bool = False
    """Options of the loader that are left out have its own defaults (an XML config), not those of a recipe."""
    from_environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that replaced a key; an empty one took it out."""
    of_other_phase: dict[str, Any] = field(default_factory=dict)
    """Lengths of `train` that are not applied, because the environment turned post-training on."""
    not_read: tuple[str, ...] = ()
    """Environment variables that have the name of a key, but not the prefix."""

    def settings(self, effective: TrainingConfig) -> dict[str, Any]:
        """Everything as plain values, for the folder of the run; `effective` is the config of its loader."""
        own = asdict(self.data)
        data = {name: getattr(effective, name) for name in LOADER_CHECKS} | own.pop("loader") | own
        return asdict(self) | {"out": str(self.out), "data": data}


OF_FOLDERS = ("random_weights", "dtype", "resize", "check_tokenizer")
"""Keys of the section model that go with a path."""
MODEL_KEYS = (*(f.name for f in fields(GPTConfig)), "path", *OF_FOLDERS)
TOP_KEYS = ("out", "tokenizer", "template", "add_control_tokens", "attention", "model", "data", "train",
            "post_training")  # fmt: skip
PREFIX = "CHATMILL_"
"""Of environment variables, because names such as SEED and DEVICE are used by others too."""
PLAIN_NAMES = ("post_training", "warmup_pct")
"""Keys whose variables are also read without the prefix."""
LENGTHS = ("steps", "epochs")
OWN_CHECKS = checks_of(DataSection)
LOADER_CHECKS = {
    name: replace(check, words=LOOSE_FLAGS, optional=True) if isinstance(check, Flag) else check
    for name, check in LOADER_OPTIONS.items()
    if name not in (*OWN_CHECKS, *NOT_IN_DATA)
}
"""How options of the loaders are checked in a recipe: a flag may also be yes or no, and null is as if left out."""
LOADER_CHECKS["dataset_mode"] = replace(LOADER_CHECKS["dataset_mode"], optional=True)
DATA_CHECKS = OWN_CHECKS | LOADER_CHECKS
DATA_KEYS = tuple(DATA_CHECKS)


def read_recipe(path: Path, environment: Mapping[str, str], **given: Any) -> TrainRecipe:
    """A recipe from a YAML or XML file; every key of `data` and `train` is also an environment variable (`PREFIX`).

    An XML file is the config of the loaders: its section `<training>` holds their options and may hold those
    of `train`; beside it may be the other sections of a recipe.
    """
    is_xml = path.suffix.lower() == ".xml"
    if is_xml:
        data = read_xml_recipe(path, tuple(CHECKS), TOP_KEYS)
    else:
        data = read_mapping(path, "recipe file", ", ".join(TOP_KEYS))
    data |= {name: value for name, value in given.items() if value is not None and name == "out"}
    _refuse_unknown(data, TOP_KEYS, str(path), "")
    sections = {name: _section(data, name, path) for name in ("model", "data", "train", "post_training")}
    _refuse_unknown(sections["model"], MODEL_KEYS, str(path), "model.")
    _refuse_unknown(sections["data"], DATA_KEYS, str(path), "data.")
    _refuse_unknown(sections["train"], tuple(CHECKS), str(path), "train.")
    _refuse_unknown(sections["post_training"], tuple(k for k in CHECKS if k != "post_training"), str(path),
                    "post_training.")  # fmt: skip
    if given.get("dataset") is not None:
        sections["data"]["dataset"] = str(given["dataset"])
    used = _variables(environment)
    not_read = tuple(
        key.upper() for key in (*DATA_KEYS, *CHECKS) if key not in PLAIN_NAMES and key.upper() in environment
    )
    other_phase = _choose_phase(sections, used)
    for section, keys in (("data", DATA_KEYS), ("train", tuple(CHECKS))):
        for key in keys:
            for name in _names_of(key):
                if name in used:
                    sections[section].pop(key, None)
                    sections[section] |= {key: used[name]} if used[name] else {}
    if "out" not in data:
        raise ConfigError(f"{path}: 'out' is missing: the folder of log and checkpoints (or give --out)")
    try:
        return TrainRecipe(
            out=Path(str(data["out"])),
            model=sections["model"],
            data=_data_section(sections["data"]),
            train=TrainConfig.of(sections["train"]),
            attention=str(data.get("attention", "auto")),
            tokenizer=None if data.get("tokenizer") is None else str(data["tokenizer"]),
            template=None if data.get("template") is None else str(data["template"]),
            add_control_tokens=as_flag("add_control_tokens", data.get("add_control_tokens", False)),
            defaults_of_loader=is_xml,
            from_environment=used,
            of_other_phase=other_phase,
            not_read=not_read,
        )
    except ConfigError as error:
        changed = f" (from the environment: {', '.join(used)})" if used else ""
        raise ConfigError(f"{path}{changed}: {error}") from None


def _names_of(key: str) -> tuple[str, ...]:
    """The environment variables of a key; the later one counts where both are set."""
    plain = (key.upper(),) if key in PLAIN_NAMES else ()
    return (*plain, PREFIX + key.upper())


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    names = [name for key in (*DATA_KEYS, *CHECKS) for name in _names_of(key)]
    return {name: environment[name] for name in names if name in environment}


def _choose_phase(sections: dict[str, dict[str, Any]], used: Mapping[str, str]) -> dict[str, Any]:
    """Settle `train` for the phase that is run; gives the lengths that belong to the other one.

    A recipe may describe two phases: `train`, and `post_training` with what differs there. Where the environment
    turns post-training on, the length in `train` is that of the first phase.
    """
    train, own = sections["train"], sections.pop("post_training")
    in_recipe = as_flag("train.post_training", train.get("post_training", False))
    asked = [used[name] for name in _names_of("post_training") if name in used]
    if not (as_flag("POST_TRAINING", asked[-1]) if asked else in_recipe):
        return {}
    other = {} if in_recipe else {name: train.pop(name) for name in LENGTHS if train.get(name) is not None}
    if any(own.get(name) is not None for name in LENGTHS):
        for name in LENGTHS:
            train.pop(name, None)
    train |= own
    return other


def _section(data: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    section = data.get(name) or {}
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: {name!r} must be a mapping, not {section!r}")
    return {str(key): value for key, value in section.items()}


def _refuse_unknown(given: Mapping[str, Any], known: Sequence[str], where: str, prefix: str) -> None:
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix + close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {prefix + str(key)!r}, {hint}")


def _data_section(given: Mapping[str, Any]) -> DataSection:
    """Values in their types, also from the text of the environment; none is as if the key was left out."""
    asked = {name: value for name, value in given.items() if value is not None or not DATA_CHECKS[name].optional}
    typed = {name: DATA_CHECKS[name](f"data.{name}", value, text=True) for name, value in asked.items()}
    loader = {name: typed.pop(name) for name in LOADER_CHECKS if name in typed}
    return DataSection(**typed, loader=loader)
