"""The ledger of a build as a table: where every token of every source went."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.table import Table

from chatmill.console import plain_table
from chatmill.core.conversations import UNUSED, unused_sentence
from chatmill.look.safe_text import visible
from chatmill.look.stats import fates_of


def rows_lines(manifest: dict[str, Any]) -> list[str]:
    """How full the packed rows of each split are; nothing where the build does not pack."""
    length = (manifest["recipe"].get("pack") or {}).get("length")
    return [
        f"{visible(name)}: {held['episodes']:,} episodes in {held['rows']:,} rows of {length:,} tokens, "
        f"{held['fill']:.2%} full (no packing needs fewer than {held['lower_bound']:,} rows)"
        for name, held in manifest["splits"].items()
        if length is not None and "rows" in held
    ]


def unused_line(manifest: dict[str, Any]) -> str:
    """Fields of the input that are not used, in words; empty where there are none."""
    found: Counter[str] = Counter()
    for notes in manifest["ledger"]["notes"].values():
        found.update({name.removeprefix(UNUSED): n for name, n in notes.items() if name.startswith(UNUSED)})
    return visible(unused_sentence(found))


def ledger_table(manifest: dict[str, Any]) -> Table:
    """One row per source: records, and what became of the rendered tokens."""
    ledger = manifest["ledger"]
    words = ("records", "left out", "trained", "context", "cut", "dropped", "repeated")  # those of the viewer
    table = plain_table("source", right=words)
    totals: Counter[str] = Counter()
    for source in sorted({*ledger["records"], *ledger["tokens"]}):
        row = _row(ledger, source)
        totals.update(row)
        table.add_row(visible(source), *(f"{row[name]:,}" for name in _COLUMNS))
    if len(ledger["records"]) > 1:
        table.add_row("all", *(f"{totals[name]:,}" for name in _COLUMNS), style="bold")
    table.caption = f"padding: {ledger['padding']:,} tokens" if ledger["padding"] else None
    return table


_COLUMNS = ("built", "rejected", "trained", "context", "cut", "dropped", "injected")


def _row(ledger: dict[str, Any], source: str) -> Counter[str]:
    row: Counter[str] = Counter()
    records = ledger["records"].get(source, {})
    row["built"] = sum(records.get("built", {}).values())
    row["rejected"] = sum(records.get("quarantined", {}).values()) + sum(records.get("skipped", {}).values())
    row.update(fates_of({"tokens": {source: ledger["tokens"].get(source, {})}}))
    return row
