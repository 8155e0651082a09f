"""The ledger of a build in words: what was left out, and a table of where every token of every source went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chatmill.console import plain_table
from chatmill.core.conversations import RECORD_WEIGHT, UNUSED, unused_sentence
from chatmill.core.ledger import (
    AS_SAMPLED,
    CALLS_FAILED,
    EMPTY_ANSWERS,
    FATE_NAMES,
    HIDDEN_REASONING,
    LEFT_OUT,
    LOGPROBS_LEFT,
    LOST_CALLS,
    LOST_CONTENT,
    LOST_REASONING,
    LOST_TOOLS,
    MIXED,
    NULLS_LEFT_OUT,
    REASONING,
    TRIMMED,
    Ledger,
)
from chatmill.core.part_training import speaks_of_training
from chatmill.core.words import counted
from chatmill.look.safe_text import visible

if TYPE_CHECKING:
    from rich.table import Table

LOST = {
    LOST_REASONING: "characters of reasoning",
    HIDDEN_REASONING: "characters of the reasoning of untrained answers",
    LOST_CONTENT: "characters of contents",
    LOST_CALLS: "characters of calls",
    LOST_TOOLS: "characters of tool definitions",
}
"""Notes about text that is lost, in words."""
SHOWN_REASONS = 8
WIDTH = 80
SHOWN_SOURCES = 20
"""Sources with a row of their own, or named in a sentence; a dataset may have as many sources as records."""
NOTES = {
    "untrained_terminators": "answers that are trained without their end: a model may not learn to stop",
    "turns_without_proof": "answers that are context, since their mask cannot be proved",
    MIXED: "tokens that cover parts of different weights, and have the smallest",
    AS_SAMPLED: "answers trained as a model writes them after their prompt: history has other text before or in them",
    EMPTY_ANSWERS: "answers that are empty: only the end of the turn is trained",
    "records_without_trained_tokens": "records that train nothing",
    "records_beyond_max_records": "records beyond max_records",
    LOGPROBS_LEFT: "records whose log-probabilities are not stored (logprobs: true stores them)",
    "sampled_otherwise": "sampled answers that the tokenizer gives other tokens for",
    "sampled_differ": "sampled answers whose tokens say something else than their text",
    "prompts_differ": "prompts that were sent and are not the ones that the template renders",
    "calls_apart": "calls whose history was rewritten: rows, or branches of a tree",
    NULLS_LEFT_OUT: "records that came out of Arrow: their null fields are read as absent",
    CALLS_FAILED: "answers that are not trained, since the result of a call of theirs is an error",
    "rows_added": "documents added, because later messages change earlier turns",
    "turns_that_later_messages_change": "answers that later messages change",
    "tokens_repeated_by_splits": "tokens repeated, since trees that are too long are several",
    **{note: f"{words} that are in no document" for note, words in LOST.items()},
}
"""Notes in words; others are shown by their names."""
QUIET_NOTES = (
    *("episodes", "tokens_in_added_rows", "tokens_saved_by_trees", "branches", "stops_appended"),
    *(REASONING, TRIMMED, "sampled_messages", "prompts_compared", "calls_joined"),
)
"""Notes that say nothing about a loss."""
WARNINGS = ("untrained_terminators", "turns_without_proof", "records_without_trained_tokens", *LOST)
"""Notes about what is not trained as it should be, or not shown."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Something that a build did not train, or that is worth a look."""

    words: str
    count: int
    is_warning: bool = True
    """False: the template or the recipe wants it so, or it does no harm."""
    code: str = ""
    """The reason, the fate or the note that is counted; empty for several together."""


def losses(ledger: Ledger, *, fields: bool = True) -> list[Loss]:
    """List what was left out, cut or is worth a look. `fields`: also fields that nothing reads."""
    ordered = ledger.reasons(*LEFT_OUT).most_common()
    listed = [Loss(f"records left out: {reason}", count, code=reason) for reason, count in ordered[:SHOWN_REASONS]]
    if len(ordered) > SHOWN_REASONS:
        listed.append(Loss("records left out for other reasons", sum(count for _, count in ordered[SHOWN_REASONS:])))
    fates = ledger.fates()
    listed += [Loss(f"tokens {fate} by overflow", fates[fate], code=fate) for fate in ("cut", "dropped") if fates[fate]]
    if lost := ledger.trained_lost:
        listed.append(Loss("trained tokens lost by overflow", lost))
    if fates["injected"]:
        words = "tokens repeated for windows or branches, untrained"
        listed.append(Loss(words, fates["injected"], is_warning=False, code="injected"))
    for note, count in sorted(ledger.all_notes().items()):
        is_field = note.startswith(UNUSED)
        if count and note not in QUIET_NOTES and (fields or not is_field):
            words = NOTES.get(note, note.replace("_", " "))
            if is_field and speaks_of_training(note.removeprefix(UNUSED)):
                words += f" ({RECORD_WEIGHT})"
            if note in LOST and len(named := _by_source(ledger, note)) > 1:
                words += f" ({', '.join(named)})"
            listed.append(Loss(words, count, is_warning=note in WARNINGS, code=note))
    return listed


def _by_source(ledger: Ledger, note: str) -> list[str]:
    """Return the sources that have a note, with its count: all of them by name, or the largest and how many more."""
    counts = Counter({source: count for (source, name), count in ledger.notes.items() if name == note and count})
    largest = counts.most_common(SHOWN_SOURCES)
    named = [f"{source} {count:,}" for source, count in (sorted(largest) if len(counts) == len(largest) else largest)]
    return named if len(counts) == len(largest) else [*named, f"{len(counts) - len(largest):,} more sources"]


def build_lines(manifest: dict[str, Any], directory: str) -> Iterator[tuple[str, bool]]:
    """Describe a build besides its table, line by line, each with whether it is worth a look.

    How full packed rows are, what was left out, repaired or lost, what added rows cost, and unused fields.
    """
    ledger = Ledger.from_json(manifest["ledger"])
    length = (manifest["recipe"].get("pack") or {}).get("length")
    for name, split in manifest["splits"].items():
        if length is not None and "rows" in split:
            rows = f"{split['episodes']:,} episodes in {split['rows']:,} rows of {length:,} tokens"
            bound = f"no packing needs fewer than {split['lower_bound']:,} rows"
            yield f"{visible(name)}: {rows}, {split['fill']:.2%} full ({bound})", False
    for loss in losses(ledger, fields=False):
        yield f"{visible(loss.words)}: {loss.count:,}", loss.is_warning
    if ledger.total_records("quarantined"):
        yield f"Those in quarantine are in {directory}/rejected.jsonl", True
    if cost := ledger.cost_of_turns():
        yield cost, "--expand" in cost
    notes = ledger.all_notes().items()
    if unused := {name.removeprefix(UNUSED): count for name, count in notes if name.startswith(UNUSED)}:
        yield visible(unused_sentence(unused)), True


def source_rows(ledger: Ledger) -> list[tuple[str, Ledger]]:
    """Return the rows of a table of sources, each with its name and its ledger.

    All sources by name, or the largest ones and the others together; then all of them, if there are several.
    """
    parts = ledger.by_source()
    rows = list(parts.items())
    if len(parts) > SHOWN_SOURCES:
        rows.sort(key=lambda row: (-row[1].total("rendered"), -row[1].total_records("read"), row[0]))
        others = Ledger()
        for _, part in rows[SHOWN_SOURCES:]:
            others.add(part)
        rows[SHOWN_SOURCES:] = [(counted(len(parts) - SHOWN_SOURCES, "other source"), others)]
    return [*rows, ("all", ledger)] if len(parts) > 1 else rows


def accounts_table(ledger: Ledger) -> Table:
    """Make a table of the sources: records, and what became of the rendered tokens."""
    fates = [fate for fate in ledger.fates() if fate != "padding"]
    table = plain_table("source", right=("records", "left out", *(FATE_NAMES[fate] for fate in fates)))
    # A cut name says nothing where many begin alike.
    table.columns[0].overflow = "fold"
    parts = source_rows(ledger)
    rows = [(visible(name), *_cells(part, fates)) for name, part in parts]
    for row, (_, part) in zip(rows, parts, strict=True):
        table.add_row(*row, style="bold" if part is ledger else None)

    # One space between columns where two would fold the names of sources at 80 columns.
    headers = [str(column.header) for column in table.columns]
    widths = [max(map(len, cells)) for cells in zip(headers, *rows, strict=True)]
    if sum(widths) + 2 * (len(widths) - 1) > WIDTH:
        table.padding = (0, 1, 0, 0)
    table.caption = f"padding: {ledger.padding:,} tokens" if ledger.padding else None
    return table


def _cells(ledger: Ledger, fates: list[str]) -> list[str]:
    tokens = ledger.fates()
    counts = (ledger.total_records("built"), ledger.reasons(*LEFT_OUT).total(), *(tokens.get(f, 0) for f in fates))
    return [f"{count:,}" for count in counts]
