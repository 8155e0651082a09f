"""Recipes: what a build reads, how it renders and labels, and what it writes; checked, and hashed as canonical JSON."""

from __future__ import annotations

import datetime
import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from chatmill.compiler.plain_recipe import OnError as OnError
from chatmill.errors import ConfigError
from chatmill.load.yaml_files import read_yaml
from chatmill.pack.overflow import Overflow
from chatmill.pack.plan import Strategy
from chatmill.read.field_maps import mapped_shape
from chatmill.render.jinja.options import Expand, Thinking, Traces, Unproved
from chatmill.render.registry import own_template, template_names

RECIPE_VERSION = 1
NO_TEMPLATE = "no_template"
OLD_SHARDS = "shard_tokens"
"""A key of recipes of 0.1.0."""
MAX_ROW = 2**31 - 1


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(_Strict):
    """Files of conversations that belong together."""

    path: str | list[str]
    """File names or globs, relative to the folder the build runs in."""
    shape: str | None = None
    """Shape of the records, by name, the path of a shape file or what it says; found from the first ones when absent.

    The key `map` (field names by role) may be given instead, and becomes a shape here.
    """
    name: str | None = None
    """Source name of records that do not name their own; default: the file's name."""
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """How often each record is used: 2 takes every record twice, 0.5 half of them (by a hash of the record id)."""
    max_records: Annotated[int, Field(ge=1)] | None = None
    """Take only the first lines or rows of the source, over all its files."""

    @model_validator(mode="before")
    @classmethod
    def _mapped(cls, given: Any) -> Any:
        """`map: {user: question, assistant: answer}` is a shape that has no name."""
        if not isinstance(given, dict) or (given.get("map") is None and not isinstance(given.get("shape"), dict)):
            return given
        kept = {key: value for key, value in given.items() if key != "map"}
        if given.get("map") is not None and given.get("shape") is not None:
            raise ValueError("'map' says what the fields are called, and so does 'shape': give one of them")
        try:
            return {**kept, "shape": mapped_shape(given.get("map") or given["shape"])}
        except ConfigError as error:
            raise ValueError(str(error)) from None

    @property
    def patterns(self) -> list[str]:
        """The file names and globs as a list."""
        return [self.path] if isinstance(self.path, str) else list(self.path)


class Packing(_Strict):
    """How conversations meet rows, under the names of spec 3."""

    max_length: Annotated[int, Field(ge=2)] | None = None
    """Tokens of the longest episode; absent: no limit."""
    overflow: Overflow = Overflow.ERROR
    """What happens to longer conversations."""


class Pack(_Strict):
    """Rows that hold several episodes: a plan beside the episodes of each split."""

    length: Annotated[int, Field(ge=2, le=MAX_ROW)] | None = None
    """Tokens of a row; default: `packing.max_length`."""
    strategy: Strategy = Strategy.BEST_FIT
    """How rows are filled."""


class SplitOptions(_Strict):
    """How records are split into train and val."""

    val_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the records whose id hashes into val."""


class Gates(_Strict):
    """Limits that fail a build with exit status 3; `null` turns one off."""

    trained_tokens_lost: Annotated[float, Field(ge=0, le=1)] | None = None
    """Largest share of the trained tokens that overflow may cut or drop."""
    records_without_trained_tokens: Annotated[int, Field(ge=0)] | None = 0
    untrained_terminators: Annotated[int, Field(ge=0)] | None = None
    """Assistant turns that are trained but whose end is not."""
    records_quarantined: Annotated[int, Field(ge=0)] | None = None


class Recipe(_Strict):
    """Everything that decides the bytes of a dataset."""

    version: int = RECIPE_VERSION
    sources: Annotated[list[Source], Field(min_length=1)]
    tokenizer: str
    """As for `load_tokenizer`: a name, a file or a folder."""
    pattern: str | None = None
    """Split pattern of a .tiktoken file."""
    add_control_tokens: bool = False
    """Add control tokens that the template needs and the tokenizer lacks, above the vocabulary."""
    vocab_size: Annotated[int, Field(ge=1)] | None = None
    """Ids that the model has embeddings for; absent: what the files beside the tokenizer say. Changes no output."""
    template: Annotated[str, Field(validate_default=True)] = ""
    """A bundled template's name, a model folder, a .jinja or a .py file. Default: that of the tokenizer's folder."""
    template_options: dict[str, Any] = {}
    """Options that the template reads, such as `enable_thinking`; a record's `chat_template_kwargs` go before them."""
    date: datetime.date | None = None
    """Today's date, for templates that ask for it."""
    thinking: Thinking = Thinking.AUTO
    """Whether the switch for thinking is chosen per record, so that prompt and answer agree."""
    expand: Expand = Expand.TURNS
    """What happens to turns that later messages change."""
    unproved: Unproved = Unproved.REFUSE
    """What happens to a record with an answer whose mask cannot be proved."""
    traces: Traces = Traces.SHARED
    """Whether what a template writes for single messages is shared between shapes; changes no output."""
    strict_text: bool = False
    """Text never becomes an added token, not even one that the vocabulary does not call special (`<think>`)."""
    policy: str | None = None
    """Default: the template's own."""
    packing: Packing = Packing()
    pack: Pack | None = None
    """Absent: the build plans no rows; loaders can still pack."""
    split: SplitOptions = SplitOptions()
    keep_kinds: bool = True
    """Store the kind of every token, so that the policy can be changed at load time."""
    shard_bytes: Annotated[int, Field(ge=1)] = 32 << 20
    """Bytes of input that become one shard, about; what one worker does at a time, and has in memory."""
    on_error: OnError = OnError.FAIL
    preferences: Literal["chosen"] | None = None
    """Records with answers that people compared: train the chosen ones. Absent: such records are refused."""
    gates: Gates = Gates()

    @field_validator("version")
    @classmethod
    def _known_version(cls, value: int) -> int:
        if value != RECIPE_VERSION:
            raise ValueError(f"this package reads recipes of version {RECIPE_VERSION}")
        return value

    @field_validator("template")
    @classmethod
    def _own_template(cls, value: str, info: ValidationInfo) -> str:
        tokenizer = info.data.get("tokenizer")
        if value:
            return value
        if isinstance(tokenizer, str) and (own := own_template(tokenizer)) is not None:
            return own
        holds_none = f", and {tokenizer} holds none" if tokenizer else ""
        raise PydanticCustomError(
            NO_TEMPLATE,
            "'template' is missing{holds_none}; name a model folder, a .jinja or .py file, or one of {names}",
            {"holds_none": holds_none, "names": ", ".join(template_names())},
        )

    @model_validator(mode="before")
    @classmethod
    def _without_format(cls, given: Any) -> Any:
        """Recipes of 0.1.0, and manifests with them, have two keys that mattered to blocks alone."""
        if not isinstance(given, dict) or "format" not in given:
            return given
        refuse_old_format(given["format"])
        kept = {key: value for key, value in given.items() if key != "format"}
        if isinstance(packing := kept.get("packing"), dict):
            kept["packing"] = {key: value for key, value in packing.items() if key != "packing_strategy"}
        return kept

    @model_validator(mode="after")
    def _episodes_fit_rows(self) -> Self:
        """A row and the longest episode have the same length unless both are given."""
        if self.pack is None:
            return self
        row, longest = self.pack.length, self.packing.max_length
        if row is None and longest is None:
            raise ValueError("pack needs a length, the tokens of a row (or packing.max_length)")
        if row is not None and longest is not None and longest > row:
            raise ValueError(
                f"episodes of up to {longest:,} tokens (packing.max_length) do not fit into rows of {row:,} "
                "(pack.length): make them equal, or rows longer"
            )
        object.__setattr__(self, "pack", self.pack.model_copy(update={"length": row or longest}))
        object.__setattr__(self, "packing", self.packing.model_copy(update={"max_length": longest or row}))
        return self

    def as_json(self) -> dict[str, Any]:
        """Plain values, every default written out."""
        return self.model_dump(mode="json")


def refuse_old_format(value: Any) -> None:
    """`format` was `episodes`, as all datasets are now, or `blocks`."""
    if value == "blocks":
        raise ValueError(
            "the format 'blocks' is gone: remove 'format' and write pack: {length: N}, which packs episodes into rows "
            "that every loader reads"
        )
    if value != "episodes":
        raise ValueError(f"'format' is gone, since all datasets hold episodes: remove it (found {value!r})")


def recipe_of(given: Recipe | dict[str, Any] | str | os.PathLike[str]) -> Recipe:
    """A recipe from an object, a dict, or the path of a YAML file."""
    if isinstance(given, Recipe):
        return given
    if isinstance(given, dict):
        return _validated(given, "the recipe")
    path = Path(given)
    if not path.is_file():
        raise ConfigError(f"no recipe file {path}")
    data = read_yaml(path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping with sources, tokenizer and template")
    return _validated(data, str(path))


def recorded_recipe(manifest: Mapping[str, Any]) -> Recipe:
    """The recipe that a manifest holds; one of 0.1.0 has a key that does not matter any more."""
    return _validated({key: value for key, value in manifest["recipe"].items() if key != OLD_SHARDS}, "the manifest")


def _validated(data: dict[str, Any], where: str) -> Recipe:
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        lines = [_sentence(detail, data) for detail in error.errors()]
        raise ConfigError(f"{where}: " + "; ".join(lines)) from None


def _sentence(detail: Any, data: Any) -> str:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"]).lstrip(".")
    if detail["type"] == "extra_forbidden" and detail["loc"] == (OLD_SHARDS,):
        return f"{OLD_SHARDS!r} is gone: a shard is what 'shard_bytes' bytes of input become; set that, or remove it"
    if detail["type"] == "extra_forbidden":
        known = _keys_beside(detail["loc"])
        close = difflib.get_close_matches(str(detail["loc"][-1]), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
        return f"unknown key {place!r}, {hint}"
    if detail["type"] == "missing":
        return f"{place!r} is missing"
    if detail["type"] == NO_TEMPLATE:
        return str(detail["msg"])
    message = detail["msg"].removeprefix("Value error, ")
    return f"{place}: {message} (found {detail['input']!r})" if place else message


def _keys_beside(location: tuple[int | str, ...]) -> list[str]:
    """The keys that are known beside an unknown one."""
    models: dict[str, type[BaseModel]] = {"sources": Source, "packing": Packing, "pack": Pack}
    models |= {"split": SplitOptions, "gates": Gates}
    model = models.get(str(location[0]), Recipe) if len(location) > 1 else Recipe
    return [*model.model_fields, *(["map"] if model is Source else [])]
