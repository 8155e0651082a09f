"""The ledger: where every record and token of a build went, by source, role and reason, and that it balances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import role_name
from chatmill.errors import FormatError

TOKEN_FATES = (
    *("trained", "context", "cut_trained", "cut_context", "dropped_trained", "dropped_context"),
    *("shared_trained", "shared_context", "injected"),
)
"""What became of tokens: all but the last add up to what was rendered; `injected` was added on top.

Those that are shared are in another row of their tree too, and are stored there."""
FATES = ("trained", "context", "cut", "dropped", "shared", "injected", "padding")
"""The same in short, in the order in which they are shown: whatever the tokens were that were cut or dropped."""
FATE_NAMES = {fate: fate for fate in FATES} | {"injected": "repeated"}
"""What they are called where they are shown."""

LEFT_OUT = ("quarantined", "skipped")
"""Outcomes of records that were not built."""
LOST_REASONING, LOST_CONTENT, TRIMMED = "lost_reasoning", "lost_content", "trimmed_white_space"
LOST_CALLS, LOST_TOOLS = "lost_calls", "lost_tools"
"""Notes: characters of messages that no document shows, by what they are."""
HIDDEN_REASONING = "hidden_reasoning"
"""A note: characters of the reasoning of untrained answers that no document shows, as no prompt does."""
REASONING = "reasoning_characters"
"""A note: characters of the reasoning of all other answers, those that are lost included."""
REPAIRED = "repaired_"
"""Notes of records that a repair changed begin with this; its name follows."""

LOGPROBS_LEFT = "records_whose_logprobs_are_not_stored"
"""A note; `logprobs: true` in the recipe stores them."""

IN_ADDED_ROWS, SAVED_BY_TREES = "tokens_in_added_rows", "tokens_saved_by_trees"
"""Notes: stored tokens of rows besides the one of the whole conversation; those that trees have fewer than rows."""
NULLS_LEFT_OUT = "records_without_arrow_nulls"
"""A note: records of JSON that came out of Arrow, whose null fields are absent."""
CALLS_FAILED = "answers_whose_calls_failed"
"""A note: messages with a call whose result is an error, which the policy does not train."""
AS_SAMPLED = "answers_as_sampled"
"""A note: answers that are trained as a model writes them, which the template's history does not have."""
MIXED = "tokens_of_several_weights"
"""A note: tokens that cover parts of a message with different weights, and have the smallest."""
EMPTY_ANSWERS = "empty_answers"
"""A note: messages of the assistant without text, reasoning and calls, which train the end of the turn alone."""
WORTH_SAYING = 0.8
"""Trees that have fewer tokens than this share of the rows are worth a sentence."""
GROWN = 1.5
"""From so many times the conversations' own tokens on, all choices are named."""


@dataclass(slots=True)
class Ledger:
    """Counts that add up; all keys are tuples of strings, so that ledgers of chunks can be summed and stored."""

    tokens: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """(source, role, fate) -> tokens; the fate `rendered` is counted besides those of `TOKEN_FATES`."""
    records: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """(source, `read` | `built` | `skipped` | `quarantined`, reason) -> records."""
    notes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(source, note) -> count: episodes, repeated records, lost characters, untrained terminators, ..."""
    padding: int = 0
    """Places of packed rows that hold no token."""

    def add(self, other: Ledger) -> None:
        """Add the counts of another part of the build."""
        self.tokens.update(other.tokens)
        self.records.update(other.records)
        self.notes.update(other.notes)
        self.padding += other.padding

    def count_tokens(self, sources: Sequence[str], sums: NDArray[np.int64], fate: str) -> None:
        """Add tokens of one fate: `sums[source, role]` of them."""
        for source, role in np.argwhere(sums).tolist():
            self.tokens[sources[source], role_name(role), fate] += int(sums[source, role])

    def total(self, fate: str) -> int:
        """Count tokens of one fate over all sources and roles."""
        return sum(count for (_, _, name), count in self.tokens.items() if name == fate)

    def fates(self) -> dict[str, int]:
        """Tokens over all sources and roles by fate, and the padding; shared ones only if there are any."""
        sums = dict.fromkeys(FATES, 0) | {"padding": self.padding}
        for (_, _, fate), count in self.tokens.items():
            if fate in TOKEN_FATES:
                sums[fate.split("_")[0]] += count
        return {fate: count for fate, count in sums.items() if count or fate != "shared"}

    def total_records(self, outcome: str) -> int:
        """Count records of one outcome over all sources and reasons."""
        return self.reasons(outcome).total()

    def reasons(self, *outcomes: str) -> Counter[str]:
        """Count records of the outcomes by reason, over all sources."""
        sums: Counter[str] = Counter()
        for (_, outcome, reason), count in self.records.items():
            if outcome in outcomes:
                sums[reason] += count
        return sums

    def total_notes(self, note: str) -> int:
        """Sum one note over all sources."""
        return self.all_notes()[note]

    def all_notes(self) -> Counter[str]:
        """Sum every note over all sources."""
        sums: Counter[str] = Counter()
        for (_, note), count in self.notes.items():
            sums[note] += count
        return sums

    def by_source(self) -> dict[str, Ledger]:
        """Split tokens and records by source, sorted by name."""
        ledgers: dict[str, Ledger] = {}
        for key, count in self.tokens.items():
            ledgers.setdefault(key[0], Ledger()).tokens[key] = count
        for key, count in self.records.items():
            ledgers.setdefault(key[0], Ledger()).records[key] = count
        return dict(sorted(ledgers.items()))

    @property
    def in_documents(self) -> int:
        """Tokens of the dataset."""
        return self.total("trained") + self.total("context") + self.total("injected")

    @property
    def stored(self) -> int:
        """Tokens of the dataset, and the padding of its packed rows."""
        return self.in_documents + self.padding

    def cost_of_turns(self) -> str:
        """Compare the tokens of conversations, rows per turn and trees in words; empty if rows add none.

        Tokens are those that are stored, or would be: what overflow cut or dropped costs nothing.
        """
        notes = self.all_notes()
        is_tree = self.total("shared_context") + self.total("shared_trained") > 0
        rows = self.in_documents + (notes[SAVED_BY_TREES] if is_tree else 0)
        trees = rows - notes[SAVED_BY_TREES]
        conversations = rows - notes[IN_ADDED_ROWS]
        if not conversations or rows == conversations:
            return ""
        as_rows = f"{rows:,} tokens, {rows / conversations:.2f} times the {conversations:,} of the conversations"
        as_trees = f"{trees:,} ({trees / conversations:.2f} times)"
        if is_tree:
            return f"As rows per turn these trees would be {as_rows}; stored are {as_trees}."
        added = f"Later messages change earlier answers, so {notes['rows_added']:,} rows are added"
        sentence = f"{added}: rows per turn are {as_rows}"
        if trees < WORTH_SAYING * rows:
            sentence += f"; as trees (--expand tree), which train the same, {as_trees}"
        if rows >= GROWN * conversations:
            sentence += (
                f"; --expand last (the last answers alone) and none (answers as changed) store {conversations:,}"
            )
        return f"{sentence}."

    @property
    def trained_lost(self) -> int:
        """Trained tokens that overflow cut or dropped."""
        return self.total("cut_trained") + self.total("dropped_trained")

    def imbalance(self, stored: int | None = None) -> list[str]:
        """Describe every account that does not balance; empty if all do.

        `stored`: tokens counted in the files, padding included.
        """
        problems: list[str] = []
        if stored is not None and stored != self.stored:
            problems.append(f"{stored:,} tokens stored, {self.stored:,} accounted for")
        for source, role in sorted({key[:2] for key in self.tokens}):
            rendered = self.tokens[source, role, "rendered"]
            parts = sum(self.tokens[source, role, fate] for fate in TOKEN_FATES if fate != "injected")
            if rendered != parts:
                problems.append(f"{source}/{role}: {rendered:,} tokens rendered, {parts:,} accounted for")
        outcomes: dict[str, Counter[str]] = {}
        for (source, outcome, _), count in self.records.items():
            outcomes.setdefault(source, Counter())[outcome] += count
        for source, counts in sorted(outcomes.items()):
            if counts["read"] != counts["built"] + counts["skipped"] + counts["quarantined"]:
                problems.append(f"{source}: records {dict(counts)} do not add up")
        return problems

    def as_json(self) -> dict[str, Any]:
        """Nested plain objects, keys sorted; `from_json` reads them back."""
        return {
            "tokens": _nested(self.tokens),
            "records": _nested(self.records),
            "notes": _nested(self.notes),
            "padding": self.padding,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ledger:
        """Return the ledger that `as_json` wrote."""
        try:
            return cls(
                tokens=Counter(_flat(data["tokens"], 3)),
                records=Counter(_flat(data["records"], 3)),
                notes=Counter(_flat(data["notes"], 2)),
                padding=int(data["padding"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise FormatError(f"not a ledger: {error!r}") from None


def stored_records_read(data: Mapping[str, Any]) -> int:
    """Count the records read in what `Ledger.as_json` wrote.

    The driver of a build asks for each chunk, and making a ledger of all counts would take it longer.
    """
    total = 0
    for outcomes in data["records"].values():
        total += sum(outcomes.get("read", {}).values())
    return total


def _nested(counter: Counter[Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, count in sorted(counter.items()):
        if count:
            place = out
            for part in key[:-1]:
                place = place.setdefault(part, {})
            place[key[-1]] = count
    return out


def _flat(nested: Mapping[str, Any], depth: int) -> dict[Any, int]:
    if depth == 1:
        return {(key,): int(count) for key, count in nested.items()}
    return {(key, *rest): count for key, inner in nested.items() for rest, count in _flat(inner, depth - 1).items()}
