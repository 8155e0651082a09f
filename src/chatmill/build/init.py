"""A first recipe for given files: looks at a sample of their records and writes what it saw into the comments."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from chatmill.build.gates import Gate, gates_of
from chatmill.build.paths import resolve_paths
from chatmill.build.pipeline import Compiled, Pipeline
from chatmill.build.publish import storing
from chatmill.build.recipe import Gates, OnError, Packing, Recipe, recipe_of
from chatmill.core.conversation import Conversation
from chatmill.errors import ConfigError, DataError, RecordError
from chatmill.pack.overflow import Overflow
from chatmill.read.conversations import ConversationFile
from chatmill.render.registry import TEMPLATES, find_template
from chatmill.tokenizer.load import load_tokenizer
from chatmill.tokenizer.protocol import Tokenizer

SAMPLE_RECORDS = 2000
"""Records that are looked at in each file."""
SAMPLE_CHARACTERS = 64 << 20
"""Text that is looked at in all files together; at least one record of each file is."""
OWN_TEMPLATES = ("qwen3_training", "llama3", "harmony", "chatml")
"""Tried in this order where the tokenizer has the control tokens."""
ADDED_TEMPLATES = ("chatml", "qwen3_training", "harmony", "llama3")
"""Tried in this order where control tokens must be added anyway."""
SHORTEST_ROW, LONGEST_ROW = 512, 32_768
"""Lengths of rows that are suggested; one record of a whole book does not decide it."""
MAY_LOSE = 0.001
"""Share of the trained tokens that overflow may lose, as a first gate."""
WIDTH = 110
"""Columns of the written recipe."""
PLAIN = re.compile(r"[\w./-]+")
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
    fitting: tuple[str, ...]
    """Templates that have a place for everything in the sample."""
    lengths: NDArray[np.int64]
    """Tokens of each conversation that was rendered, sorted."""
    stripped: int
    """Characters that the template does not show."""
    longest: tuple[int, ...]
    """Tokens of the longest conversation of each file; 0 where none could be rendered."""
    gates: tuple[Gate, ...]
    """Every gate at its strictest, with what the sample has."""

    @property
    def unusable(self) -> int:
        """Records that cannot be read, or that the template refuses."""
        return sum(file.bad.total() for file in self.files) + self.refused.total()


def look_at(
    files: Sequence[str],
    *,
    tokenizer: str = "o200k",
    pattern: str | None = None,
    shape: str | None = None,
    sample: int = SAMPLE_RECORDS,
) -> Look:
    """Look at the first records of files (names or globs) and find a recipe that fits them."""
    looked: list[FileLook] = []
    left = SAMPLE_CHARACTERS
    for path in resolve_paths(files):
        looked.append(_look_at_file(path, shape, sample, left))
        left -= sum(map(_characters, looked[-1].conversations))
    conversations = [conversation for file in looked for conversation in file.conversations]
    if not conversations:
        bad = sum((file.bad for file in looked), Counter[str]())
        raise DataError(f"there is no record that can be read ({_counts(bad) or 'the files are empty'})")
    loaded = load_tokenizer(tokenizer, pattern=pattern)
    features = _features(conversations)
    template, added = _suggest_template(conversations, loaded, features)
    options = {"tokenizer": tokenizer, "pattern": pattern, "template": template, "add_control_tokens": added}
    recipe = _recipe(looked, options)
    whole = Pipeline(recipe, loaded).compile(conversations)
    if not len(whole.tokens):
        raise DataError(f"no template can write these conversations; the first: {whole.failed[0][1]}")
    row = _row_length(int(whole.tokens.lengths.max()))
    recipe = recipe.model_copy(update={"packing": Packing(max_length=row, overflow=Overflow.WINDOWS)})
    ledger = Pipeline(recipe, loaded).compile(conversations).ledger
    gates = tuple(gates_of(Gates(trained_tokens_lost=MAY_LOSE, untrained_terminators=0, records_quarantined=0), ledger))
    look = Look(
        files=tuple(looked),
        recipe=recipe,
        roles=Counter(message.role.value for c in conversations for message in c.messages),
        features=features,
        refused=Counter(error.code for _, error in whole.failed),
        fitting=tuple(n for n in TEMPLATES if not (_refused(conversations, n) or (n == template and whole.failed))),
        lengths=np.sort(whole.tokens.lengths),
        stripped=ledger.total_notes("stripped_characters"),
        longest=_longest(looked, whole),
        gates=gates,
    )
    return replace(look, recipe=_with_limits(look))


def _longest(looked: Sequence[FileLook], compiled: Compiled) -> tuple[int, ...]:
    owner = np.repeat(np.arange(len(looked)), [len(file.conversations) for file in looked])[compiled.source_index]
    longest = np.zeros(len(looked), dtype=np.int64)
    np.maximum.at(longest, owner, compiled.tokens.lengths)
    return tuple(longest.tolist())


def write_recipe(look: Look, path: Path) -> None:
    """Write the recipe with its comments to a new file; one that is there is never overwritten."""
    text = recipe_text(look)
    with storing(path):
        try:
            file = path.open("x", encoding="utf-8")
        except FileExistsError:
            refuse_to_overwrite(path)
        with file:
            file.write(text)


def refuse_to_overwrite(path: Path) -> NoReturn:
    """The error about a recipe that is there."""
    raise ConfigError(f"{path} is there already and is not overwritten: remove it, or choose another --out") from None


def _look_at_file(path: Path, shape: str | None, sample: int, characters: int) -> FileLook:
    bad: list[RecordError] = []
    source = ConversationFile(path, shape=shape, on_error=bad.append)
    taken: list[Conversation] = []
    whole = True
    for conversation in source:
        if taken and (len(taken) + len(bad) >= sample or characters < 0):
            whole = False
            break
        taken.append(conversation)
        characters -= _characters(conversation)
    if not taken and not bad:
        raise DataError(f"{path} holds no record; leave it out")
    codes = Counter(error.code for error in bad)
    return FileLook(
        path=str(path), shape=shape or source.shape.name, conversations=tuple(taken), bad=codes, whole=whole
    )


def _characters(conversation: Conversation) -> int:
    return sum(len(message.content) for message in conversation.messages)


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
    conversations: Sequence[Conversation], tokenizer: Tokenizer, features: Counter[str]
) -> tuple[str, bool]:
    """The template that fits tokenizer and conversations best, and whether it needs added control tokens."""

    def cost(name: str, order: Sequence[str]) -> tuple[int, bool, int]:
        hides = bool(features["reasoning"]) and name in ("chatml", "llama3")
        return _refused(conversations, name), hides, order.index(name)

    known = [name for name in OWN_TEMPLATES if name != "harmony" or find_spec("openai_harmony")]
    own = [name for name in known if set(find_template(name).control_tokens) <= set(tokenizer.control_ids)]
    if own:
        return min(own, key=lambda name: cost(name, OWN_TEMPLATES)), False
    return min(known, key=lambda name: cost(name, ADDED_TEMPLATES)), True


def _refused(conversations: Iterable[Conversation], name: str) -> int:
    """Conversations that a template would refuse."""
    template, count = find_template(name), 0
    for conversation in conversations:
        try:
            template.check(conversation)
        except RecordError:
            count += 1
    return count


def _recipe(looked: Sequence[FileLook], options: Mapping[str, Any]) -> Recipe:
    groups: dict[tuple[str, str], list[str]] = {}
    for file in looked:
        groups.setdefault((file.shape, file.path if len(looked) <= FEW_FILES else ""), []).append(file.path)
    sources = [{"path": paths[0] if len(paths) == 1 else paths, "shape": shape} for (shape, _), paths in groups.items()]
    return recipe_of({"sources": sources, **options})


def _with_limits(look: Look) -> Recipe:
    """The recipe with the gates that the sample passes, and quarantine where some records cannot be used."""
    limits: dict[str, Any] = {gate.name: gate.limit if gate.passed else None for gate in look.gates}
    limits["records_quarantined"] = None  # the rest of the files may hold more of them
    on_error = OnError.QUARANTINE if look.unusable else OnError.FAIL
    return recipe_of({**look.recipe.as_json(), "on_error": on_error, "gates": limits})


def _row_length(longest: int) -> int:
    """The power of two that holds the longest conversation of the sample, within limits."""
    return min(max(SHORTEST_ROW, 1 << (longest - 1).bit_length()), LONGEST_ROW)


def recipe_text(look: Look) -> str:
    """The recipe as YAML with comments; reading it gives `look.recipe`."""
    import yaml

    parts = [_head(look), _sources(look), _words(look), _rows(look), _rest(look)]
    text = "\n\n".join("\n".join(part) for part in parts) + "\n"
    assert recipe_of(yaml.safe_load(text)) == look.recipe, "the written recipe is another one"
    return text


def _comment(text: str, indent: str = "") -> list[str]:
    mark = f"{indent}# "
    return textwrap.wrap(text, WIDTH, initial_indent=mark, subsequent_indent=mark, break_on_hyphens=False)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counter.most_common())


def _seen(files: Sequence[FileLook]) -> str:
    first = "all" if all(file.whole for file in files) else "the first"
    return f"{first} {sum(file.records for file in files):,} records"


def _head(look: Look) -> list[str]:
    return [
        *_comment(f"Made by `chatmill init` after looking at {_seen(look.files)} of {len(look.files)} files."),
        *_comment(f"Messages: {_counts(look.roles)}."),
        *(_comment(f"Conversations with {_counts(look.features)}.") if look.features else ()),
        *_comment("Look at the tokens with `chatmill preview FILE`; build with `chatmill build RECIPE --out DIR`."),
        "version: 1",
    ]


def _sources(look: Look) -> list[str]:
    lines = ["# Files (names or globs, from the folder in which the build runs) that belong together.", "sources:"]
    by_path = {file.path: file for file in look.files}
    for number, source in enumerate(look.recipe.sources):
        files = [by_path[path] for path in source.patterns]
        bad = sum((file.bad for file in files), Counter[str]())
        cannot = f"; {bad.total():,} cannot be read: {_counts(bad)}" if bad else ""
        lines += _comment(f"Looked at: {_seen(files)}{cannot}.", "  ")
        if isinstance(source.path, str):
            lines.append(f"  - path: {_scalar(source.path)}")
        else:
            lines += ["  - path:", *(f"      - {_scalar(path)}" for path in source.path)]
        lines.append(f"    shape: {source.shape}")
        lines += SOURCE_OPTIONS if not number else []
    return lines


SOURCE_OPTIONS = [
    "    # name: ...          # source name of records that name none; default: the file's name",
    "    # weight: 1.0        # 2 takes every record twice, 0.5 half of them, by a hash of the record id",
    "    # max_records: ...   # take only the first lines or rows",
]


def _words(look: Look) -> list[str]:
    recipe, template = look.recipe, find_template(look.recipe.template)
    lines = _comment("o200k, bytes, a tokenizer.json, a folder with one, or a .tiktoken file: that of your model.")
    lines.append(f"tokenizer: {_scalar(recipe.tokenizer)}")
    if recipe.pattern is not None:
        lines.append(f"pattern: {_scalar(recipe.pattern)}")
    if recipe.add_control_tokens:
        lines += _comment(
            "The tokenizer lacks control tokens of the template; they are added above its vocabulary, and the model's "
            "embedding must grow with it."
        )
    lines.append(f"add_control_tokens: {_scalar(recipe.add_control_tokens)}")
    lines += _comment(f"How conversations are written. {recipe.template}: {template.declares}")
    if look.stripped:
        lines += _comment(f"In the sample it leaves out {look.stripped:,} characters.")
    if look.refused:
        lines += _comment(f"In the sample it refuses {look.refused.total():,} conversations: {_counts(look.refused)}.")
    lines += _comment(f"With a place for all roles, tools and channels seen: {', '.join(look.fitting) or 'none'}.")
    lines.append(f"template: {_scalar(recipe.template)}")
    own = template.default_policy
    lines += _comment(f"What is trained: a policy by name or .json file; absent: the template's own, {own}.")
    lines.append(f"# policy: {own}")
    return lines


def _rows(look: Look) -> list[str]:
    packing, lengths = look.recipe.packing, look.lengths
    over = int((lengths > (packing.max_length or 0)).sum())
    longer = f"; {over:,} are longer than the row" if over else ""
    shares = ", ".join(f"{share}% have {int(np.percentile(lengths, share)):,} or fewer" for share in (50, 90, 99))
    return [
        *_comment("episodes: one conversation each. blocks: rows of max_length tokens, packed by one global plan."),
        f"format: {look.recipe.format}",
        "packing:",
        *_comment(f"Tokens in the sample: {shares}; the longest has {int(lengths[-1]):,}{longer}.", "  "),
        f"  max_length: {packing.max_length}",
        *_comment("Longer ones: error, drop, drop_oldest_turns, cut, or windows (several episodes).", "  "),
        f"  overflow: {packing.overflow}",
        "  # packing_strategy: best_fit   # blocks only: also first_fit, greedy, in_order",
    ]


def _rest(look: Look) -> list[str]:
    found = {gate.name: f"in the sample: {gate.sentence}" for gate in look.gates}
    found["records_quarantined"] = f"in the sample: {look.unusable:,} records cannot be used"
    limits = look.recipe.gates.model_dump()
    return [
        "# Share of the records, by a hash of their id, that goes to val.",
        "split:",
        "  val_fraction: 0.0",
        "",
        "# Records that cannot be used: fail ends the build, quarantine writes them to rejected.jsonl.",
        f"on_error: {look.recipe.on_error}",
        "",
        "# Limits that fail the build with exit status 3; null turns one off.",
        "gates:",
        *(f"  {name}: {_scalar(limit)}   # {found[name]}" for name, limit in limits.items()),
        "",
        "# keep_kinds: true           # store what each token is, so that the policy can change at load time",
        "# shard_tokens: 250000000    # tokens of an output shard, at most",
    ]


def _scalar(value: Any) -> str:
    """A value as YAML: JSON is YAML, and plain words need no quotes."""
    import yaml

    if isinstance(value, str) and PLAIN.fullmatch(value) and yaml.safe_load(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)
