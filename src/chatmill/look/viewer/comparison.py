"""The comparison of two datasets, run once in the background; what compares them is handed in."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from chatmill.look.viewer.background import Background

OnProgress = Callable[[int, int], None]
"""Called with the records that are compared, and how many there are."""
Compare = Callable[[OnProgress], dict[str, Any]]
"""Gives the JSON form of `chatmill diff` for the two datasets, with the changed records to show."""


class Comparison:
    """A comparison that is not begun, running, done or failed."""

    def __init__(self, compare: Compare) -> None:
        self._compare = compare
        self._work = Background(self._run, "compare")
        self._began = 0.0
        self._progress = (0, 0)
        self._found: dict[str, Any] | None = None

    def _run(self) -> None:
        self._began = time.monotonic()
        self._found = self._compare(self._note)

    def _note(self, done: int, of: int) -> None:
        self._progress = (done, of)

    def as_json(self) -> dict[str, Any]:
        """Sums, differences of the manifests, and one line for each changed record; or how long it has been running."""
        self._work.start()
        if self._work.problem:
            return {"done": False, "problem": self._work.problem}
        if self._found is None:
            done, of = self._progress
            seconds = time.monotonic() - self._began if self._began else 0.0
            return {"done": False, "problem": "", "seconds": seconds, "done_records": done, "records": of}
        brief = [{key: value for key, value in one.items() if key != "lines"} for one in self._found["changed"]]
        return {**self._found, "done": True, "changed": brief}

    def record(self, number: int) -> dict[str, Any] | None:
        """One changed record with its lines; None where there is none of that number."""
        changed = self._found["changed"] if self._found else []
        return changed[number] if 0 <= number < len(changed) else None
