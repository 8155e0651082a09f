"""The ledger of a build in words: what was left out, and a table of where every token of every source went."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from chatmill.console import plain_table
from chatmill.core.conversations import UNUSED, unused_sentence
from chatmill.core.ledger import (
    EMPTY_ANSWERS,
    FATE_NAMES,
    HISTORY_CHANGED,
    HISTORY_ROWS,
    LEFT_OUT,
    LOGPROBS_LEFT,
    LOST_CALLS,
    LOST_CONTENT,
    LOST_REASONING,
    LOST_TOOLS,
    REASONING,
    REPAIRED,
    TRIMMED,
    Ledger,
)
from chatmill.look.safe_text import visible

LOST = {
    LOST_REASONING: "characters of reasoning",
    LOST_CONTENT: "characters of contents",
    LOST_CALLS: "characters of calls",
    LOST_TOOLS: "characters of tool definitions",
}
"""Notes about text that is lost, in words."""
SHOWN_REASONS = 8
NOTES = {
    "untrained_terminators": "answers that are trained without their end: a model may not learn to stop",
    "turns_without_proof": "answers that are context, since their mask cannot be proved",
    EMPTY_ANSWERS: "answers that are empty: only the end of the turn is trained",
    "records_without_trained_tokens": "records that train nothing",
    "records_beyond_max_records": "records beyond max_records",
    LOGPROBS_LEFT: "records whose log-probabilities are not stored (logprobs: true stores them)",
    "sampled_otherwise": "sampled answers that the tokenizer gives other tokens for",
    "sampled_differ": "sampled answers whose tokens say something else than their text",
    "prompts_differ": "prompts that were sent and are not the ones that the template renders",
    "calls_apart": "calls whose history was rewritten: rows, or branches of a tree",
    HISTORY_CHANGED: "messages that some answer is trained without, as `history` says",
    HISTORY_ROWS: "rows added, because answers have histories of their own",
    "rows_added": "sequences added, because later messages change earlier turns",
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


def losses(ledger: Ledger, *, fields: bool = True) -> list[Loss]:
    """What was left out, cut or is worth a look; empty when nothing was. `fields`: also those that are not used."""
    ordered = ledger.reasons(*LEFT_OUT).most_common()
    found = [Loss(f"records left out: {reason}", count) for reason, count in ordered[:SHOWN_REASONS]]
    if len(ordered) > SHOWN_REASONS:
        found.append(Loss("records left out for other reasons", sum(count for _, count in ordered[SHOWN_REASONS:])))
    fates = ledger.fates()
    found += [Loss(f"tokens {fate} by overflow", fates[fate]) for fate in ("cut", "dropped") if fates[fate]]
    if lost := ledger.trained_lost:
        found.append(Loss("trained tokens lost by overflow", lost))
    if fates["injected"]:
        found.append(Loss("tokens repeated for windows or branches, untrained", fates["injected"], is_warning=False))
    for note, count in sorted(ledger.all_notes().items()):
        is_field = note.startswith(UNUSED)
        if count and note not in QUIET_NOTES and (fields or not is_field):
            words = NOTES.get(note, note.replace("_", " "))
            found.append(Loss(words, count, is_warning=note in WARNINGS))
    return found


def rows_lines(manifest: dict[str, Any]) -> list[str]:
    """How full the packed rows of each split are; nothing where the build does not pack."""
    length = (manifest["recipe"].get("pack") or {}).get("length")
    return [
        f"{visible(name)}: {held['episodes']:,} episodes in {held['rows']:,} rows of {length:,} tokens, "
        f"{held['fill']:.2%} full (no packing needs fewer than {held['lower_bound']:,} rows)"
        for name, held in manifest["splits"].items()
        if length is not None and "rows" in held
    ]


def left_out_lines(manifest: dict[str, Any], directory: str) -> list[str]:
    """The records that are not in the dataset, by reason, and where they are listed."""
    ledger = Ledger.from_json(manifest["ledger"])
    found = ledger.reasons(*LEFT_OUT)
    if not found:
        return []
    words = ", ".join(f"{visible(reason)} {count:,}" for reason, count in found.most_common())
    listed = f"; those in quarantine are in {directory}/rejected.jsonl" if ledger.total_records("quarantined") else ""
    return [f"{found.total():,} records left out: {words}{listed}"]


def lost_lines(manifest: dict[str, Any]) -> list[str]:
    """Text of messages that no document shows: what it is, how much, and of which sources."""
    ledger = Ledger.from_json(manifest["ledger"])
    lines = []
    for note, words in LOST.items():
        per_source = {source: count for (source, name), count in sorted(ledger.notes.items()) if name == note and count}
        if per_source:
            listed = ", ".join(f"{visible(source)} {count:,}" for source, count in per_source.items())
            lines.append(f"Lost: {sum(per_source.values()):,} {words} are in no document ({listed})")
    if empty := ledger.total_notes(EMPTY_ANSWERS):
        lines.append(f"{empty:,} {NOTES[EMPTY_ANSWERS]}")
    return lines


def repaired_lines(manifest: dict[str, Any]) -> list[str]:
    """How many records each repair has changed."""
    notes = Ledger.from_json(manifest["ledger"]).all_notes()
    found = {name.removeprefix(REPAIRED): count for name, count in sorted(notes.items()) if name.startswith(REPAIRED)}
    words = ", ".join(f"{name} {count:,}" for name, count in found.items())
    return [f"Repaired records that the template refuses as they are: {words}"] if found else []


def unused_line(manifest: dict[str, Any]) -> str:
    """Fields of the input that are not used, in words; empty where there are none."""
    found: Counter[str] = Counter()
    for name, count in Ledger.from_json(manifest["ledger"]).all_notes().items():
        if name.startswith(UNUSED):
            found[name.removeprefix(UNUSED)] = count
    return visible(unused_sentence(found))


def ledger_table(manifest: dict[str, Any]) -> Table:
    """The ledger of a manifest."""
    return accounts_table(Ledger.from_json(manifest["ledger"]))


def accounts_table(ledger: Ledger) -> Table:
    """One row per source: records, and what became of the rendered tokens."""
    fates = [fate for fate in ledger.fates() if fate != "padding"]
    table = plain_table("source", right=("records", "left out", *(FATE_NAMES[fate] for fate in fates)))
    sources = ledger.by_source()
    for source, own in sources.items():
        table.add_row(visible(source), *_cells(own, fates))
    if len(sources) > 1:
        table.add_row("all", *_cells(ledger, fates), style="bold")
    table.caption = f"padding: {ledger.padding:,} tokens" if ledger.padding else None
    return table


def _cells(ledger: Ledger, fates: list[str]) -> list[str]:
    tokens = ledger.fates()
    counts = (ledger.total_records("built"), ledger.reasons(*LEFT_OUT).total(), *(tokens.get(f, 0) for f in fates))
    return [f"{count:,}" for count in counts]
