"""Write a dataset in the format of a trainer, or in another layout; and report what that cannot hold.

Example: chatmill export --list

Example: chatmill export data/built --to hf --out data/built-hf

Example: chatmill export data/built --to llamafactory --max-length 4096

Example: chatmill export data/built --to parquet --max-length 4096

Example: chatmill export data/built --to megatron --eod-id 199999
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from chatmill.cli import options
from chatmill.export.registry import TARGETS, packaged_targets


def _targets() -> list[str]:
    return list(TARGETS)


def _takers(option: str) -> str:
    return ", ".join(target.name for target in TARGETS.values() if option in target.takes)


def _list(asked: bool) -> None:
    """Print all targets, with those of installed packages, and end."""
    if not asked:
        return
    from rich.text import Text

    from chatmill.console import plain_console, plain_table

    table = plain_table("name", "read by", "from")
    for target in [*TARGETS.values(), *packaged_targets()]:
        table.add_row(Text(target.name), Text(target.about), Text(target.origin))
    plain_console(soft_wrap=True).print(table)
    raise typer.Exit


def command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a dataset.")],
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="NAME", autocompletion=_targets, help=f"{', '.join(TARGETS)}; or a Python file, ./NAME.py."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="New folder; default: DIR-hf and so on.")
    ] = None,
    split: Annotated[str | None, options.SPLIT] = None,
    max_length: Annotated[
        int | None, typer.Option("--max-length", metavar="N", min=1, help="Pack into rows of so many tokens.")
    ] = None,
    pack: Annotated[str, options.PACK] = "best_fit",
    overflow: Annotated[
        str, typer.Option("--overflow", metavar="NAME", help="Documents longer than a row: error, drop or cut.")
    ] = "error",
    pad_id: Annotated[
        int | None, typer.Option("--pad-id", metavar="N", min=0, help="Default: as in the build.")
    ] = None,
    shard_tokens: Annotated[
        int | None,
        typer.Option("--shard-tokens", metavar="N", min=1, help="Tokens of a file or shard; default: as in the build."),
    ] = None,
    kinds: Annotated[bool, typer.Option("--kinds/--no-kinds", help="Write the kind of every token.")] = True,
    eod_id: Annotated[
        int | None,
        typer.Option("--eod-id", metavar="N", min=0, help=f"{_takers('eod_id')}: put this token after every document."),
    ] = None,
    record_ids: Annotated[
        bool, typer.Option("--record-ids", help="megatron: store the record id of every document: shard_NN_ids.")
    ] = False,
    hub: Annotated[
        bool, typer.Option("--hub", help=f"{_takers('hub')}: a folder for the Hugging Face Hub, with a dataset card.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--list", callback=_list, is_eager=True, help="Print all names for --to and exit.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="DIR", help="Refuse ids that this model (or N ids) has no embedding for."),
    ] = None,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Export a dataset."""
    from rich.text import Text

    from chatmill.console import plain_console, plain_table
    from chatmill.export.export import export_dataset

    result = export_dataset(
        directory,
        to,
        out,
        split=split,
        max_length=max_length,
        packing_strategy=pack,
        overflow=overflow,
        pad_id=pad_id,
        shard_tokens=shard_tokens,
        kinds=kinds,
        eod_id=eod_id,
        record_ids=record_ids,
        hub=hub,
        model=model,
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
    if result.blend is not None:
        console.print(Text(f"\nFor Megatron-LM: --per-split-data-args-path {result.blend.json}"))
    if result.config:
        console.print(Text(f"\nFor the config of {result.to}:", style="bold"))
        console.print(Text(result.config))
    console.print(Text(f"\n{result.directory}"))
