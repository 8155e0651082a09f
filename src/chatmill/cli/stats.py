"""Show what a dataset holds: lengths, what is trained by role, source and turn, fill, and the ledger.

DATASET is what chatmill inspect takes. Splits are read once, in memory that does not grow.

Examples:
    chatmill stats data/built
    chatmill stats data/built --split train --json
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from chatmill.cli import options
from chatmill.cli.options import argument
from chatmill.console import shown_count


def command(
    dataset: Annotated[Path, argument("DATASET", "Folder or file of the dataset.")],
    split: Annotated[str | None, options.SPLIT] = None,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Print tables and plots about a dataset."""
    from chatmill.look.dataset import open_for_looking
    from chatmill.look.stats import dataset_stats
    from chatmill.look.stats_view import stats_parts
    from chatmill.look.terminal import screen, show

    opened = open_for_looking(options.dataset_folder(dataset))
    with shown_count(as_json) as count:
        stats = dataset_stats(opened, [split] if split else None, count and partial(count, "reading tokens"))
    if as_json:
        typer.echo(json.dumps(stats.as_json(), ensure_ascii=False))
        return
    console = screen()
    show(console, stats_parts(stats.splits, stats.accounts, width=console.width))
