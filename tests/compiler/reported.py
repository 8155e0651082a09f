"""Collects what an engine reports."""

from __future__ import annotations

from collections import Counter
from typing import Any

from chatmill.compiler.engines.executor import EventKind, ExecutorEvent


class Seen:
    """Receipts by job, and events in order."""

    def __init__(self) -> None:
        self.receipts: dict[int, Any] = {}
        self.events: list[ExecutorEvent] = []

    def done(self, index: int, receipt: Any) -> None:
        assert index not in self.receipts, "a job was reported twice"
        self.receipts[index] = receipt

    def kinds(self) -> Counter[EventKind]:
        return Counter(event.kind for event in self.events)
