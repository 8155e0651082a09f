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
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from chatmill import __version__
from chatmill.cli import options
from chatmill.cli.labelled import print_labelled
from chatmill.cli.options import argument, flag, option
from chatmill.console import plain_console, plain_table
from chatmill.look.safe_text import visible

if TYPE_CHECKING:
    from rich.console import Console

    from chatmill.auditor.findings import AuditFinding, Example
    from chatmill.auditor.run import AuditReport


def command(
    tokenized: Annotated[Path, argument("TOKENIZED", "Folder, file, or Megatron prefix.")],
    model: Annotated[str, option("--model -m", "DIR", "Folder of the model: its tokenizer and chat template.")],
    source: Annotated[
        str | None, option("--source", "FILE", "The conversations it was made of: compared token by token.")
    ] = None,
    template: Annotated[str | None, options.TEMPLATE] = None,
    settings: Annotated[list[str] | None, options.TEMPLATE_SET] = None,
    shape: Annotated[str | None, options.SHAPE] = None,
    field_map: Annotated[list[str] | None, options.MAP] = None,
    split: Annotated[str | None, options.SPLIT] = None,
    mask: Annotated[str | None, option("--mask", "COLUMN", "The column that says what is trained.")] = None,
    shifted: Annotated[bool, flag("--shifted", "The labels are shifted already; the trainer does not do it.")] = False,
    count: Annotated[int, options.COUNT] = 1,
    out: Annotated[Path | None, option("--out -o", "FILE", "Write the report as an HTML page, too.")] = None,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Check token data that another pipeline made."""
    from chatmill.auditor.run import audit
    from chatmill.look.pages import check_place, write_page

    if out is not None:
        check_place(out)
    chosen, date = options.template_settings(settings)
    found = audit(
        tokenized,
        model,
        source=source,
        template=template,
        template_options=chosen,
        date=date,
        split=split,
        mask=mask,
        shifted=shifted,
        shape=options.shape_or_map(shape, field_map),
        examples=max(count, 3),
    )
    if out is not None:
        write_page(out, found.page(__version__))
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    else:
        _print(plain_console(), found, count)
        if out is not None:
            typer.echo(f"\n{out}: the report as a page")
    if not found.passed:
        raise typer.Exit(1)


def _print(console: Console, found: AuditReport, count: int) -> None:
    for label, value in facts(found):
        print_labelled(console, label, value)
    console.print()
    console.print(Text(found.verdict, style="bold green" if found.passed else "bold red"))
    if found.findings or found.notes:
        console.print()
        _print_table(console, found)
    for finding in (*found.findings, *found.notes):
        _print_finding(console, finding, count)
    if found.unknown:
        console.print("\nCould not be known", style="bold yellow")
    for sentence in found.unknown:
        print_labelled(console, "", f"{sentence}.", indent=2, gutter=0)
    if count and any(finding.examples for finding in found.findings):
        console.print(
            "\n\u00ab\u00bb control tokens, underlined: trained, [ ]: what the finding is about, \u23ce a newline.",
            style="dim",
        )


def facts(found: AuditReport) -> list[tuple[str, str]]:
    """What was audited, as labels and values."""
    trained = "no mask" if found.trained is None else f"{found.trained:,} ({found.trained / max(1, found.tokens):.1%})"
    listed = [
        ("set", found.name),
        ("model", f"template {found.template}, tokenizer {found.tokenizer}"),
        ("rows", f"{found.rows:,}, {found.documents:,} documents by {found.boundaries or 'rows'}"),
        ("tokens", f"{found.tokens:,}; trained: {trained}" + (f", by {found.mask_name}" if found.mask_name else "")),
    ]
    if found.source is not None:
        words = f"{found.source['records']:,} records; {found.source['equal']:,} documents have the ids of a record"
        listed.append(("source", f"{words}; {found.source['missing']:,} records have no document"))
    return listed


def _print_table(console: Console, found: AuditReport) -> None:
    table = plain_table("finding", right=("count", "of", "share"))
    for finding in (*found.findings, *found.notes):
        style = "bright_black" if finding.rule.is_note else ""
        title = finding.rule.title + (" (note)" if finding.rule.is_note else "")
        table.add_row(
            title, f"{finding.count:,}", f"{finding.total:,} {finding.rule.unit}", f"{finding.share:.1%}", style=style
        )
    console.print(table)


def _print_finding(console: Console, finding: AuditFinding, count: int) -> None:
    console.print()
    console.print(Text.assemble((finding.rule.title, "bold"), f"  {finding.code}"))
    print_labelled(console, "", finding.rule.says, indent=2, gutter=0)
    if finding.detail:
        print_labelled(console, "", finding.detail, indent=2, gutter=0)
    print_labelled(console, "", finding.rule.mend, indent=2, gutter=0)
    for example in finding.examples[:count]:
        text = Text(f"  row {example.row:,}: ", style="bright_black")
        text.append(_example(example))
        console.print(text)


def _example(example: Example) -> Text:
    shown = Text(style="default")
    inside = False
    for text, trained, control, found in example.parts:
        if found != inside:
            shown.append("[" if found else "]", style="bold red")
            inside = found
        words = visible(text).replace("\n", "")  # the mark is enough: an example is one line
        style = ("green underline" if trained else "default") + (" bold" if control else "")
        shown.append(f"\u00ab{words}\u00bb" if control else words, style=style)
    if inside:
        shown.append("]", style="bold red")
    return shown
