"""Write a dataset in the format of a trainer, or in another layout; and report what that cannot hold.

Examples:
    chatmill export data/built --to hf --out data/built-hf
    chatmill export data/built --to llamafactory --max-length 4096
    chatmill export data/built --to parquet --max-length 4096
    chatmill export data/built --to megatron --eod-id 199999
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from chatmill.cli import options
from chatmill.cli.options import argument, flag, option
from chatmill.console import plain_console, plain_table
from chatmill.export.registry import TARGETS


def command(
    directory: Annotated[Path, argument("DIR", "Folder of a dataset.")],
    to: Annotated[str, option("--to", "NAME", f"{', '.join(TARGETS)}.", autocompletion=lambda: list(TARGETS))],
    out: Annotated[Path | None, option("--out -o", "DIR", "New folder, or a URL; default: DIR-hf and so on.")] = None,
    split: Annotated[str | None, options.SPLIT] = None,
    max_length: Annotated[int | None, option("--max-length", "N", "Pack into rows of N tokens.", min=1)] = None,
    pack: Annotated[str, options.PACK] = "best_fit",
    eod_id: Annotated[
        int | None, option("--eod-id", "N", "megatron, olmo-core: put this token after every document.", min=0)
    ] = None,
    trees: Annotated[
        str | None, option("--trees", "expand", "Write the rows of trees, for trainers without a place for these.")
    ] = None,
    teacher: Annotated[
        bool, flag("--teacher", "hf, parquet, axolotl: write what a teacher says of the targets.")
    ] = False,
    model: Annotated[
        str | None, option("--model", "DIR", "Refuse ids that this model (or N ids) has no embedding for.")
    ] = None,
    shard_tokens: Annotated[int | None, option("--shard-tokens", "N", "Tokens of a file, at most.", min=1)] = None,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Export a dataset."""
    from chatmill.export.export import export_dataset

    if out is not None:
        options.name_url(out)
    result = export_dataset(
        options.dataset_folder(directory),
        to,
        out,
        split=split,
        max_length=max_length,
        packing_strategy=pack,
        eod_id=eod_id,
        trees=trees,
        teacher=teacher,
        model=model,
        shard_tokens=shard_tokens,
    )
    if as_json:
        typer.echo(json.dumps(result.manifest))
        return
    console = plain_console(soft_wrap=True)
    names = ("rows", "documents", "tokens", "trained")
    table = plain_table("split", right=names)
    for part, counts in result.splits.items():
        table.add_row(part, *(f"{counts[name]:,}" for name in names))
    console.print(table)
    if result.not_held:
        console.print(Text(f"\nNot held by this export ({result.to}):", style="bold"))
    for sentence in result.not_held:
        console.print(Text(f"- {sentence}", style="yellow"))
    if result.config:
        console.print(Text(f"\nFor the config of {result.to}:", style="bold"))
        console.print(Text(result.config))
    console.print(Text(f"\n{result.directory}"))
