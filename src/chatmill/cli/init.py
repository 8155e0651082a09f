"""Write a commented recipe for files of conversations, after looking at them.

Examples:
    chatmill init chats/*.jsonl --tokenizer ./Qwen3-0.6B
    chatmill init chats/*.jsonl --out - | less
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chatmill.cli import options
from chatmill.cli.options import argument, option
from chatmill.console import plain_console, plain_table
from chatmill.errors import ConfigError
from chatmill.look.safe_text import visible

if TYPE_CHECKING:
    from chatmill.compiler.first_recipe import FirstLook


def command(
    files: Annotated[list[str], argument("FILES", "Files of conversations, or globs.")],
    out: Annotated[str, option("--out -o", "FILE", "The new recipe; - prints it.")] = "recipe.yaml",
    tokenizer: Annotated[str, options.TOKENIZER] = "o200k",
    shape: Annotated[list[str] | None, options.SHAPE] = None,
    template: Annotated[str | None, options.TEMPLATE] = None,
    settings: Annotated[list[str] | None, option("--set", "KEY=VALUE", "preferences=chosen.")] = None,
) -> None:
    """Look at the files and write a recipe."""
    from chatmill.compiler.first_recipe import look_at, recipe_text, write_recipe

    values = options.settings(settings, {"preferences": str})
    if values.get("preferences") == "pairs":
        raise ConfigError(
            "init proposes recipes for training conversations, with overflow policies that pairs do not take: give "
            "preferences=chosen, or build pairs at once (chatmill build ... --set preferences=pairs)"
        )
    path = Path(out)
    if out != "-" and path.exists():
        raise ConfigError(f"{path} is there already and is not overwritten: remove it, or choose another --out")
    look = look_at(
        files,
        tokenizer=tokenizer,
        shape=options.shape_of(shape),
        template=template,
        **values,
    )
    options.report_not_read(files)
    if out == "-":
        typer.echo(recipe_text(look), nl=False)
        return
    write_recipe(look, path)
    _show(look, path)


def _show(look: FirstLook, path: Path) -> None:
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
    console.print(
        f"Template {look.recipe.template}, rows of {look.recipe.packing.max_length:,} tokens"
        + (f"; {look.unusable:,} records cannot be used" if look.unusable else "")
    )
    for sentence in look.gate_choices():
        console.print(sentence, soft_wrap=True, style="yellow")
    for file in look.files:
        for line in lacking_lines(place(file.path), file.shape):
            console.print(visible(line), soft_wrap=True, style="yellow")
    if look.unused:
        console.print(visible(unused_sentence(look.unused)), soft_wrap=True, style="yellow")
    if look.other_template:
        console.print(look.other_template, soft_wrap=True, style="yellow")
    console.print(f"Wrote {path}. Read it, then: chatmill build {path} --out DIR", soft_wrap=True)
