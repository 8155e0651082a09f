"""Recipes: what a build reads, how it renders and labels, and what it writes; checked, and hashed as canonical JSON."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from chatmill.errors import ConfigError
from chatmill.pack.overflow import Overflow
from chatmill.pack.plan import Strategy
from chatmill.read.agents.branches import UnknownPrompt
from chatmill.read.field_maps import map_text
from chatmill.read.picks import Pick
from chatmill.read.where import parse_where
from chatmill.render.jinja.options import AnswerText, Expand, NoReasoning, Thinking, Trust, Unproved
from chatmill.render.registry import bundled_names, own_template
from chatmill.structs import mistake, unknown_key
from chatmill.yaml_files import read_mapping

RECIPE_VERSION = 1
MAX_ROW = 2**31 - 1
SHARD_BYTES = 32 << 20


class OnError(StrEnum):
    """What a record does that cannot be used."""

    FAIL = "fail"
    """It ends the build."""
    QUARANTINE = "quarantine"
    """It goes to rejected.jsonl with its place and reason."""


class NotShown(StrEnum):
    """What happens to a record with something that the template does not show."""

    REFUSE = "refuse"
    DROP = "drop"
    """It is taken out of the record (tools, a call, text next to a call), and its characters are counted as lost."""


class Repair(StrEnum):
    """What may be changed in a record that the template refuses: each is tried once, in this order, and counted."""

    CALL_IDS = "call_ids"
    """Calls get ids of nine letters and digits, as Mistral's templates want them."""
    PARALLEL_CALLS = "parallel_calls"
    """A message with several calls becomes one for each, followed by its result."""
    TEXT_WITH_CALL = "text_with_call"
    """Text of a message that has reasoning and a call becomes the end of the reasoning."""
    TOOL_DESCRIPTIONS = "tool_descriptions"
    """Tools without a description get an empty one, which gpt-oss' template asks for."""
    LEADING_ANSWER = "leading_answer"
    """Answers before the first user message are left out."""


LOSING = (Repair.LEADING_ANSWER,)
"""Repairs that take something out of a record."""


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Values that cannot be changed, and no others."""


class Source(_Strict, frozen=True, kw_only=True):
    """Files of conversations that belong together."""

    path: str | list[str]
    """File names or globs, relative to the folder the build runs in."""
    shape: str | None = None
    """Shape of the records, by name, or a field map in JSON; found from the first ones when absent.

    The key `map` (field names by role) may be given instead, and becomes a shape here.
    """
    name: str | None = None
    """Source name of records that do not name their own; default: the file's name."""
    weight: Annotated[float, Meta(ge=0, le=sys.float_info.max)] = 1.0
    """How often each record is used: 2 takes every record twice, 0.5 half of them (by a hash of the record id)."""
    where: str | None = None
    """An expression over the fields of a record: only those for which it is true are used (`reward >= 0.5`)."""
    pick: Pick | None = None
    """Use one record of each group; of those for which `where` is true."""
    max_records: Annotated[int, Meta(ge=1)] | None = None
    """Take only the first lines or rows of the source, over all its files."""
    tools_file: str | None = None
    """File with a JSON list of tool definitions, for runs of agents whose files have none."""
    system_file: str | None = None
    """File with the system prompt, for runs of agents whose files have none."""
    unknown_prompt: UnknownPrompt = UnknownPrompt.REFUSE
    """What happens to answers of agents whose exact prompt the file does not hold."""

    def __post_init__(self) -> None:
        """Check the expression."""
        if self.where is not None:
            parse_where(self.where)

    @property
    def patterns(self) -> list[str]:
        """The file names and globs as a list."""
        return [self.path] if isinstance(self.path, str) else list(self.path)


class Packing(_Strict, frozen=True, kw_only=True):
    """The longest episode, and what becomes of longer conversations; rows of several episodes are planned by `Pack`."""

    max_length: Annotated[int, Meta(ge=2)] | None = None
    """Tokens of the longest episode; absent: no limit."""
    overflow: Overflow = Overflow.ERROR
    """What happens to longer conversations."""


class Pack(_Strict, frozen=True, kw_only=True):
    """Rows that hold several episodes: planned for each split."""

    length: Annotated[int, Meta(ge=2, le=MAX_ROW)] | None = None
    """Tokens of a row; default: `packing.max_length`."""
    strategy: Strategy = Strategy.BEST_FIT
    """How rows are filled."""


class SplitOptions(_Strict, frozen=True, kw_only=True):
    """How records are split into train and val."""

    val_fraction: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the records whose id hashes into val."""


class TreeOptions(_Strict, frozen=True, kw_only=True):
    """Which records share a tree, with `expand: tree`."""

    group: str
    """Records of one source that agree in this field do; neighbours in the input, or in one chunk."""


class Gates(_Strict, frozen=True, kw_only=True):
    """Limits that fail a build with exit status 3; `null` turns one off."""

    trained_tokens_lost: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Largest share of the trained tokens that overflow may cut or drop."""
    records_without_trained_tokens: Annotated[int, Meta(ge=0)] | None = 0
    untrained_terminators: Annotated[int, Meta(ge=0)] | None = None
    """Assistant turns that are trained but whose end is not."""
    records_left_out: Annotated[float, Meta(ge=0, le=1)] | None = 0.05
    """Largest share of the records that may be quarantined, or dropped by overflow."""
    max_lost_reasoning: Annotated[float, Meta(ge=0, le=1)] | None = 0.05
    """Largest share of the reasoning, in characters, that may be in no document."""


class StoreOptions(_Strict, frozen=True, kw_only=True):
    """How object stores are asked, where input or dataset is behind a URL."""

    timeout: Annotated[float, Meta(gt=0)] = 60.0
    """Seconds for one request."""
    retries: Annotated[int, Meta(ge=0)] = 6
    """How often a request that failed is made again."""
    single_writer: bool = False
    """No other build writes to this address, so no lock is needed: for stores that cannot create exclusively."""


class Recipe(_Strict, frozen=True, kw_only=True):
    """Everything that decides the bytes of a dataset."""

    version: int = RECIPE_VERSION
    sources: Annotated[list[Source], Meta(min_length=1)]
    tokenizer: str
    """As for `load_tokenizer`: a name, a file or a folder."""
    add_control_tokens: bool = False
    """Add control tokens that the template needs and the tokenizer lacks, above the vocabulary."""
    vocab_size: Annotated[int, Meta(ge=1)] | None = None
    """Ids that the model has embeddings for; absent: what the files next to the tokenizer say. Changes no output."""
    template: str = ""
    """A bundled template's name, a model folder, or a .jinja file. Default: that of the tokenizer's folder."""
    template_options: dict[str, Any] = {}
    """Options that the template reads, such as `enable_thinking`; a record's `chat_template_kwargs` go before them."""
    date: datetime.date | None = None
    """Today's date, for templates that ask for it."""
    thinking: Thinking = Thinking.AUTO
    """Whether the switch for thinking is chosen per record, so that prompt and answer agree."""
    answers: AnswerText = AnswerText.AUTO
    """Which text of an answer is trained: as the template's history has it, or as a model writes it."""
    no_reasoning: NoReasoning = NoReasoning.REFUSE
    """What happens to an answer without reasoning after a prompt that opens it."""
    thinking_close: str | None = None
    """What a model writes between reasoning and content, where the template does not say it."""
    expand: Expand = Expand.TURNS
    """What happens to turns that later messages change."""
    tree: TreeOptions | None = None
    """Absent: every record is a tree of its own."""
    unproved: Unproved = Unproved.REFUSE
    """What happens to a record with an answer whose mask cannot be proved."""
    not_shown: NotShown = NotShown.REFUSE
    """What happens to a record with something that the template does not show."""
    repairs: list[Repair] = []
    """What may be changed in a record that the template refuses."""
    trust: Trust = Trust.TEXT
    """What counts where the sampled tokens of a message (`token_ids`) are not those of its text."""
    drift: Literal["report"] | None = None
    """`report`: train the text, and only compare it with the sampled tokens and the prompts that were sent."""
    logprobs: bool = False
    """Store the log-probabilities that sampled tokens carry, as a column next to the tokens."""
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
    shard_bytes: Annotated[int, Meta(ge=1)] | None = None
    """Bytes of input that become one shard, about; what one worker does at a time, and has in memory.

    Absent: 1 to 32 MiB, by the size of the input.
    """
    on_error: OnError = OnError.FAIL
    images: str | None = None
    """Folder that the paths of pictures start from, and that none leads out of. Absent: the folder of the sources."""
    store_images: bool = False
    """Put the bytes of pictures into the dataset; absent, loaders open the files again."""
    preferences: Literal["chosen", "pairs"] | None = None
    """Records with answers that people compared: train the chosen ones, or compile both sides of pairs, and answers
    with their labels, for trainers of preferences. Absent: such records are refused."""
    gates: Gates = Gates()
    store: StoreOptions = StoreOptions()
    """How object stores are asked."""

    def __post_init__(self) -> None:
        """Check all values, whichever way the recipe is made; values of JSON become those of their types."""
        values: dict[str, Any] = {}
        mistakes: list[str] = []
        for field in msgspec.structs.fields(Recipe):
            try:
                value = msgspec.to_builtins(getattr(self, field.name), enc_hook=os.fspath)
            except TypeError:
                mistakes.append(f"{field.name}: expected text, numbers, lists and objects, or a path")
                continue
            try:
                if field.name == "sources" and isinstance(value, list):
                    value = [_mapped(source, f"sources[{number}]") for number, source in enumerate(value)]
                values[field.name] = msgspec.convert(value, field.type, strict=False)
            except msgspec.ValidationError as error:
                mistakes.append(mistake(str(error), field.type, value, field.name))
        if self.version != RECIPE_VERSION:
            mistakes.append(f"version: this package reads recipes of version {RECIPE_VERSION} (found {self.version!r})")
        tokenizer = values.get("tokenizer")
        if not self.template and tokenizer:
            values["template"] = own_template(tokenizer)
            if values["template"] is None:
                mistakes.append(
                    f"'template' is missing, and {tokenizer} holds none; name a model folder, a .jinja file, "
                    f"or one of {', '.join(bundled_names())}"
                )
        if mistakes:
            raise ConfigError("; ".join(mistakes))
        values |= _one_length(values["pack"], values["packing"])
        for name, value in values.items():
            msgspec.structs.force_setattr(self, name, value)
        for conflict in _conflicts(self):
            raise ConfigError(conflict)

    def as_json(self) -> dict[str, Any]:
        """Plain values, every default written out."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


def recipe_of(recipe: Recipe | dict[str, Any] | str | os.PathLike[str]) -> Recipe:
    """Make a recipe from an object, a dict, or the path of a YAML file."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, dict):
        return _validated(recipe, "the recipe")
    return _validated(read_mapping(Path(recipe), "recipe file", "sources, tokenizer and template"), os.fspath(recipe))


def _conflicts(recipe: Recipe) -> Iterator[str]:
    """Say which values would have no effect, or rule each other out."""
    packing, overflow, tree = recipe.packing, str(recipe.packing.overflow), recipe.tree
    if packing.max_length is None and packing.overflow is not Overflow.ERROR:
        yield (
            f"the overflow policy {overflow!r} has no effect without packing.max_length (--max-length), the tokens of "
            "the longest episode: give it too, or remove packing.overflow"
        )
    if recipe.preferences == "pairs" and packing.overflow not in (Overflow.ERROR, Overflow.DROP, Overflow.CUT):
        yield (
            f"the overflow policy {overflow!r} would take different parts of the two answers of a pair: choose error, "
            "drop (which drops both) or cut"
        )
    if recipe.preferences == "pairs" and tree is not None:
        yield "a pair shares a tree with expand: tree alone: leave tree.group out"
    if tree is not None and any(source.pick and source.pick.group != tree.group for source in recipe.sources):
        yield "pick.group and tree.group keep records together by different fields: name one"
    if tree is not None and recipe.expand is not Expand.TREE:
        yield "tree.group has no effect without expand: tree (--expand tree)"
    if tree is not None and any(source.weight != 1 for source in recipe.sources):
        yield (
            "records that share trees (tree.group) cannot have a weight: copies would be the same branch. Leave the "
            "weight of the source out, and build other sources by themselves"
        )


def recorded_recipe(manifest: Mapping[str, Any]) -> Recipe:
    """Return the recipe that a manifest holds."""
    return _validated(manifest["recipe"], "the manifest")


def stored_recipe(text: str) -> Recipe:
    """Return the recipe whose `as_json` this is, as text."""
    return msgspec.json.decode(text, type=Recipe)


def _validated(data: dict[str, Any], where: str) -> Recipe:
    kept = dict(data)
    try:
        if "model" in kept:  # a folder with a tokenizer and its template
            if kept.get("tokenizer") is not None:
                raise ConfigError(
                    "'model' names the tokenizer and its template, and so does 'tokenizer': give one of them"
                )
            kept["tokenizer"] = kept.pop("model")
        fields = msgspec.structs.fields(Recipe)
        names = [field.name for field in fields]
        mistakes = [unknown_key(str(name), str(name), names) for name in kept if name not in names]
        mistakes += [f"{field.name!r} is missing" for field in fields if field.required and field.name not in kept]
        if mistakes:
            raise ConfigError("; ".join(mistakes))
        return Recipe(**kept)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _one_length(pack: Pack | None, packing: Packing) -> dict[str, Any]:
    """Give a row and the longest episode the same length unless both are given."""
    if pack is None:
        return {}
    row, longest = pack.length, packing.max_length
    if row is None and longest is None:
        raise ConfigError("pack needs a length, the tokens of a row (or packing.max_length)")
    if row is not None and longest is not None and longest > row:
        raise ConfigError(
            f"episodes of up to {longest:,} tokens (packing.max_length) do not fit into rows of {row:,} "
            "(pack.length): make them equal, or rows longer"
        )
    return {
        "pack": msgspec.structs.replace(pack, length=row or longest),
        "packing": msgspec.structs.replace(packing, max_length=longest or row),
    }


def _mapped(source: Any, place: str) -> Any:
    """Turn `map: {user: question, assistant: answer}` into a shape without a name."""
    if not isinstance(source, dict) or (source.get("map") is None and not isinstance(source.get("shape"), dict)):
        return source
    if source.get("map") is not None and source.get("shape") is not None:
        raise ConfigError(f"{place}: 'map' says what the fields are called, and so does 'shape': give one of them")
    kept = {key: value for key, value in source.items() if key != "map"}
    try:
        return {**kept, "shape": map_text(source.get("map") or source["shape"])}
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
