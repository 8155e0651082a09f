"""Runs contestants side by side, alternating, and reports medians, spreads and ratios."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one contestant over all rounds."""

    seconds: tuple[float, ...]
    work: float
    """Units of work in one round (tokens, documents)."""

    @property
    def median(self) -> float:
        """Median seconds of a round."""
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float:
        """Units of work per second at the median."""
        return self.work / self.median

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return (max(self.seconds) - min(self.seconds)) / self.median

    def as_json(self) -> dict[str, Any]:
        """For a results file."""
        return {"seconds": list(self.seconds), "work": self.work, "median": self.median, "rate": self.rate}


def alternate(contestants: Mapping[str, tuple[Callable[[], Any], float]], *, rounds: int) -> dict[str, Timing]:
    """Time each contestant `rounds` times, taking turns; a contestant is (what to run, units of work in it)."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, (run, _work) in contestants.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(seconds=tuple(times), work=contestants[name][1]) for name, times in seconds.items()}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.system(),
    }


def options(description: str) -> argparse.ArgumentParser:
    """The options every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="less input and fewer rounds")
    return parser


def print_timings(title: str, timings: Mapping[str, Timing], *, unit: str, ours: str) -> None:
    """A table with rate, spread, and how many times faster `ours` is."""
    print(title)
    print(f"  {'':<34}{f'{unit}/s':>14}{'median s':>12}{'spread':>9}{f'{ours} is':>16}")
    for name, timing in timings.items():
        ratio = timing.median / timing.work / (timings[ours].median / timings[ours].work)
        faster = "" if name == ours else f"{ratio:.1f}x faster"
        print(f"  {name:<34}{timing.rate:>14,.0f}{timing.median:>12.3f}{timing.spread:>8.0%}{faster:>17}")


def dump(name: str, **values: Any) -> None:
    """One JSON object on standard output."""
    print(json.dumps({"benchmark": name, **machine(), **values}))
