"""What an audit found: for a script, as text, and as a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from chatmill.auditor.findings import RULES, Rule
from chatmill.look.pages import page_of


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
        """For a script."""
        rule = self.rule
        return {
            "code": self.code,
            "title": rule.title,
            "note": rule.is_note,
            "count": self.count,
            "of": self.total,
            "unit": str(rule.unit),
            "share": self.share,
            "says": rule.says,
            "mend": rule.mend,
            "detail": self.detail or None,
            "examples": [one._asdict() | {"parts": [part._asdict() for part in one.parts]} for one in self.examples],
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
        doubt = f" {doubts} thing{'' if doubts == 1 else 's'} could not be known." if doubts else ""
        if self.passed:
            return f"No faults found in {self.documents:,} documents, {self.tokens:,} tokens.{doubt}"
        named = ", ".join(finding.rule.title for finding in self.findings[:3]) + (", ..." if kinds > 3 else "")
        return f"{kinds} kind{'' if kinds == 1 else 's'} of fault found: {named}.{doubt}"

    def as_json(self) -> dict[str, Any]:
        """For a script."""
        listed = {name: [one.as_json() for one in getattr(self, name)] for name in ("findings", "notes")}
        said = asdict(self) | listed | {"passed": self.passed, "verdict": self.verdict}
        mask, boundaries = said.pop("mask_name") or None, said["boundaries"] or None
        return said | {"mask": mask, "boundaries": boundaries, "unknown": list(self.unknown)}

    def page(self, version: str = "") -> str:
        """One HTML page without scripts, in the style of the dataset report; all content of the set is escaped."""
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
        from chatmill.auditor.text import report_text

        return report_text(self)
