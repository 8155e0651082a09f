"""The comparison of two datasets, run once in a thread; what compares them is handed in."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import groupby, zip_longest
from typing import Any

import numpy as np

from chatmill.look.dataset import LookDataset
from chatmill.look.decoder import text_of
from chatmill.look.splits import LookLayout
from chatmill.look.viewer.opened import Background

OnProgress = Callable[[int, int], None]
"""Called with the records that are compared, and how many there are."""
Compare = Callable[[OnProgress], dict[str, Any]]
"""Gives the JSON form of `chatmill diff` for the two datasets, with the changed records to show."""
MOST_EQUAL = 4096
"""Tokens of an equal stretch that are shown."""


class Comparison(Background):
    """What the page of a comparison shows while it runs, and when it is done."""

    def __init__(self, compare: Compare, looks: Mapping[str, LookDataset]) -> None:
        super().__init__(self._compare)
        self._looks, self._given = looks, compare
        self._began = time.monotonic()
        self._progress = (0, 0)
        self._found: dict[str, Any] = {}

    def _compare(self) -> None:
        self._found = self._given(lambda *progress: setattr(self, "_progress", progress))

    def values(self, chosen: int) -> dict[str, Any]:
        """Return what the page shows: the progress, or sums, changed records and one of them line by line."""
        self.start()
        if not self.done:
            done, records = self._progress
            waiting = {"done": done, "records": records, "seconds": time.monotonic() - self._began}
            return {**waiting, "problem": self.problem, "refresh": 0 if self.problem else 1}
        changed = self._found["changed"]
        chosen = min(max(chosen, 0), max(len(changed) - 1, 0))
        record = changed[chosen] if changed else None
        return {
            "found": self._found,
            "chosen": chosen,
            "record": record,
            "pairs": self._pairs(record) if record else [],
        }

    def _pairs(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Put the lines of a record side by side: equal stretches, and what A and B have otherwise."""
        pairs: list[dict[str, Any]] = []
        at = 0
        for is_equal, group in groupby(record["lines"], key=lambda line: line["sign"] == " "):
            lines = list(group)
            if is_equal:
                pairs += [{"equal": line["tokens"], "text": self._equal(record, at, line["tokens"])} for line in lines]
            else:
                sides = ([self._with_text(line) for line in lines if line["sign"] == sign] for sign in "-+")
                pairs += [{"a": one, "b": other} for one, other in zip_longest(*sides)]
            at += sum(line["tokens"] for line in lines if line["sign"] != "+")
        return pairs

    def _with_text(self, line: dict[str, Any]) -> dict[str, Any]:
        decoder = self._looks["a" if line["sign"] == "-" else "b"].decoder
        return line if "text" in line else {**line, "text": text_of(np.asarray(line["ids"]), decoder)}

    def _equal(self, record: Mapping[str, Any], at: int, tokens: int) -> str:
        """Decode an equal stretch of episodes."""
        look = self._looks["a"]
        if not record["a"] or look.layout is not LookLayout.EPISODES:
            return ""
        split, number = record["a"]["place"]
        ids = look.splits[split].item(number).ids[at : at + min(tokens, MOST_EQUAL)]
        return text_of(ids, look.decoder)
