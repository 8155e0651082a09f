"""Show packed blocks: tokens, documents and text, with the boundaries.

PACKED is a .parquet or .arrow file, a folder of them, or a folder made by
Dataset.save_to_disk, with the columns input_ids and (for packed rows)
document_starts. Exit status 1 when a block's boundaries cannot be right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    packed: Annotated[Path, typer.Argument(metavar="PACKED", help="File or folder with packed blocks.")],
    examples: Annotated[int, typer.Option("--examples", "-n", min=1, help="How many blocks to show.")] = 5,
    start: Annotated[int, typer.Option(min=0, help="The first block to show.")] = 0,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Decodes the ids: o200k, bytes, a tokenizer.json or a folder with one."),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Which split of a saved DatasetDict.")] = None,
    lines: Annotated[int, typer.Option(min=0, help="Lines per document; 0 shows all.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per block.")] = False,
) -> None:
    """Show packed blocks."""
    import json
    import shutil
    import sys

    from chatmill.look.inspect_packed import block_lines, view_block
    from chatmill.look.packed_rows import open_packed
    from chatmill.tokenizer.load import load_tokenizer

    source = open_packed(packed, split)
    if tokenizer is None and (source.path / "tokenizer.json").is_file():
        tokenizer = str(source.path)
    decoder = load_tokenizer(tokenizer) if tokenizer else None
    width = min(shutil.get_terminal_size().columns, 120) if sys.stdout.isatty() else 80
    shown, problems = 0, 0
    for row in source.rows(start, examples):
        block = view_block(row, decoder)
        shown += 1
        problems += block.problem is not None
        if as_json:
            typer.echo(json.dumps(block.as_json(), ensure_ascii=False))
            continue
        for line in block_lines(block, width=width, most_lines=lines):
            typer.secho(line, bold=line.startswith("----"), dim=line.startswith("["))
        typer.echo()
    if not as_json:
        hint = "" if decoder else " Ids only: --tokenizer gives the text."
        typer.echo(f"{shown:,} of {len(source):,} blocks shown.{hint}")
    if problems:
        raise typer.Exit(1)
