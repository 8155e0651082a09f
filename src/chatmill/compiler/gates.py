"""Gates: limits on what a build may lose; a build that passes one of them is not published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chatmill.compiler.recipe import Gates
from chatmill.core.ledger import Ledger
from chatmill.errors import ChatmillError


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

    def __init__(self, failed: list[Gate], hint: str = "", named: Mapping[str, Sequence[str]] | None = None) -> None:
        """`hint` says what to do about it; `named` has the first records that each gate is about."""
        lines = []
        for gate in failed:
            first = ", ".join((named or {}).get(gate.name, ()))
            records = f" (the first: {first})" if first else ""
            lines.append(f"gate {gate.name}: {gate.sentence}, the limit is {gate.limit:g}{records}")
        super().__init__("; ".join(lines) + (f". {hint}" if hint else ""))


def gates_of(gates: Gates, ledger: Ledger) -> list[Gate]:
    """Every gate that the recipe sets, with what the ledger says."""
    lost, trained = ledger.trained_lost, ledger.total("trained")
    share = lost / (lost + trained) if lost + trained else 0.0
    untrained = ledger.total_notes("records_without_trained_tokens")
    unended = ledger.total_notes("untrained_terminators")
    quarantined = ledger.total_records("quarantined")
    found = {
        "trained_tokens_lost": (share, f"{lost:,} of {lost + trained:,} trained tokens are lost ({share:.4%})"),
        "records_without_trained_tokens": (untrained, f"{untrained:,} records train nothing"),
        "untrained_terminators": (unended, f"{unended:,} trained turns have an end that is not trained"),
        "records_quarantined": (quarantined, f"{quarantined:,} records are quarantined"),
    }
    return [
        Gate(name=name, limit=limit, found=value, sentence=sentence)
        for name, (value, sentence) in found.items()
        if (limit := getattr(gates, name)) is not None
    ]
