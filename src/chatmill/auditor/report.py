"""What an audit found: for a script, as text, and as a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatmill.auditor.findings import AuditFinding
from chatmill.look.pages import page_of


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
        doubt = f" {len(self.unknown)} thing{'' if len(self.unknown) == 1 else 's'} could not be known." * bool(
            self.unknown
        )
        if self.passed:
            return f"No faults found in {self.documents:,} documents, {self.tokens:,} tokens.{doubt}"
        kinds = len(self.findings)
        named = ", ".join(finding.rule.title for finding in self.findings[:3]) + (", ..." if kinds > 3 else "")
        return f"{kinds} kind{'' if kinds == 1 else 's'} of fault found: {named}.{doubt}"

    def as_json(self) -> dict[str, Any]:
        """For a script."""
        return {
            "name": self.name,
            "passed": self.passed,
            "verdict": self.verdict,
            "template": self.template,
            "tokenizer": self.tokenizer,
            "rows": self.rows,
            "documents": self.documents,
            "tokens": self.tokens,
            "trained": self.trained,
            "answers": self.answers,
            "mask": self.mask_name or None,
            "boundaries": self.boundaries or None,
            "source": None if self.source is None else dict(self.source),
            "findings": [finding.as_json() for finding in self.findings],
            "notes": [finding.as_json() for finding in self.notes],
            "unknown": list(self.unknown),
        }

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
