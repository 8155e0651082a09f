"""Long chats: what a token and a turn cost as the number of turns grows.

    python -m benchmarks.long_chats [--quick] [--json]

A turn is a user message and its answer. The same real exchanges (with changed words in every copy) are written as chats
of 2, 5, 10, 20, 40 and 80 turns; a chunk's whole work is timed on each file, in one process, taking turns. Both ends
hold the same text, so the time per token and the time per turn say the same thing twice: both must stay flat.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.builds import Bench, recipe_for
from benchmarks.harness import Report, WorkDiffersError, alternate, run_one
from benchmarks.inputs import changed_pairs, exchanges, records, work_folder, write_chats

TURNS = (2, 5, 10, 20, 40, 80)


def measure(*, quick: bool) -> Report:
    """Time per token and per turn for each length."""
    report = Report()
    count = 800 if quick else 24_000
    pairs = changed_pairs(exchanges(records()), count)
    with work_folder() as work:
        contestants: dict[str, Any] = {}
        tokens: dict[str, int] = {}
        for turns in TURNS:
            path = write_chats(work / f"{turns}.jsonl", pairs, turns)
            bench = Bench.of(recipe_for([path]), work / str(turns))
            tokens[str(turns)] = bench.compile_all()  # warms up
            contestants[str(turns)] = (bench.compile_all, tokens[str(turns)])
        if not all(made == tokens["2"] for made in tokens.values()):
            raise WorkDiffersError(f"the same exchanges gave other tokens in longer chats: {tokens}")
        timings = alternate(contestants, rounds=3 if quick else 7)
    short, long = timings["2"], timings["80"]
    per_round = sorted(b / a for a, b in zip(short.seconds, long.seconds, strict=True))
    report.measured(
        "80-turn chats / 2-turn, per token", short.rate / long.rate, "x", target="<= 1.3",
        ours=f"{1e9 / long.rate:.0f} ns", peer=f"{1e9 / short.rate:.0f} ns",
        detail=f"{len(per_round)} rounds: {per_round[0]:.2f}x to {per_round[-1]:.2f}x; "
        f"{tokens['2']:,} tokens in both, the same exchanges",
    )  # fmt: skip
    by_turn = {turns: timing.median / count * 1e6 for turns, timing in timings.items()}
    report.notes.append("microseconds a turn, by turns: " + ", ".join(f"{n}: {us:.0f}" for n, us in by_turn.items()))
    report.figures["timings"] = {turns: timing.as_json() for turns, timing in timings.items()}
    report.figures["microseconds_per_turn"] = by_turn
    return report


if __name__ == "__main__":
    sys.exit(run_one("long_chats", str(__doc__), measure))
