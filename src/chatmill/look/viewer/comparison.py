"""The comparison of two datasets, run once in a thread; what compares them is handed in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from chatmill.look.dataset import LookDataset
from chatmill.look.decoder import text_of
from chatmill.look.splits import LookLayout

OnProgress = Callable[[int, int], None]
"""Called with the records that are compared, and how many there are."""
Compare = Callable[[OnProgress], dict[str, Any]]
"""Gives the JSON form of `chatmill diff` for the two datasets, with the changed records to show."""
MOST_EQUAL = 4096
"""Tokens of an equal stretch that are shown."""


class Comparison:
    """A comparison that is not begun, running, done or failed."""

    def __init__(self, compare: Compare, looks: Mapping[str, LookDataset]) -> None:
        self._compare, self._looks = compare, looks
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self._progress = (0, 0)
        self._found: dict[str, Any] | None = None
        self._problem = ""

    def _run(self) -> None:
        try:
            self._found = self._compare(lambda done, of: setattr(self, "_progress", (done, of)))
        except Exception as error:  # any failure is reported: a page must not wait for ever
            self._problem = str(error) or type(error).__name__

    def values(self, chosen: int) -> dict[str, Any]:
        """What the page shows: how far it is, or sums, changed records and one of them line by line."""
        with self._lock:
            if self._thread is None:
                self._began = time.monotonic()
                self._thread = threading.Thread(target=self._run, name="compare", daemon=True)
                self._thread.start()
        found = self._found
        if found is None:
            done, records = self._progress
            seconds = time.monotonic() - self._began
            waiting = {"done": done, "records": records, "seconds": seconds, "problem": self._problem}
            return {**waiting, "refresh": 0 if self._problem else 1}
        changed = found["changed"]
        chosen = min(max(chosen, 0), max(len(changed) - 1, 0))
        record = changed[chosen] if changed else None
        return {"found": found, "chosen": chosen, "record": record, "pairs": self._pairs(record) if record else []}

    def _pairs(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The lines of a record side by side: what is equal, and what A and B have in its place."""
        pairs: list[dict[str, Any]] = []
        at = 0
        sides: dict[str, list[dict[str, Any]]] = {"a": [], "b": []}

        def flush() -> None:
            for i in range(max(map(len, sides.values()))):
                pairs.append({key: lines[i] if i < len(lines) else None for key, lines in sides.items()})
            sides["a"], sides["b"] = [], []

        for line in record["lines"]:
            if line["sign"] == " ":
                flush()
                pairs.append({"equal": line["tokens"], "text": self._equal(record, at, line["tokens"])})
                at += line["tokens"]
                continue
            key = "a" if line["sign"] == "-" else "b"
            if key == "a" and sides["b"]:
                flush()
            decoder = self._looks[key].decoder
            text = line["text"] if "text" in line else text_of(np.asarray(line["ids"]), decoder)
            sides[key].append({**line, "text": text})
            at += line["tokens"] if key == "a" else 0
        flush()
        return pairs

    def _equal(self, record: Mapping[str, Any], at: int, tokens: int) -> str:
        """The text of an equal stretch, of episodes."""
        look = self._looks["a"]
        if not record["a"] or look.layout is not LookLayout.EPISODES:
            return ""
        split, number = record["a"]["place"]
        ids = look.splits[split].item(number).ids[at : at + min(tokens, MOST_EQUAL)]
        return text_of(ids, look.decoder)
