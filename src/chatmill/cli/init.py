"""Write a commented recipe for files of conversations, after looking at them.

Examples:
    chatmill init chats/*.jsonl --model ./Qwen3-0.6B
    chatmill init chats/*.jsonl --model ./Qwen3-0.6B --for trl
    chatmill init chats/*.jsonl --model ./Qwen3-0.6B --out - | less
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chatmill.cli import options
from chatmill.cli.options import argument, option
from chatmill.console import plain_console, plain_table
from chatmill.core.words import counted
from chatmill.errors import ConfigError, RecordError
from chatmill.export.registry import TARGETS, find_target
from chatmill.look.safe_text import visible

if TYPE_CHECKING:
    from chatmill.compiler.first_recipe import FirstLook

PREFERENCES = {
    "pairs": "Records with answers that people compared: both are compiled, for trainers of preferences "
    "(preferences: pairs). To train the good answers as other conversations: --set preferences=chosen",
    "chosen": "Records with answers that people compared: the good ones are trained (preferences: chosen).",
}
"""What is said of the choice."""


def command(
    files: Annotated[list[str], argument("FILES", "Files of conversations, or globs.")],
    out: Annotated[str, option("--out -o", "FILE", "The new recipe; - prints it.")] = "recipe.yaml",
    tokenizer: Annotated[str | None, options.TOKENIZER] = None,
    trainer: Annotated[
        str | None,
        option(
            "--for",
            "NAME",
            f"Fit what this export's trainer takes: {', '.join(TARGETS)}.",
            autocompletion=lambda: list(TARGETS),
        ),
    ] = None,
    shape: Annotated[list[str] | None, options.SHAPE] = None,
    template: Annotated[str | None, options.TEMPLATE] = None,
    settings: Annotated[
        list[str] | None, option("--set", "KEY=VALUE", "preferences=chosen or preferences=pairs.")
    ] = None,
) -> None:
    """Look at the files and write a recipe."""
    from chatmill.compiler.first_recipe import PAIRS, look_at, recipe_text, write_recipe

    values = options.settings(settings, {"preferences": str})
    path = Path(out)
    if out != "-" and path.exists():
        raise ConfigError(f"{path} is there already and is not overwritten: remove it, or choose another --out")
    if tokenizer is None:
        options.refuse_no_model(files)
    if trainer is not None:
        target = find_target(trainer)
        # TRL has other exports for answers that people compared.
        values["holds"] = (*target.holds, PAIRS) if trainer == "trl" else target.holds
    look = look_at(
        files,
        tokenizer=tokenizer,
        shape=options.shape_of(shape),
        template=template,
        **values,
    )
    options.report_not_read(files)
    closing = [] if trainer is None else _export_lines(look, trainer, "recipe.yaml" if out == "-" else out)
    if out == "-":
        typer.echo(recipe_text(look, closing), nl=False)
        return
    write_recipe(look, path, closing)
    _show(look, path, closing)


def _export_lines(look: FirstLook, trainer: str, recipe_file: str) -> list[str]:
    """Write the commands from the recipe to the rows of a trainer, and the lines for its config."""
    from chatmill.export.trainer_lines import TRAINER_LINES, RowFacts, llamafactory_pair_lines
    from chatmill.images.files import picture_folder
    from chatmill.images.headers import MOST_PIXELS

    recipe = look.recipe
    if trainer == "trl" and recipe.preferences == "pairs":
        trainer = "trl-dpo" if look.has_pairs else "trl-kto"
    target = find_target(trainer)
    length = recipe.packing.max_length
    assert length is not None
    takes_rows = not target.no_rows and recipe.preferences != "pairs"
    # Levanter knows the documents of a row by their end tokens alone.
    is_packed = takes_rows and (trainer != "levanter" or look.ends_in_eos)
    width = f" --max-length {length}" if takes_rows else ""
    if takes_rows and not is_packed:
        width += " --pack alone"
    if target.takes("eod_id") and look.eod_id is not None and not look.ends_in_eos:
        width += f" --eod-id {look.eod_id}"
    folder = f"built-{trainer}"
    lines = [
        f"For {trainer}:",
        f"    chatmill build {shlex.quote(recipe_file)} --out built",
        f"    chatmill export built --to {trainer}{width} --out {folder}",
    ]
    write_lines = TRAINER_LINES.get(trainer)
    if write_lines is None:
        return [*lines, f"The export prints the lines for the config of {trainer}."]
    if trainer == "llamafactory" and recipe.preferences == "pairs":
        write_lines = llamafactory_pair_lines
    facts = RowFacts(
        splits=("train",),
        is_packed=is_packed,
        longest=length,
        row=length,
        has_trees=recipe.expand == "tree",
        has_images=look.has_images,
        has_pairs=look.has_pairs,
        most_pixels=MOST_PIXELS,
        model=recipe.tokenizer,
        image_folder=picture_folder(recipe.images, look.patterns) or "" if look.has_images else "",
    )
    config = [line.replace("{out}", folder) for line in write_lines(facts)]
    if not config:
        return lines
    return [*lines, f"In the config of {trainer}:", *(f"    {line}" for line in config)]


def _first_of(errors: Sequence[RecordError]) -> str:
    """Show the first of some errors, and count them all by their reasons."""
    from chatmill.compiler.first_recipe import counts_text

    if len(errors) == 1:
        return str(errors[0])
    counts = counts_text(Counter(error.code for error in errors))
    return f"{errors[0]} ({len(errors):,} such records: {counts})"


def _show(look: FirstLook, path: Path, closing: Sequence[str]) -> None:
    from chatmill.core.conversations import unused_sentence
    from chatmill.read.agents.lacking import lacking_lines
    from chatmill.read.places import place
    from chatmill.read.shapes import find_shape

    table = plain_table("file", "shape", right=("records", "bad"))
    table.columns[0].overflow = "fold"
    for file in look.files:
        records = f"{file.records:,}{'' if file.whole else '+'}"
        shape = find_shape(file.shape).name if file.shape.startswith("{") else file.shape
        table.add_row(file.path, shape, records, f"{file.bad.total():,}")
    console = plain_console()
    console.print(table)
    for file in look.files:
        if file.formats:
            sentence = f"{file.path} mixes formats, and each record is read in its own: {file.format_counts}."
            console.print(visible(sentence), soft_wrap=True, style="yellow")
        if file.errors:
            sentence = f"Cannot be read: {_first_of(file.errors)}"
            console.print(visible(sentence), soft_wrap=True, style="yellow")
    if look.refused:
        console.print(visible(f"Refused: {_first_of(look.refused)}"), soft_wrap=True, style="yellow")
    recipe = look.recipe
    console.print(
        f"Template {recipe.template}, rows of {recipe.packing.max_length:,} tokens"
        + (f"; {counted(look.unusable, 'record')} cannot be used" if look.unusable else "")
    )
    if recipe.preferences is not None:
        console.print(PREFERENCES[recipe.preferences], soft_wrap=True)
    if look.with_logprobs:
        console.print(f"{counted(look.with_logprobs, 'conversation')} with log-probabilities, which are stored.")
    for sentence in look.gate_choices():
        console.print(sentence, soft_wrap=True, style="yellow")
    for file in look.files:
        for line in lacking_lines(place(file.path), file.shape):
            console.print(visible(line), soft_wrap=True, style="yellow")
    if look.unused:
        console.print(visible(unused_sentence(look.unused)), soft_wrap=True, style="yellow")
    if look.other_template:
        console.print(look.other_template, soft_wrap=True, style="yellow")
    if not closing:
        console.print(f"Wrote {path}. Read it, then: chatmill build {path} --out DIR", soft_wrap=True)
        return
    console.print(f"Wrote {path}. Read it, then:", soft_wrap=True)
    for line in closing[1:]:
        console.print(visible(line), soft_wrap=True)
