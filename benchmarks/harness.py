"""Runs Chatmill and a peer side by side, alternating; no ratio is given before both are shown to do the same work."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.table import Row, print_note, print_rows


class WorkDiffersError(AssertionError):
    """Chatmill and the peer did not do the same work: there is nothing to compare, and no ratio is printed."""


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
        return {
            "seconds": list(self.seconds),
            "work": self.work,
            "median": self.median,
            "rate": self.rate,
            "spread": self.spread,
        }


Contestants = Mapping[str, tuple[Callable[[], Any], float]]
"""By name: what to run, and the units of work in it."""


def alternate(contestants: Contestants, *, rounds: int) -> dict[str, Timing]:
    """Time each contestant `rounds` times, taking turns; every other round goes backwards, so that nobody is always
    the one who runs after somebody else.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        names = list(contestants)
        for name in names if number % 2 == 0 else reversed(names):
            run = contestants[name][0]
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(seconds=tuple(times), work=contestants[name][1]) for name, times in seconds.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Chatmill against one peer, per unit of work; `checked` says how the work was shown to be the same."""

    ours: Timing
    peer: Timing
    checked: str

    def __post_init__(self) -> None:
        if not self.checked:
            raise WorkDiffersError("nothing says that both sides did the same work")

    @property
    def faster(self) -> float:
        """How many times faster Chatmill is, of medians."""
        return self.ours.rate / self.peer.rate

    @property
    def round_ratios(self) -> tuple[float, ...]:
        """The same for each round."""
        pairs = zip(self.ours.seconds, self.peer.seconds, strict=True)
        return tuple(theirs / self.peer.work / (own / self.ours.work) for own, theirs in pairs)

    def as_json(self) -> dict[str, Any]:
        """For a results file."""
        return {
            "chatmill": self.ours.as_json(),
            "peer": self.peer.as_json(),
            "times_faster": self.faster,
            "times_faster_by_round": list(self.round_ratios),
            "checked": self.checked,
        }


def compare(contestants: Contestants, *, ours: str, check: Callable[[], str], rounds: int) -> dict[str, Comparison]:
    """Check first that all do the same work, then time them; `check` raises `WorkDiffersError` or says what is equal.

    Gives the comparison with each peer.
    """
    checked = check()
    timings = alternate(contestants, rounds=rounds)
    return {
        name: Comparison(ours=timings[ours], peer=timing, checked=checked)
        for name, timing in timings.items()
        if name != ours
    }


def require_equal(what: str, ours: Any, theirs: Any) -> None:
    """Refuse to go on when two columns (arrays or sequences) differ; the message names the first difference."""
    a, b = np.asarray(ours), np.asarray(theirs)
    if a.shape != b.shape:
        raise WorkDiffersError(f"{what}: Chatmill has shape {a.shape}, the peer {b.shape}")
    differs = np.flatnonzero((a != b).reshape(-1))
    if len(differs):
        at = int(differs[0])
        values = f"{a.reshape(-1)[at]} and {b.reshape(-1)[at]}"
        raise WorkDiffersError(f"{what}: {len(differs):,} of {a.size:,} values differ, first at {at}: {values}")


def flat(rows: Sequence[Sequence[int]], dtype: Any) -> NDArray[Any]:
    """Rows of a peer as one array."""
    return np.concatenate([np.asarray(row, dtype=dtype) for row in rows]) if rows else np.empty(0, dtype=dtype)


@dataclass(slots=True, kw_only=True)
class Report:
    """What one benchmark found."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    tables: list[str] = field(default_factory=list)
    """Lines of Markdown that show the figures."""

    def compared(
        self,
        what: str,
        comparison: Comparison,
        *,
        unit: str,
        target: str = "",
        as_cost: bool = False,
        in_chart: bool = True,
        note: str = "",
    ) -> None:
        """A row for a comparison: times faster, or (`as_cost`) Chatmill's time in times of the peer's."""
        ratios = comparison.round_ratios
        value = 1 / comparison.faster if as_cost else comparison.faster
        around = sorted(1 / ratio if as_cost else ratio for ratio in ratios)
        rounds = f"{len(around)} rounds: {around[0]:.2f}x to {around[-1]:.2f}x" if len(around) > 1 else ""
        ours, peer = comparison.ours, comparison.peer
        spreads = f"{unit} a second, median {ours.median:.3g} s and {peer.median:.3g} s"
        if len(around) > 1:
            spreads += f", spread {ours.spread:.0%} and {peer.spread:.0%}"
        self.rows.append(
            Row(
                what=what,
                ours=f"{si(ours.rate)}/s",
                peer=f"{si(peer.rate)}/s",
                value=value,
                unit="x",
                target=target,
                detail="; ".join(part for part in (rounds, spreads, comparison.checked, note) if part),
                in_chart=in_chart and not as_cost,
            )
        )
        self.figures[what] = comparison.as_json()

    def measured(
        self, what: str, value: float, unit: str, *, target: str = "", ours: str = "", peer: str = "", detail: str = ""
    ) -> None:
        """A row for a figure of its own, in seconds, times or percent."""
        self.rows.append(
            Row(what=what, ours=ours, peer=peer, value=value, unit=unit, target=target, detail=detail),
        )

    def as_json(self) -> dict[str, Any]:
        """For a results file."""
        return {"rows": [asdict(row) for row in self.rows], "notes": self.notes, "figures": self.figures}


def si(value: float) -> str:
    """A number with three figures and k, M or G."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g}"


def missing(*modules: str) -> list[str]:
    """Which of these modules are not installed."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


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
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="less input and fewer rounds")
    return parser


def run_one(
    name: str,
    description: str,
    measure: Callable[..., Report],
    argv: Sequence[str] | None = None,
    *,
    sizes: Mapping[str, tuple[int, str]] | None = None,
) -> int:
    """The command line of one benchmark: `measure(quick=...)` and its sizes (name: default and help), then a table or
    one JSON object; the exit status is 1 when the work differed.
    """
    parser = options(description)
    for option, (default, text) in (sizes or {}).items():
        parser.add_argument(f"--{option.replace('_', '-')}", type=int, default=None, help=f"{text} [{default:,}]")
    arguments = parser.parse_args(argv)
    chosen = {option: getattr(arguments, option) for option in sizes or {}}
    start = time.perf_counter()
    try:
        report = measure(quick=arguments.quick, **chosen)
    except WorkDiffersError as error:
        print(f"{name}: no ratio: {error}", file=sys.stderr)
        return 1
    seconds = time.perf_counter() - start
    if arguments.json:
        dump(name, quick=arguments.quick, seconds=seconds, **report.as_json())
        return 0
    if report.rows:
        print_rows(report.rows, details=True, judged=not arguments.quick)
    for line in report.tables:
        print(line)
    for note in report.notes:
        print_note(note)
    print(f"({seconds:.0f} s)")
    return 0


def dump(name: str, **values: Any) -> None:
    """One JSON object on standard output."""
    print(json.dumps({"benchmark": name, **machine(), **values}))
