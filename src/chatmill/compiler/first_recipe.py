"""A first recipe for given files: looks at a sample of their records and chooses what fits them."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from chatmill.compiler.gates import Gate, gates_of
from chatmill.compiler.paths import resolve_paths
from chatmill.compiler.pipeline import Compiled, Pipeline
from chatmill.compiler.recipe import LOSING, Gates, OnError, Packing, Recipe, Repair, recipe_of
from chatmill.compiler.template_comparison import COMPARED, OwnTemplate, compare_with_own, size_of
from chatmill.core.conversation import Conversation
from chatmill.core.conversations import unused_fields
from chatmill.core.ledger import LOST_CONTENT, LOST_REASONING, REPAIRED
from chatmill.core.tools import listed_tools
from chatmill.errors import DataError, NoReferenceError, RecordError
from chatmill.pack.overflow import Overflow
from chatmill.read.conversations import ConversationFile
from chatmill.read.places import Place
from chatmill.render.jinja.options import Expand, TemplateOptions
from chatmill.render.jinja.sandbox import MissingDateError
from chatmill.render.registry import bind, bundled_names, find_template, own_template
from chatmill.render.render import render
from chatmill.tokenizer.backends import Engine
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens
from chatmill.tokenizer.tokenizer import Tokenizer

SAMPLE_RECORDS = 2000
"""Records that are read of each file."""
READ_CHARACTERS = 4 << 20
"""Text that is read of all files together, tools included; at least one record of each file is."""
SAMPLE_CHARACTERS = READ_CHARACTERS // 8
"""Text of the records among them, evenly spread, that are looked at: agents' templates take long to learn."""
SEED_FORMATS = ("token_native", "markers")
"""Templates of formats that no published model speaks; they are never suggested."""
TRIED_RECORDS = 200
"""Records that templates are tried on where the model has none of its own."""
TRIED_OPTIONS = TemplateOptions(today=datetime.date(2026, 1, 1))
LOOKED_FOR = ("turns_that_later_messages_change", "rows_added", "tokens_in_added_rows", LOST_CONTENT, LOST_REASONING)
"""Notes of the ledger that the recipe mentions."""
SHORTEST_ROW, LONGEST_ROW = 512, 32_768
"""Lengths of rows that are suggested; one record of a whole book does not decide it."""
MAY_LOSE = 0.001
"""Share of the trained tokens that overflow may lose, as a first gate."""
FEW_FILES = 8
"""Up to so many files, each is a source of its own in the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLook:
    """What the sample of one file showed."""

    path: str
    shape: str
    conversations: tuple[Conversation, ...]
    bad: Counter[str]
    """Reason codes of the records that cannot be read."""
    whole: bool
    """Whether the sample is the whole file."""

    @property
    def records(self) -> int:
        """Records looked at, bad ones included."""
        return len(self.conversations) + self.bad.total()


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What the samples of all files showed, and the recipe that follows from it."""

    files: tuple[FileLook, ...]
    recipe: Recipe
    roles: Counter[str]
    """Messages of each role."""
    features: Counter[str]
    """Conversations with tools, tool calls, reasoning, channels, message weights."""
    refused: Counter[str]
    """Reason codes of the conversations that the template cannot write."""
    lengths: NDArray[np.int64]
    """Tokens of each conversation that was rendered, sorted."""
    notes: Mapping[str, int]
    """What the ledger of the sample notes: characters that the template does not show, turns that it changes, rows."""
    option_names: tuple[str, ...]
    """Options that the template reads."""
    longest: tuple[int, ...]
    """Tokens of the longest conversation of each file; 0 where none could be rendered."""
    unused: Counter[str]
    """Fields that are not used, with the records that have something in them."""
    gates: tuple[Gate, ...]
    """Every gate at its strictest, with what the sample has."""
    own_template: OwnTemplate | None = None
    """How the template differs from the model's own, where another one was asked for."""

    @property
    def unusable(self) -> int:
        """Records that cannot be read, or that the template refuses."""
        return sum(file.bad.total() for file in self.files) + self.refused.total()


def look_at(
    files: Sequence[str],
    *,
    tokenizer: str = "o200k",
    shape: str | None = None,
    template: str | None = None,
    preferences: str | None = None,
    sample: int = SAMPLE_RECORDS,
) -> Look:
    """Look at the first records of files (names or globs) and find a recipe that fits them."""
    looked: list[FileLook] = []
    paths = list(resolve_paths(files))
    for path in paths:
        looked.append(_look_at_file(path, shape, sample, len(paths), preferences))
    conversations = [conversation for file in looked for conversation in file.conversations]
    if not conversations:
        bad = sum((file.bad for file in looked), Counter[str]())
        raise DataError(f"there is no record that can be read ({counts_text(bad) or 'the files are empty'})")
    loaded = _tokenizer(tokenizer)
    features = _features(conversations)
    added = False
    if template is None:
        template, added = _suggest_template(conversations, tokenizer, loaded, features)
    options = {"tokenizer": tokenizer, "template": template, "add_control_tokens": added}
    options |= {"preferences": preferences}
    lossless = [repair for repair in Repair if repair not in LOSING]
    recipe, pipeline = _with_date(_recipe(looked, {**options, "repairs": lossless}), loaded)
    whole = fitted = pipeline.compile(conversations)
    if not len(whole.tokens):
        raise DataError(
            f"the template {template} can write none of these conversations; the first: {whole.failed[0][1]}"
        )
    longest = int(whole.tokens.lengths.max())
    row = _row_length(longest)
    expand = Expand.TREE if "--expand tree" in whole.ledger.cost_of_turns() else recipe.expand
    recipe = structs.replace(recipe, packing=Packing(max_length=row, overflow=Overflow.WINDOWS), expand=expand)
    if longest > row or expand is not pipeline.recipe.expand:
        fitted = Pipeline(recipe, loaded).compile(conversations)
    ledger = fitted.ledger
    helpful = [repair for repair in lossless if ledger.total_notes(REPAIRED + repair)]
    recipe = structs.replace(recipe, repairs=helpful)
    refused = Counter(error.code for _, error in fitted.failed)
    for reason, count in sum((file.bad for file in looked), refused).items():
        ledger.records["", "quarantined", reason] += count
    gates = tuple(gates_of(Gates(trained_tokens_lost=MAY_LOSE, untrained_terminators=0), ledger))
    look = Look(
        files=tuple(looked),
        recipe=recipe,
        roles=Counter(message.role.value for c in conversations for message in c.messages),
        features=features,
        refused=refused,
        lengths=np.sort(whole.tokens.lengths),
        notes={name: ledger.total_notes(name) for name in LOOKED_FOR},
        option_names=tuple(pipeline.template.option_names),
        longest=_longest(looked, whole),
        unused=unused_fields(conversations),
        gates=gates,
        own_template=compare_with_own(recipe, conversations[:COMPARED], pipeline),
    )
    return replace(look, recipe=_with_limits(look))


def _tokenizer(name: str) -> Tokenizer:
    """The tokenizer with the engine that starts soonest: a sample is small."""
    try:
        return load_tokenizer(name, engine=Engine.REFERENCE)
    except NoReferenceError:
        return load_tokenizer(name)


def _with_date(recipe: Recipe, tokenizer: Tokenizer) -> tuple[Recipe, Pipeline]:
    """The recipe and its pipeline; with today's date where the template asks for one."""
    try:
        return recipe, Pipeline(recipe, tokenizer)
    except MissingDateError:
        dated = structs.replace(recipe, date=datetime.date.today())
        return dated, Pipeline(dated, tokenizer)


def _longest(looked: Sequence[FileLook], compiled: Compiled) -> tuple[int, ...]:
    owner = np.repeat(np.arange(len(looked)), [len(file.conversations) for file in looked])[compiled.source_index]
    longest = np.zeros(len(looked), dtype=np.int64)
    np.maximum.at(longest, owner, compiled.tokens.lengths)
    return tuple(longest.tolist())


def _look_at_file(path: Place, shape: str | None, sample: int, files: int, preferences: str | None = None) -> FileLook:
    """Look at some of the first records of one of so many files: evenly spread ones, and the longest."""
    found: list[Conversation | RecordError] = []
    source = ConversationFile(path, shape=shape, on_error=found.append, preferences=preferences)
    sizes: list[int] = []
    """Characters of each record."""
    whole, text = True, 0
    for conversation in source:
        if sizes and (len(found) >= sample or text > READ_CHARACTERS // files):
            whole = False
            break
        sizes += [0] * (len(found) - len(sizes))
        sizes.append(_characters(conversation))
        text += sizes[-1]
        found.append(conversation)
    if not found:
        raise DataError(f"{path} holds no record; leave it out")
    step = 1 + text * files // SAMPLE_CHARACTERS
    chosen = {*range(0, len(found), step), *([sizes.index(max(sizes))] if sizes else [])}
    looked = [found[place] for place in sorted(chosen)]
    return FileLook(
        path=str(path),
        shape=shape or source.shape.name,
        conversations=tuple(one for one in looked if isinstance(one, Conversation)),
        bad=Counter(one.code for one in looked if isinstance(one, RecordError)),
        whole=whole and step == 1,
    )


def _characters(conversation: Conversation) -> int:
    return sum(map(size_of, conversation.messages)) + len(listed_tools(conversation.tools))


def _features(conversations: Sequence[Conversation]) -> Counter[str]:
    found: Counter[str] = Counter()
    for conversation in conversations:
        messages = conversation.messages
        found["tool definitions"] += bool(conversation.tools)
        found["tool calls"] += any(message.tool_calls for message in messages)
        found["reasoning"] += any(message.reasoning for message in messages)
        found["channels"] += any(message.channel or message.structured for message in messages)
        found["message weights"] += any(message.weight is not None for message in messages)
        found["no assistant message"] += not any(message.role == "assistant" for message in messages)
    return +found


def _suggest_template(
    conversations: Sequence[Conversation], given_as: str, tokenizer: Tokenizer, features: Counter[str]
) -> tuple[str, bool]:
    """The template that fits tokenizer and conversations best, and whether it needs added control tokens.

    A model folder's own template is never passed over. Without one, templates whose tokens the vocabulary has go
    before others; among them the one that refuses, hides, repeats and adds least.
    """
    if (folder := own_template(given_as)) is not None:
        return folder, False
    known = [name for name in bundled_names() if name != "harmony" or find_spec("openai_harmony")]
    chats = [name for name in known if name not in SEED_FORMATS and find_template(name).control_tokens]
    own = [name for name in chats if set(find_template(name).control_tokens) <= set(tokenizer.control_ids)]
    candidates = own or [name for name in chats if name != "harmony"]

    def cost(name: str) -> tuple[int, int, int, bool, int, int]:
        refused, hidden, rows = _cost(conversations[:TRIED_RECORDS], name, tokenizer)
        added = sum(token not in tokenizer.control_ids for token in find_template(name).control_tokens)
        dated = "strftime_now" in find_template(name).text
        return refused, hidden if features["reasoning"] else 0, rows, dated, added, candidates.index(name)

    return min(candidates, key=cost), not own


def _cost(conversations: Sequence[Conversation], name: str, tokenizer: Tokenizer) -> tuple[int, int, int]:
    """How many conversations a template refuses, the characters of the others that it hides, and the rows it adds."""
    source = find_template(name)
    bound = bind(source, with_control_tokens(tokenizer, source.control_tokens), TRIED_OPTIONS)
    rendered = render(conversations, bound, collect_failures=True)
    return len(rendered.failed), int(rendered.stripped.sum()), len(rendered.kept) - len(np.unique(rendered.kept))


def _recipe(looked: Sequence[FileLook], options: Mapping[str, Any]) -> Recipe:
    groups: dict[tuple[str, str], list[str]] = {}
    for file in looked:
        groups.setdefault((file.shape, file.path if len(looked) <= FEW_FILES else ""), []).append(file.path)
    sources = [{"path": paths[0] if len(paths) == 1 else paths, "shape": shape} for (shape, _), paths in groups.items()]
    return recipe_of({"sources": sources, **options})


def _with_limits(look: Look) -> Recipe:
    """The recipe with all its gates, and quarantine where some records cannot be used.

    A gate that the sample does not pass stays on: what to do about it is for the user to choose.
    """
    limits: dict[str, Any] = {gate.name: gate.limit for gate in look.gates}
    on_error = OnError.QUARANTINE if look.unusable else OnError.FAIL
    return recipe_of({**look.recipe.as_json(), "on_error": on_error, "gates": limits})


def _row_length(longest: int) -> int:
    """The power of two that holds the longest conversation of the sample, within limits."""
    return min(max(SHORTEST_ROW, 1 << (longest - 1).bit_length()), LONGEST_ROW)


def counts_text(counter: Counter[str]) -> str:
    """Names with their counts, in words; the most frequent first."""
    return ", ".join(f"{name} {count:,}" for name, count in counter.most_common())
