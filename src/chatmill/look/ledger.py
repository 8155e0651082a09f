"""The ledger of a build as a table: where every token of every source went."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.table import Table

from chatmill.console import plain_table
from chatmill.core.conversations import UNUSED, unused_sentence
from chatmill.core.ledger import LEFT_OUT, Ledger
from chatmill.look.safe_text import visible


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
    for name, count in Ledger.from_json(manifest["ledger"]).all_notes().items():
        if name.startswith(UNUSED):
            found[name.removeprefix(UNUSED)] = count
    return visible(unused_sentence(found))


def ledger_table(manifest: dict[str, Any]) -> Table:
    """The ledger of a manifest."""
    return accounts_table(Ledger.from_json(manifest["ledger"]))


def accounts_table(ledger: Ledger) -> Table:
    """One row per source: records, and what became of the rendered tokens."""
    words = ("records", "left out", "trained", "context", "cut", "dropped", "repeated")  # those of the viewer
    table = plain_table("source", right=words)
    sources = ledger.by_source()
    for source, own in sources.items():
        table.add_row(visible(source), *_cells(own))
    if len(sources) > 1:
        table.add_row("all", *_cells(ledger), style="bold")
    table.caption = f"padding: {ledger.padding:,} tokens" if ledger.padding else None
    return table


def _cells(ledger: Ledger) -> list[str]:
    tokens = (count for fate, count in ledger.fates().items() if fate != "padding")
    counts = (ledger.total_records("built"), ledger.reasons(*LEFT_OUT).total(), *tokens)
    return [f"{count:,}" for count in counts]
