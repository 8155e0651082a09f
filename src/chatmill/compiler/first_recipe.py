"""A first recipe for given files: looks at a sample of their records, chooses what fits them, and writes it as YAML."""

from __future__ import annotations

import datetime
import json
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from chatmill.compiler.gates import Gate, gates_of
from chatmill.compiler.paths import resolve_paths
from chatmill.compiler.pipeline import Pipeline
from chatmill.compiler.recipe import LOSING, Gates, OnError, Packing, Recipe, Repair, Source, recipe_of
from chatmill.compiler.sample import other_template_line, sample_file
from chatmill.core.conversation import Conversation
from chatmill.core.conversations import unused_fields, unused_sentence
from chatmill.core.ledger import REPAIRED, Ledger
from chatmill.core.publish import storing
from chatmill.core.sides import Side
from chatmill.core.tokens import Tokens
from chatmill.errors import DataError, NoReferenceError, RecordError
from chatmill.pack.overflow import Overflow
from chatmill.read.field_maps import map_of
from chatmill.read.files import read_records
from chatmill.read.places import Place
from chatmill.read.shapes import AGENTS, ARROW, EACH, named_format, record_format
from chatmill.render.jinja.options import Expand
from chatmill.render.jinja.sandbox import MissingDateError
from chatmill.render.registry import bundled_names, find_template, own_template
from chatmill.tokenizer.backends import Engine
from chatmill.tokenizer.load import load_tokenizer
from chatmill.tokenizer.tokenizer import Tokenizer

SAMPLE_RECORDS = 2000
"""Records that are read of each file."""
READ_CHARACTERS = 4 << 20
"""Text that is read of all files together, tools included; at least one record of each file is."""
SAMPLE_CHARACTERS = READ_CHARACTERS // 8
"""Text of the records among them, evenly spread, that are looked at: agents' templates take long to learn."""
SHORTEST_ROW, LONGEST_ROW = 512, 32_768
"""Lengths of rows that are suggested; one record of a whole book does not decide it."""
MAY_LOSE = 0.001
"""Share of the trained tokens that overflow may lose, as a first gate."""
TEMPLATE = Path(__file__).with_name("recipe.yaml.jinja")
WIDTH = 110
"""Columns of the written recipe."""
PLAIN = re.compile(r"[\w./-]+")
COMPARED_ANSWERS = {"preference_pair", "label_false"}
"""Reason codes of records with answers that people compared, while nobody has said what to do with them."""
TREES, PAIRS = "trees", "pairs"
"""What not every trainer has a place for."""
OFF = "; the build stops here: null accepts all, a limit so much"


class FileLook(NamedTuple):
    """What the sample of one file showed."""

    path: str
    shape: str
    conversations: tuple[Conversation, ...]
    """Of a pair both, one after the other."""
    errors: tuple[RecordError, ...]
    """Of the records that cannot be read."""
    whole: bool
    """Whether the sample is the whole file."""
    formats: Mapping[str, int] = {}
    """Records of each format, of a file that mixes formats."""

    @property
    def records(self) -> int:
        """Records looked at, bad ones included."""
        heads = [one for one in self.conversations if one.side is not Side.REJECTED]
        return len(heads) + len(self.errors)

    @property
    def unread(self) -> int:
        """Records that cannot be read, whatever is done with answers that people compared."""
        return sum(error.code not in COMPARED_ANSWERS for error in self.errors)

    @property
    def bad(self) -> Counter[str]:
        """Reason codes of the records that cannot be read."""
        return Counter(error.code for error in self.errors)

    @property
    def format_counts(self) -> str:
        """The formats of a file that mixes them, with their records, in words; else empty."""
        if not self.formats:
            return ""
        return f"of the first {sum(self.formats.values()):,} records {counts_text(Counter(self.formats))}"


class FirstLook(NamedTuple):
    """What the samples of all files showed, and the recipe that follows from it."""

    files: tuple[FileLook, ...]
    recipe: Recipe
    ledger: Ledger
    """Of the sample as whole rows; what cannot be read or written is quarantined."""
    lengths: NDArray[np.int64]
    """Tokens of each conversation that was rendered, sorted."""
    option_names: tuple[str, ...]
    """Options that the template reads."""
    unused: Counter[str]
    """Fields that are not used, with the records that have something in them."""
    gates: tuple[Gate, ...]
    """Every gate at its strictest, with what the sample has."""
    other_template: str
    """A sentence where another template than the model's own was asked for; else empty."""
    refused: tuple[RecordError, ...]
    """Of the records that can be read and not be compiled."""
    ends_in_eos: bool
    """Whether each document has the tokenizer's end token at its end and nowhere else."""
    eod_id: int | None
    """Token that can end documents where the end token does not: that of padding."""
    with_logprobs: int
    """Conversations whose sampled tokens have log-probabilities."""

    @property
    def unusable(self) -> int:
        """Records that cannot be read, or that the template refuses."""
        return self.ledger.total_records("quarantined")

    @property
    def has_pairs(self) -> bool:
        """Whether there are pairs of a chosen and a rejected answer."""
        return any(one.side is Side.REJECTED for file in self.files for one in file.conversations)

    @property
    def has_images(self) -> bool:
        """Whether messages hold images."""
        conversations = (one for file in self.files for one in file.conversations)
        return any(message.pictures for one in conversations for message in one.messages)

    @property
    def patterns(self) -> list[str]:
        """Names of all files."""
        return [file.path for file in self.files]

    def gate_choices(self) -> list[str]:
        """Return what the sample has that a gate of the recipe will stop, in words, with the choice."""
        return [
            f"In the sample {gate.sentence}: the build will stop at the gate {gate.name}. Change the data or the "
            f"policy; or accept it with {gate.name}: null (or a limit) in the recipe's gates."
            for gate in self.gates
            if not gate.passed
        ]


def look_at(
    files: Sequence[str],
    *,
    tokenizer: str,
    shape: str | None = None,
    template: str | None = None,
    preferences: str | None = None,
    holds: Collection[str] = (TREES, PAIRS),
    sample: int = SAMPLE_RECORDS,
) -> FirstLook:
    """Look at the first records of files and find a recipe that fits them.

    Args:
        files: Names or globs.
        tokenizer: The model, as in a recipe.
        shape: Record format of all files. Default: that of their first records.
        template: Chat template in place of the model's own.
        preferences: As in a recipe. Default: pairs, or chosen, where records have answers that people compared.
        holds: What the trainer that the dataset is for has a place for.
        sample: Records that are read of each file, at most.
    """
    paths = list(resolve_paths(files))
    looked = [_look_at_file(path, shape, sample, len(paths), preferences) for path in paths]
    if preferences is None and any(file.bad.keys() & COMPARED_ANSWERS for file in looked):
        preferences, looked = _look_at_preferences(paths, shape, sample, holds)
    conversations = [conversation for file in looked for conversation in file.conversations]
    errors = [error for file in looked for error in file.errors]
    bad = Counter(error.code for error in errors)
    if not conversations:
        reasons = f" ({counts_text(bad)}). The first: {errors[0]}" if errors else ": the files are empty"
        raise DataError(f"there is no record that can be read{reasons}")
    loaded, added = _tokenizer(tokenizer), False
    if template is None:
        template, added = _suggest_template(conversations, tokenizer, loaded)
    options = {"tokenizer": tokenizer, "template": template, "add_control_tokens": added, "preferences": preferences}
    lossless = [repair for repair in Repair if repair not in LOSING]
    with_logprobs = sum(any(message.logprobs for message in one.messages) for one in conversations)
    options["logprobs"] = with_logprobs > 0
    recipe = recipe_of({"sources": _sources(looked), **options, "repairs": lossless})
    try:
        pipeline = Pipeline(recipe, loaded)
    except MissingDateError:
        recipe = structs.replace(recipe, date=datetime.date.today())
        pipeline = Pipeline(recipe, loaded)
    whole = pipeline.compile(conversations)
    if not len(whole.tokens):
        raise DataError(
            f"the template {template} can write none of these conversations; the first: {whole.failed[0][1]}"
        )
    tokenizer_used = pipeline.template.tokenizer
    longest = int(whole.tokens.lengths.max())
    row = min(max(SHORTEST_ROW, 1 << (longest - 1).bit_length()), LONGEST_ROW)
    ledger = whole.ledger
    bad.update(error.code for _, error in whole.failed)
    for reason, count in bad.items():
        ledger.records["", "quarantined", reason] += count
    gates = tuple(gates_of(Gates(trained_tokens_lost=MAY_LOSE, untrained_terminators=0), ledger))
    limits: dict[str, Any] = {gate.name: gate.limit for gate in gates}
    are_trees_better = "--expand tree" in ledger.cost_of_turns()
    has_room_for_trees = preferences != "pairs" and TREES in holds
    recipe = structs.replace(
        recipe,
        # Windows would take different parts of the two answers of a pair.
        packing=Packing(max_length=row, overflow=Overflow.DROP if preferences == "pairs" else Overflow.WINDOWS),
        expand=Expand.TREE if are_trees_better and has_room_for_trees else recipe.expand,
        repairs=[repair for repair in lossless if ledger.total_notes(REPAIRED + repair)],
        on_error=OnError.QUARANTINE if bad else OnError.FAIL,
        gates=Gates(**limits),  # one that the sample does not pass stays on
    )
    return FirstLook(
        files=tuple(looked),
        recipe=recipe,
        ledger=ledger,
        lengths=np.sort(whole.tokens.lengths),
        option_names=tuple(pipeline.template.option_names),
        unused=unused_fields(conversations),
        gates=gates,
        other_template=other_template_line(recipe),
        ends_in_eos=_ends_in(whole.tokens, tokenizer_used.eos_id),
        eod_id=None if tokenizer_used.pad_id == tokenizer_used.eos_id else tokenizer_used.pad_id,
        refused=tuple(error for _, error in whole.failed),
        with_logprobs=with_logprobs,
    )


def _ends_in(tokens: Tokens, eos_id: int | None) -> bool:
    """Return whether each document has a token at its end and nowhere else."""
    if eos_id is None:
        return False
    is_eos = tokens.ids == eos_id
    return bool(is_eos[tokens.offsets[1:] - 1].all()) and int(is_eos.sum()) == len(tokens.lengths)


def _look_at_preferences(
    paths: Sequence[Place], shape: str | None, sample: int, holds: Collection[str]
) -> tuple[str, list[FileLook]]:
    """Choose how answers that people compared are read: as pairs, if the trainer can have them; else the chosen ones.

    Records that have no such answers are refused among pairs, so what refuses fewer records is better.
    """
    choices = ["pairs", "chosen"] if PAIRS in holds else ["chosen"]
    best: tuple[str, list[FileLook]] | None = None
    fewest = 0
    for choice in choices:
        looked = [_look_at_file(path, shape, sample, len(paths), choice) for path in paths]
        refused = sum(len(file.errors) for file in looked)
        if best is None or refused < fewest:
            best = choice, looked
            fewest = refused
    assert best is not None
    return best


def _tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer with the engine that starts soonest: a sample is small."""
    try:
        return load_tokenizer(name, engine=Engine.REFERENCE)
    except NoReferenceError:
        return load_tokenizer(name)


def _look_at_file(path: Place, shape: str | None, sample: int, files: int, preferences: str | None) -> FileLook:
    """Look at a file, each record in its own format if more of them can be read so.

    Answers that people compared can be read: only nobody has said yet what they are for.
    """
    look = _look_at_records(path, shape, sample, files, preferences)
    if shape is not None or not look.errors or look.shape in AGENTS:
        return look
    mixed = f"{ARROW}{EACH}" if look.shape.startswith(ARROW) else EACH
    each = _look_at_records(path, mixed, sample, files, preferences)
    if each.unread * look.records >= look.unread * each.records:
        return look
    records = islice(read_records(path, shape=mixed), sample)
    found = Counter(record_format(raw.value) or "none" for raw in records)
    return each._replace(shape=mixed, formats=found)


def _look_at_records(path: Place, shape: str | None, sample: int, files: int, preferences: str | None) -> FileLook:
    """Look at some of the first records of one of `files` files: evenly spread ones, and the longest."""
    first = sample_file(
        path, shape=shape, preferences=preferences, most_records=sample, most_characters=READ_CHARACTERS // files
    )
    if not first.records:
        raise DataError(f"{path} holds no record; leave it out")
    step = 1 + sum(first.sizes) * files // SAMPLE_CHARACTERS
    longest = first.sizes.index(max(first.sizes))
    chosen = sorted({*range(0, len(first.records), step), longest})
    looked = first._replace(records=[first.records[place] for place in chosen])
    return FileLook(
        path=str(path),
        shape=shape or named_format(first.shape),
        conversations=tuple(looked.conversations),
        errors=tuple(record for record in looked.records if isinstance(record, RecordError)),
        whole=first.is_whole and step == 1,
    )


def _suggest_template(conversations: Sequence[Conversation], given_as: str, tokenizer: Tokenizer) -> tuple[str, bool]:
    """Choose the model's own template, else a bundled one; and say whether it needs added control tokens.

    Of the bundled ones it is `qwen3` for conversations with tools, calls or reasoning, else `chatml`; unless the
    vocabulary has the tokens of others and not of this one.
    """
    if (folder := own_template(given_as)) is not None:
        return folder, False
    needs_more = any(
        conversation.tools or any(message.reasoning or message.tool_calls for message in conversation.messages)
        for conversation in conversations
    )
    wanted, known = "qwen3" if needs_more else "chatml", set(tokenizer.control_ids)
    harmony = ["harmony"] if find_spec("openai_harmony") else []
    for name in (wanted, *harmony, *bundled_names()):
        if (tokens := find_template(name).control_tokens) and known.issuperset(tokens):
            return name, False
    return wanted, True


def _sources(looked: Sequence[FileLook]) -> list[dict[str, Any]]:
    """Return a source for the files of each shape."""
    groups: dict[str, list[str]] = {}
    for file in looked:
        groups.setdefault(file.shape, []).append(file.path)
    return [{"path": paths[0] if len(paths) == 1 else paths, "shape": shape} for shape, paths in groups.items()]


def counts_text(counter: Counter[str]) -> str:
    """Names with their counts, in words; the most frequent first."""
    return ", ".join(f"{name} {count:,}" for name, count in counter.most_common())


def write_recipe(look: FirstLook, path: Path, closing: Sequence[str] = ()) -> None:
    """Write the recipe with its comments to a new file; one that is there is never overwritten."""
    with storing(path), path.open("x", encoding="utf-8") as file:
        file.write(recipe_text(look, closing))


def recipe_text(look: FirstLook, closing: Sequence[str] = ()) -> str:
    """Return the recipe as YAML with comments, from `recipe.yaml.jinja`; reading it gives `look.recipe`.

    `closing` are the lines of its last comment.
    """
    import yaml

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"comment": _comment, "scalar": _scalar, "number": "{:,}".format}
    text = environment.from_string(TEMPLATE.read_text("utf-8")).render(
        look=look,
        recipe=look.recipe,
        noted=look.ledger.total_notes,
        template=find_template(look.recipe.template),
        sources=[_source(source, look) for source in look.recipe.sources],
        lengths=_lengths(look),
        limits=structs.asdict(look.recipe.gates),
        found={gate.name: gate.sentence + ("" if gate.passed else OFF) for gate in look.gates},
        seen=_seen(look.files),
        unused=unused_sentence(look.unused),
        template_names=bundled_names(),
        closing=closing,
    )
    assert recipe_of(yaml.safe_load(text)) == look.recipe, "the written recipe is another one"
    return text


def _comment(text: str, indent: str = "") -> str:
    mark = f"{indent}# "
    lines = textwrap.wrap(text, WIDTH, initial_indent=mark, subsequent_indent=mark, break_on_hyphens=False)
    return "\n".join(lines)


def _scalar(value: Any) -> str:
    """Return a value as YAML: JSON is YAML, and plain words need no quotes."""
    import yaml

    if isinstance(value, str) and PLAIN.fullmatch(value) and yaml.safe_load(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)


def _seen(files: Sequence[FileLook]) -> str:
    first = "all" if all(file.whole for file in files) else "the first"
    return f"{first} {sum(file.records for file in files):,} records"


def _source(source: Source, look: FirstLook) -> dict[str, Any]:
    files = [file for file in look.files if file.path in source.patterns]
    bad = sum((file.bad for file in files), Counter[str]())
    cannot = f"; {bad.total():,} cannot be read: {counts_text(bad)}" if bad else ""
    mixed = "; ".join(file.format_counts for file in files if file.formats)
    if mixed:
        cannot += f". Formats: {mixed}"
    return {
        "paths": source.patterns,
        "shape": source.shape,
        "map": map_of(source.shape) if source.shape and source.shape.startswith("{") else None,
        "is_agent": source.shape in AGENTS,
        "looked_at": f"Looked at: {_seen(files)}{cannot}.",
    }


def _lengths(look: FirstLook) -> str:
    over = int((look.lengths > (look.recipe.packing.max_length or 0)).sum())
    longer = f"; {over:,} are longer than the row" if over else ""
    shares = ", ".join(f"{share}% have {int(np.percentile(look.lengths, share)):,} or fewer" for share in (50, 90, 99))
    return f"{shares}; the longest has {int(look.lengths[-1]):,}{longer}"
