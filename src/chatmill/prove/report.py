"""What a check of a dataset found: findings with their places, counts of what was checked, and what was not."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEPT = 50
"""Findings that are kept; further ones are counted."""

OnProgress = Callable[[str, int, int], None]
"""Called with the stage in words, how much is done, and of how much (0: not known)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it should be."""

    file: str
    """The file it was found in, below the dataset's folder; an input or tokenizer file as it was named."""
    message: str
    split: str = ""
    episode: int | None = None
    """Number of the episode (or document) in its split, from 0."""
    token: int | None = None
    """The first token of the episode that differs, from 0."""
    record: str = ""
    """Id of the record."""
    where: str = ""
    """File and line or row of the record."""
    stored: str = ""
    """What the dataset has, as text."""
    derived: str = ""
    """What it should have."""

    def __str__(self) -> str:
        place = [self.file]
        if self.episode is not None:
            place.append(f"{self.split} episode {self.episode:,}" if self.split else f"episode {self.episode:,}")
        if self.token is not None:
            place.append(f"token {self.token:,}")
        origin = ", ".join(part for part in (f"record {self.record!r}" if self.record else "", self.where) if part)
        text = f"{', '.join(place)}{f' ({origin})' if origin else ''}: {self.message}"
        if self.stored:
            text += f"\n  stored:  {self.stored!r}"
        if self.derived:
            text += f"\n  derived: {self.derived!r}"
        return text

    def as_json(self) -> dict[str, Any]:
        """Return the fields that say something."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in values.items() if value not in (None, "")}


@dataclass(slots=True, kw_only=True)
class VerifyReport:
    """The outcome of `verify`, which is filled while the check runs."""

    directory: Path
    deep: bool = False
    on_progress: OnProgress | None = field(default=None, repr=False)
    differences: int = 0
    """How many findings there are."""
    findings: list[Finding] = field(default_factory=list)
    """The first of them."""
    counts: Counter[str] = field(default_factory=Counter)
    """What was looked at, and how often."""
    compared: list[str] = field(default_factory=list)
    """What was compared, in sentences."""
    unchecked: list[str] = field(default_factory=list)
    """What could not be checked and is no difference."""
    blocked: str = ""
    """Why a check that was asked for could not be made; empty when it could."""
    started: float = field(default_factory=time.monotonic, repr=False)
    seconds: float = 0.0

    def progress(self, stage: str, done: int, total: int) -> None:
        """Report how far the check is."""
        if self.on_progress is not None:
            self.on_progress(stage, done, total)

    def found(self, finding: Finding) -> None:
        """Note a difference."""
        self.differences += 1
        if len(self.findings) < KEPT:
            self.findings.append(finding)

    def wrong(self, file: str, message: str) -> None:
        """Note a difference that is about a file as a whole."""
        self.found(Finding(file=file, message=message))

    def add(self, part: VerifyReport) -> None:
        """Take over what the check of a part of the dataset has found and counted."""
        self.differences += part.differences
        self.findings += part.findings[: KEPT - len(self.findings)]
        self.counts.update(part.counts)

    def ended(self) -> VerifyReport:
        """Return the report of a check that is done."""
        self.counts = Counter({name: count for name, count in sorted(self.counts.items()) if count})
        self.seconds = time.monotonic() - self.started
        return self

    @property
    def passed(self) -> bool:
        """Everything that was asked for was checked, and nothing was found."""
        return not self.differences and not self.blocked

    @property
    def exit_status(self) -> int:
        """0: nothing found; 1: differences; 2: none, but not everything could be checked."""
        return 1 if self.differences else 2 if self.blocked else 0

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "directory": str(self.directory),
            "deep": self.deep,
            "passed": self.passed,
            "differences": self.differences,
            "findings": [finding.as_json() for finding in self.findings],
            "counts": self.counts,
            "compared": self.compared,
            "unchecked": self.unchecked,
            "blocked": self.blocked,
            "seconds": round(self.seconds, 3),
        }
