"""A report of an audit as text, in the colours of a terminal."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.text import Text

from chatmill.auditor.report import AuditFinding, AuditReport, Example
from chatmill.console import plain_console, plain_table
from chatmill.look.safe_text import visible
from chatmill.look.terminal import print_labelled

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 100
"""Columns of a report as a string."""


def report_text(found: AuditReport) -> str:
    """The report without colours."""
    out = io.StringIO()
    print_report(plain_console(file=out, width=WIDTH, colour=False), found)
    return out.getvalue().rstrip()


def print_report(console: Console, found: AuditReport, count: int = 1) -> None:
    """Print everything, with so many examples of each finding."""
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
