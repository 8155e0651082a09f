"""The recipe that `chatmill init` writes: YAML, with what the sample showed in its comments."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from msgspec import structs

from chatmill.compiler.init import FileLook, Look, counts_text
from chatmill.compiler.publish import storing
from chatmill.compiler.recipe import recipe_of
from chatmill.core.conversations import unused_sentence
from chatmill.errors import ConfigError
from chatmill.read.field_maps import map_of
from chatmill.render.registry import find_template, template_names

WIDTH = 110
"""Columns of the written recipe."""
PLAIN = re.compile(r"[\w./-]+")
OFF = "; the build stops here: null accepts any number, a limit so many"


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


def gate_choices(look: Look) -> list[str]:
    """What the sample has that a gate of the recipe will stop, in words, with the choice."""
    total = sum(file.records for file in look.files)
    return [
        f"In the sample of {total:,} records {gate.sentence}: the build will stop at the gate {gate.name}. Change the "
        f"data, the policy or the row length; or accept it with {gate.name}: null (or a limit) in the recipe's gates."
        for gate in look.gates
        if not gate.passed and gate.name != "records_quarantined"
    ]


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


def _seen(files: Sequence[FileLook]) -> str:
    first = "all" if all(file.whole for file in files) else "the first"
    return f"{first} {sum(file.records for file in files):,} records"


def _head(look: Look) -> list[str]:
    return [
        *_comment(f"Made by `chatmill init` after looking at {_seen(look.files)} of {len(look.files)} files."),
        *_comment(f"Messages: {counts_text(look.roles)}."),
        *(_comment(f"Conversations with {counts_text(look.features)}.") if look.features else ()),
        *(_comment(unused_sentence(look.unused)) if look.unused else ()),
        *_comment("Look at the tokens with `chatmill preview FILE`; build with `chatmill build RECIPE --out DIR`."),
        "version: 1",
    ]


def _sources(look: Look) -> list[str]:
    lines = ["# Files (names or globs, from the folder in which the build runs) that belong together.", "sources:"]
    by_path = {file.path: file for file in look.files}
    for number, source in enumerate(look.recipe.sources):
        files = [by_path[path] for path in source.patterns]
        bad = sum((file.bad for file in files), Counter[str]())
        cannot = f"; {bad.total():,} cannot be read: {counts_text(bad)}" if bad else ""
        lines += _comment(f"Looked at: {_seen(files)}{cannot}.", "  ")
        if isinstance(source.path, str):
            lines.append(f"  - path: {_scalar(source.path)}")
        else:
            lines += ["  - path:", *(f"      - {_scalar(path)}" for path in source.path)]
        fields = map_of(source.shape or "")
        lines.append(f"    shape: {source.shape}" if fields is None else f"    map: {_scalar(fields)}")
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
    lines.append(
        "# vocab_size: ...        # ids that the model has; absent: what config.json beside the tokenizer says"
    )
    lines += _comment(f"How conversations are written. {template.declares}")
    if look.own_template is not None:
        lines += _comment(" ".join(look.own_template.sentences()))
    if look.notes["stripped_characters"]:
        lines += _comment(f"In the sample it leaves out {look.notes['stripped_characters']:,} characters.")
    if look.refused:
        lines += _comment(
            f"In the sample it refuses {look.refused.total():,} conversations: {counts_text(look.refused)}."
        )
    lines += _comment(f"Others: a model folder, a .jinja or .py file, or {', '.join(template_names())}.")
    lines.append(f"template: {_scalar(recipe.template)}")
    lines += _template_options(look)
    own = template.default_policy
    lines += _comment(f"What is trained: a policy by name or .json file; absent: the template's own, {own}.")
    lines.append(f"# policy: {own}")
    return lines


def _template_options(look: Look) -> list[str]:
    """What else a recipe says about its template; a date where the template asks for one, the rest as comments."""
    notes, names = look.notes, look.option_names
    changed, rows = notes["turns_that_later_messages_change"], notes["rows_added"]
    lines = _comment(f"Options that it reads: {', '.join(names)}.") if names else []
    lines.append(f"# template_options: {{{f'{names[0]}: ...' if names else ''}}}")
    if look.recipe.date is not None:
        lines += _comment("The template writes today's date; the build takes this one.")
    lines.append(
        f"date: {look.recipe.date}"
        if look.recipe.date
        else "# date: 2026-01-31      # today, for a template that asks for it"
    )
    if changed:
        lines += _comment(
            f"Later messages change {changed:,} answers of the sample; each is trained behind its real prompt, with "
            f"{rows:,} rows and {notes['tokens_in_added_rows']:,} tokens more."
        )
    return [
        *lines,
        "# expand: turns         # also: last trains the last answer only, none trains every answer in place",
        "# thinking: auto        # as_given: never choose the template's switch for thinking per record",
        "# unproved: refuse      # untrained: an answer whose mask cannot be proved is context",
        "# strict_text: false    # true: text that spells <think> and the like stays text",
        "# traces: shared        # whole: run the template on every shape as a whole; slower, the same output",
    ]


def _rows(look: Look) -> list[str]:
    packing, lengths = look.recipe.packing, look.lengths
    over = int((lengths > (packing.max_length or 0)).sum())
    longer = f"; {over:,} are longer than the row" if over else ""
    shares = ", ".join(f"{share}% have {int(np.percentile(lengths, share)):,} or fewer" for share in (50, 90, 99))
    return [
        "packing:",
        *_comment(f"Tokens in the sample: {shares}; the longest has {int(lengths[-1]):,}{longer}.", "  "),
        f"  max_length: {packing.max_length}",
        *_comment("Longer ones: error, drop, drop_oldest_turns, cut, or windows (several episodes).", "  "),
        f"  overflow: {packing.overflow}",
        "# pack:                       # plan rows that hold several conversations, ready for training",
        f"#   length: {packing.max_length}",
        "#   strategy: best_fit        # also: first_fit, greedy, in_order",
    ]


def _rest(look: Look) -> list[str]:
    found = {gate.name: f"in the sample: {gate.sentence}" + ("" if gate.passed else OFF) for gate in look.gates}
    found["records_quarantined"] = f"in the sample: {look.unusable:,} records cannot be used"
    limits = structs.asdict(look.recipe.gates)
    return [
        "# Share of the records, by a hash of their id, that goes to val.",
        "split:",
        "  val_fraction: 0.0",
        "",
        "# Records that cannot be used: fail ends the build, quarantine writes them to rejected.jsonl.",
        f"on_error: {look.recipe.on_error}",
        "# Records with answers that people compared (chosen and rejected, or a label): chosen trains the good ones.",
        f"preferences: {look.recipe.preferences}" if look.recipe.preferences else "# preferences: chosen",
        "",
        "# Limits that fail the build with exit status 3; null turns one off.",
        "gates:",
        *(f"  {name}: {_scalar(limit)}   # {found[name]}" for name, limit in limits.items()),
        "",
        "# keep_kinds: true           # store what each token is, so that the policy can change at load time",
        "# shard_bytes: 33554432    # bytes of input that become one shard",
    ]


def _scalar(value: Any) -> str:
    """A value as YAML: JSON is YAML, and plain words need no quotes."""
    import yaml

    if isinstance(value, str) and PLAIN.fullmatch(value) and yaml.safe_load(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)
