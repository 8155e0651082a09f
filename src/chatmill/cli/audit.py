"""Check token data that another pipeline made: what is trained, what is not, and what cannot be right.

TOKENIZED is what a trainer reads: a folder of datasets.save_to_disk (an axolotl prepared folder is one), Parquet,
Arrow or JSONL with input_ids and labels or a mask, or the prefix of Megatron's .bin and .idx.

Exit status: 0 when no fault is found, 1 when some are, 2 when the set cannot be audited.

Examples:
    chatmill audit last_run_prepared/ --model ./Qwen3-0.6B
    chatmill audit train.parquet -m ./my-model --source chats.jsonl -o a.html
    chatmill audit train.jsonl --model ./my-model --json | jq .findings[].code
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from chatmill import __version__
from chatmill.cli import options
from chatmill.cli.options import argument, flag, option
from chatmill.console import plain_console


def command(
    tokenized: Annotated[Path, argument("TOKENIZED", "Folder, file, or Megatron prefix.")],
    model: Annotated[str, option("--model -m", "DIR", "Folder of the model: its tokenizer and chat template.")],
    source: Annotated[
        str | None, option("--source", "FILE", "The conversations it was made of: compared token by token.")
    ] = None,
    template: Annotated[str | None, options.TEMPLATE] = None,
    settings: Annotated[list[str] | None, options.TEMPLATE_SET] = None,
    shape: Annotated[list[str] | None, options.SHAPE] = None,
    split: Annotated[str | None, options.SPLIT] = None,
    mask: Annotated[str | None, option("--mask", "COLUMN", "The column that says what is trained.")] = None,
    shifted: Annotated[bool, flag("--shifted", "The labels are shifted already; the trainer does not do it.")] = False,
    count: Annotated[int, options.COUNT] = 1,
    out: Annotated[Path | None, option("--out -o", "FILE", "Write the report as an HTML page, too.")] = None,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Check token data that another pipeline made."""
    from chatmill.auditor.report import print_report
    from chatmill.auditor.run import audit
    from chatmill.look.pages import check_place, write_page

    if out is not None:
        check_place(out)
    chosen, keys = options.template_settings(settings)
    options.name_url(tokenized)
    report = audit(
        tokenized,
        model,
        source=source,
        template=template,
        template_options=chosen,
        **keys,
        split=split,
        mask=mask,
        shifted=shifted,
        shape=options.shape_of(shape),
        examples=max(count, 3),
    )
    if out is not None:
        write_page(out, report.page(__version__))
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        print_report(plain_console(), report, count)
        if out is not None:
            typer.echo(f"\n{out}: the report as a page")
    if not report.passed:
        raise typer.Exit(1)
