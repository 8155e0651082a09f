"""Write one HTML page about a dataset: where every token went, plots, packing, samples and provenance.

The page is self-contained: no scripts, nothing is loaded from anywhere, and content of conversations cannot
become part of it. DATASET is what chatmill inspect takes.

Examples:
    chatmill report data/built -o report.html
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from chatmill import __version__
from chatmill.cli import options
from chatmill.cli.options import argument, option
from chatmill.console import shown_count


def command(
    dataset: Annotated[Path, argument("DATASET", "Folder or file of the dataset.")],
    out: Annotated[Path, option("--out -o", "FILE", "The page to write.")] = Path("report.html"),
    split: Annotated[str | None, options.SPLIT] = None,
    samples: Annotated[int, option("--samples", "N", "Conversations to show.", min=0)] = 6,
    tokenizer: Annotated[str | None, options.TOKENIZER] = None,
    quiet: Annotated[bool, options.QUIET] = False,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Write the report of a dataset."""
    from chatmill.look.dataset import open_for_looking
    from chatmill.look.report.page import check_place, make_report, write_report

    check_place(out)
    opened = open_for_looking(dataset, [split] if split else None, tokenizer=tokenizer)
    with shown_count(quiet) as show:
        progress = show and partial(show, "reading tokens")
        page = make_report(opened, samples=samples, version=__version__, progress=progress)
    write_report(out, page)
    if as_json:
        typer.echo(json.dumps({"report": str(out), "bytes": len(page.encode())}))
    else:
        typer.echo(f"{out}: {len(page.encode()):,} bytes")
