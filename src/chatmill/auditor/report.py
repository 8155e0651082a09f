"""The result of an audit: verdict, findings with examples, and what could not be known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chatmill.auditor.findings import AuditFinding


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
    isolation: str
    """What is known about documents that see each other; empty where no row holds two."""
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
            "isolation": self.isolation or None,
            "source": None if self.source is None else dict(self.source),
            "findings": [finding.as_json() for finding in self.findings],
            "notes": [finding.as_json() for finding in self.notes],
            "unknown": list(self.unknown),
        }
