"""The table of results: one row a figure, with its target and whether it was met; 80 columns wide."""

from __future__ import annotations

import operator
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass

WIDTH = 80
HOLDS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
UNITS: dict[str, Callable[[float], str]] = {
    "x": lambda value: f"{value:.2f}x" if value < 10 else f"{value:.1f}x",
    "s": lambda value: f"{value:.3f} s",
    "%": lambda value: f"{value:.3g}%",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure: what both sides did, and the value that a target speaks of."""

    what: str
    ours: str
    """Chatmill's figure, in words."""
    peer: str
    """The peer's, in words; empty if there is none."""
    value: float
    unit: str
    """x (times), s (seconds) or %."""
    target: str
    """Such as `>= 40`, in the same unit; empty if there is none."""
    detail: str = ""
    """Rounds, spread, and how the work was shown to be the same."""
    in_chart: bool = False
    """Whether the value is how many times faster Chatmill is than a tool that a user would pick instead."""

    @property
    def shown(self) -> str:
        """The value with its unit."""
        return UNITS[self.unit](self.value)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if not self.target:
            return None
        found = re.fullmatch(r"([<>]=?) ([\d.]+)", self.target)
        if found is None:
            raise ValueError(f"a target is a sign and a number such as '>= 40', not {self.target!r}")
        return HOLDS[found[1]](self.value, float(found[2]))

    @property
    def verdict(self) -> str:
        """`met`, `MISSED`, or nothing."""
        return {True: "met", False: "MISSED", None: ""}[self.met]


HEADER = f"{'what':<34}{'chatmill':>11}{'peer':>11}{'result':>9}{'target':>8} {'':<6}"


def print_rows(rows: Iterable[Row], *, details: bool = False, judged: bool = True) -> None:
    """The table; with `details` what stands after each row under it; verdicts only where they are `judged`."""
    print(HEADER.rstrip())
    print("-" * WIDTH)
    for row in rows:
        print(line_of(row, judged=judged))
        if details and row.detail:
            for part in row.detail.split("; "):
                print_note(part, bullet="   ")


def line_of(row: Row, *, judged: bool = True) -> str:
    """One row, 80 columns at most; a long name takes a line of its own."""
    name = f"{row.what:<34}" if len(row.what) <= 34 else f"{row.what}\n{'':<34}"
    verdict = row.verdict if judged else ""
    return f"{name}{row.ours:>11}{row.peer:>11}{row.shown:>9}{row.target:>8} {verdict:<6}".rstrip()


def print_note(text: str, *, bullet: str = "-") -> None:
    """A sentence under the table, wrapped."""
    print(textwrap.fill(text, WIDTH, initial_indent=f"{bullet} ", subsequent_indent=" " * (len(bullet) + 1)))
