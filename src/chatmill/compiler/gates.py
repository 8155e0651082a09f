"""Gates: limits on what a build may lose; a build that passes one of them is not published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chatmill.compiler.recipe import Gates
from chatmill.core.ledger import LOST_REASONING, REASONING, Ledger
from chatmill.core.words import counted
from chatmill.errors import ChatmillError

LEFT_OUT = "records_left_out"
ASKED_FOR = ("weight", "label_false", "where", "pick")
"""Reasons to skip records that a recipe names itself; such records are not left out by surprise."""
CHOICES = {
    LEFT_OUT: "Repair the records or the recipe",
    "max_lost_reasoning": (
        "Choose a template that shows reasoning; where it shows that of the last answer alone, expand: turns keeps the "
        "others"
    ),
}
"""What can be done about a gate, besides changing it."""
SHOWN = 240
"""Characters of the first example of a reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One limit, and what was found."""

    name: str
    limit: float
    found: float
    sentence: str
    """What was found, in words."""

    @property
    def passed(self) -> bool:
        """Whether the limit was kept."""
        return self.found <= self.limit


class GateError(ChatmillError, ValueError):
    """A build lost more than its recipe allows; the command line ends with exit status 3."""

    def __init__(
        self,
        failed: list[Gate],
        hint: str = "",
        named: Mapping[str, Sequence[str]] | None = None,
        reasons: str = "",
    ) -> None:
        """`hint` says what to do about it; `named` has the first records that each gate is about.

        `reasons` are those of the records that are left out, in lines.
        """
        self.names = [gate.name for gate in failed]
        lines = []
        for gate in failed:
            first = ", ".join((named or {}).get(gate.name, ()))
            records = f" (the first: {first})" if first else reasons if gate.name == LEFT_OUT else ""
            choice = f"{CHOICES[gate.name]}; or accept it" if gate.name in CHOICES else "To accept it"
            lines.append(
                f"gate {gate.name}: {gate.sentence}, the limit is {gate.limit:g}{records}\n"
                f"{choice}: --set gates.{gate.name}={_enough(gate)} (null turns the gate off)"
            )
        super().__init__("\n".join(lines) + (f"\n{hint}" if hint else ""))


def _enough(gate: Gate) -> str:
    """Return a limit that the build would pass: a share in hundredths, rounded up, or a count."""
    return f"{min(1.0, -(-gate.found * 100 // 1) / 100):g}" if isinstance(gate.found, float) else f"{gate.found}"


def left_out(ledger: Ledger) -> Counter[str]:
    """Count records that the recipe asks for but the dataset lacks, by reason."""
    reasons = ledger.reasons("quarantined", "skipped")
    return Counter({reason: count for reason, count in reasons.items() if reason not in ASKED_FOR})


def reason_lines(counts: Counter[str], firsts: Mapping[str, str]) -> str:
    """Reasons with their counts and the first record of each, a line for each; empty for none."""
    return "".join(
        f"\n  {reason} {count:,}" + (f", the first: {firsts[reason][:SHOWN]}" if reason in firsts else "")
        for reason, count in counts.most_common()
    )


def gates_of(gates: Gates, ledger: Ledger) -> list[Gate]:
    """Measure every gate that the recipe sets."""
    lost, trained = ledger.trained_lost, ledger.total("trained")
    untrained = ledger.total_notes("records_without_trained_tokens")
    unended = ledger.total_notes("untrained_terminators")
    left = left_out(ledger).total()
    records = left + ledger.total_records("built")
    unseen, reasoning = ledger.total_notes(LOST_REASONING), ledger.total_notes(REASONING)
    measured: dict[str, tuple[float, str]] = {
        "trained_tokens_lost": _share(lost, lost + trained, "trained tokens are lost", digits=4),
        "records_without_trained_tokens": (
            untrained,
            f"{counted(untrained, 'record')} train{'s' if untrained == 1 else ''} nothing",
        ),
        "untrained_terminators": (unended, f"{unended:,} trained turns have an end that is not trained"),
        LEFT_OUT: _share(left, records, "records are left out"),
        "max_lost_reasoning": _share(unseen, reasoning, "characters of reasoning are in no document"),
    }
    return [
        Gate(name=name, limit=limit, found=value, sentence=sentence)
        for name, (value, sentence) in measured.items()
        if (limit := getattr(gates, name)) is not None
    ]


def _share(part: int, whole: int, words: str, digits: int = 1) -> tuple[float, str]:
    share = part / whole if whole else 0.0
    return share, f"{part:,} of {whole:,} {words} ({share:.{digits}%})"


def check_gates(
    gates: Gates,
    ledger: Ledger,
    hint: str,
    named: Mapping[str, Sequence[str]] | None = None,
    firsts: Mapping[str, str] | None = None,
) -> None:
    """Raise if a gate fails; `hint` says what to do, `named` has the first records of each gate.

    `firsts` has the first record that was left out for each reason.
    """
    if failed := [gate for gate in gates_of(gates, ledger) if not gate.passed]:
        raise GateError(failed, hint, named, reason_lines(left_out(ledger), firsts or {}))
