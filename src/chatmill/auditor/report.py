"""What an audit found: for a script, as text, and as a page."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.text import Text

from chatmill.auditor.findings import RULES, Rule
from chatmill.console import plain_console, plain_table
from chatmill.core.words import counted
from chatmill.look.pages import page_of
from chatmill.look.safe_text import visible
from chatmill.look.terminal import print_labelled

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 100
"""Columns of a report as a string."""


class ReportPart(NamedTuple):
    """A stretch of the tokens around a finding."""

    text: str
    trained: bool
    control: bool
    found: bool
    """Whether the finding is about it."""


class Example(NamedTuple):
    """One place where something was found."""

    row: int
    first: int
    """First and last + 1 token in the row that the finding is about."""
    last: int
    parts: tuple[ReportPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFinding:
    """Something that was found, how often, and where first."""

    code: str
    count: int
    total: int
    """How many there are of what is counted."""
    detail: str = ""
    examples: tuple[Example, ...] = ()

    @property
    def rule(self) -> Rule:
        """What its code means."""
        return RULES[self.code]

    @property
    def share(self) -> float:
        """Of all that could have been found."""
        return self.count / max(1, self.total)

    def as_json(self) -> dict[str, Any]:
        """Return plain values, for scripts."""
        rule = self.rule
        return {
            "code": self.code,
            "title": rule.title,
            "note": rule.is_note,
            "count": self.count,
            "of": self.total,
            "unit": rule.unit,
            "share": self.share,
            "says": rule.says,
            "fix": rule.fix,
            "detail": self.detail or None,
            "examples": [
                example._asdict() | {"parts": [part._asdict() for part in example.parts]} for example in self.examples
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What an audit found."""

    name: str
    template: str
    tokenizer: str
    rows: int
    documents: int
    tokens: int
    trained: int | None
    """None: the set has no mask."""
    answers: int
    trained_answers: int
    """Answers of which tokens are trained."""
    trained_stops: int
    """Answers whose stop is trained."""
    mask_name: str
    boundaries: str
    findings: tuple[AuditFinding, ...]
    """Faults, the most frequent first."""
    notes: tuple[AuditFinding, ...]
    """Worth knowing, and no faults."""
    unknown: tuple[str, ...]
    """What could not be known, in sentences."""
    source: Mapping[str, Any] | None = None
    """Counts of the comparison with the source: records, documents, equal, missing, refused."""

    @property
    def passed(self) -> bool:
        """Whether no fault was found."""
        return not self.findings

    @property
    def verdict(self) -> str:
        """One line."""
        doubts, kinds = len(self.unknown), len(self.findings)
        were = "was" if doubts == 1 else "were"
        doubt = f" {counted(doubts, 'thing')} {were} not checked." if doubts else ""
        if self.passed:
            seen = f"{counted(self.answers, 'answer')} in {counted(self.documents, 'document')}"
            return f"No faults found in {seen}, {self.tokens:,} tokens.{doubt}"
        named = ", ".join(finding.rule.title for finding in self.findings[:3]) + (", ..." if kinds > 3 else "")
        return f"{counted(kinds, 'kind')} of fault found: {named}.{doubt}"

    def as_json(self) -> dict[str, Any]:
        """Return plain values, for scripts."""
        listed = {name: [finding.as_json() for finding in getattr(self, name)] for name in ("findings", "notes")}
        said = asdict(self) | listed | {"passed": self.passed, "verdict": self.verdict}
        mask, boundaries = said.pop("mask_name") or None, said["boundaries"] or None
        return said | {"mask": mask, "boundaries": boundaries, "unknown": list(self.unknown)}

    def page(self, version: str = "") -> str:
        """Render one HTML page without scripts; all content of the set is escaped."""
        tiles: list[tuple[int | str, str]] = [
            (self.rows, "rows"),
            (self.documents, f"documents by {self.boundaries or 'rows'}"),
            (self.tokens, "tokens"),
            (self.answers, "answers"),
        ]
        if self.trained is not None:
            tiles.append((f"{self.trained / max(1, self.tokens):.1%}", f"trained, by {self.mask_name}"))
        if self.source is not None:
            tiles.append((self.source["equal"], "documents with the ids of a record"))
        template = Path(__file__).with_name("page.html")
        return page_of(template, saved=True, name=self.name, version=version, report=self, tiles=tiles)

    def __str__(self) -> str:
        out = io.StringIO()
        print_report(plain_console(file=out, width=WIDTH, colour=False), self)
        return out.getvalue().rstrip()


def print_report(console: Console, report: AuditReport, count: int = 1) -> None:
    """Print everything, with `count` examples of each finding."""
    for label, value in facts(report):
        print_labelled(console, label, value)
    console.print()
    console.print(Text(report.verdict, style="bold green" if report.passed else "bold red"))
    if report.findings or report.notes:
        console.print()
        _print_table(console, report)
    for finding in (*report.findings, *report.notes):
        _print_finding(console, finding, count)
    if report.unknown:
        console.print("\nNot checked", style="bold yellow")
    for sentence in report.unknown:
        print_labelled(console, "", f"{sentence}.", indent=2, gutter=0)
    if count and any(finding.examples for finding in report.findings):
        console.print(
            "\n\u00ab\u00bb control tokens, underlined: trained, [ ]: what the finding is about, \u23ce a newline.",
            style="dim",
        )


def facts(report: AuditReport) -> list[tuple[str, str]]:
    """List what was audited, as labels and values."""
    count = report.trained
    trained = "no mask" if count is None else f"{count:,} ({count / max(1, report.tokens):.1%})"
    listed = [
        ("set", report.name),
        ("model", f"template {report.template}, tokenizer {report.tokenizer}"),
        ("rows", f"{report.rows:,}, {report.documents:,} documents by {report.boundaries or 'rows'}"),
        ("tokens", f"{report.tokens:,}; trained: {trained}" + (f", by {report.mask_name}" if report.mask_name else "")),
    ]
    if report.answers:
        words = f"{report.answers:,}; trained: {report.trained_answers:,}, with their stop: {report.trained_stops:,}"
        listed.append(("answers", words))
    if report.source is None:
        listed.append(("source", "none: texts and masks are not compared with records (--source FILE)"))
    if report.source is not None:
        words = f"{report.source['records']:,} records; {report.source['equal']:,} documents have the ids of a record"
        listed.append(("source", f"{words}; {report.source['missing']:,} records have no document"))
    return listed


def _print_table(console: Console, report: AuditReport) -> None:
    table = plain_table("finding", right=("count", "of", "share"))
    for finding in (*report.findings, *report.notes):
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
    print_labelled(console, "", finding.rule.fix, indent=2, gutter=0)
    for example in finding.examples[:count]:
        text = Text(f"  row {example.row:,}: ", style="bright_black")
        text.append(_example(example))
        console.print(text)


def _example(example: Example) -> Text:
    shown = Text(style="default")
    inside = False
    for text, trained, control, marked in example.parts:
        if marked != inside:
            shown.append("[" if marked else "]", style="bold red")
            inside = marked
        words = visible(text).replace("\n", "")  # the mark is enough: an example is one line
        style = ("green underline" if trained else "default") + (" bold" if control else "")
        shown.append(f"\u00ab{words}\u00bb" if control else words, style=style)
    if inside:
        shown.append("]", style="bold red")
    return shown
