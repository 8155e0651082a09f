"""Enters into the ledger what became of the tokens and records of one batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from chatmill.compiler.run_sums import sum_lengths, sum_rows
from chatmill.core.ledger import Ledger
from chatmill.core.shared_rows import SharedRows
from chatmill.pack.overflow import OverflowResult
from chatmill.pack.trees import Trees


def account(
    ledger: Ledger,
    names: Sequence[str],
    codes: NDArray[np.int64],
    rows: SharedRows,
    run_weights: NDArray[np.float32],
    fitted: OverflowResult,
) -> None:
    """Enter every rendered token and every injected one under its fate."""
    tokens = rows.merged
    rendered = sum_rows(rows, tokens.run_lengths, run_weights, codes, len(names))
    ledger.count_tokens(names, rendered.sum(axis=2), "rendered")
    kept = rendered
    if fitted.tokens is not tokens:
        kept = sum_lengths(tokens, fitted.kept_of_run, run_weights, codes, len(names))
        is_dropped = np.zeros(len(tokens), dtype=np.int64)
        is_dropped[fitted.dropped] = 1
        lost = tokens.run_lengths - fitted.kept_of_run
        by_drop = sum_lengths(tokens, lost, run_weights, 2 * codes + is_dropped, 2 * len(names))
        for fate, sums in (("cut", by_drop[0::2]), ("dropped", by_drop[1::2])):
            ledger.count_tokens(names, sums[:, :, 0], f"{fate}_context")
            ledger.count_tokens(names, sums[:, :, 1], f"{fate}_trained")
        made = fitted.tokens
        injected = np.where(fitted.injected_runs, made.run_lengths, 0)
        added = sum_lengths(made, injected, fitted.run_weights, codes[fitted.source_index], len(names))
        ledger.count_tokens(names, added.sum(axis=2), "injected")
    ledger.count_tokens(names, kept[:, :, 0], "context")
    ledger.count_tokens(names, kept[:, :, 1], "trained")


def account_trees(
    ledger: Ledger,
    names: Sequence[str],
    codes: NDArray[np.int64],
    rows: SharedRows,
    fitted: OverflowResult,
    trees: Trees,
) -> None:
    """Enter tokens that rows share as such, all but one of each, and what trees repeat as injected."""
    made, count = trees.tokens, len(names)
    row_codes, tree_codes = codes[fitted.source_index], codes[fitted.source_index[trees.first_row]]
    given, stored = (
        [sum_rows(one, np.where(of, one.own.run_lengths, 0), weights, own, count) for of in (~injected, injected)]
        for one, injected, weights, own in (
            (rows, fitted.injected_runs, fitted.run_weights, row_codes),
            (SharedRows.apart(made), trees.injected_runs, trees.run_weights, tree_codes),
        )
    )
    shared = given[0] - stored[0]
    for place, fate in enumerate(("context", "trained")):
        ledger.count_tokens(names, shared[:, :, place], f"shared_{fate}")
        ledger.count_tokens(names, -shared[:, :, place], fate)
    ledger.count_tokens(names, (stored[1] - given[1]).sum(axis=2), "injected")
    note(ledger, names, tree_codes, "branches", trees.branches.counts)
    note(ledger, names, tree_codes, "tokens_repeated_by_splits", trees.split_tokens)


def account_records(
    ledger: Ledger, names: Sequence[str], own: NDArray[np.int64], dropped: NDArray[np.bool_], reason: str
) -> None:
    """Enter every record that was rendered: the code of its source, and whether overflow left nothing of it."""
    for fate, why, found in (("skipped", reason, own[dropped]), ("built", "", own[~dropped])):
        for code, count in enumerate(np.bincount(found, minlength=len(names)).tolist()):
            if count:
                ledger.records[names[code], fate, why] += count


def note(ledger: Ledger, names: Sequence[str], codes: NDArray[np.int64], what: str, counts: NDArray[np.int64]) -> None:
    """Add counts to what is noted of sources, whose codes are given."""
    sums = np.bincount(codes, weights=counts, minlength=len(names)) if len(codes) else np.zeros(len(names))
    for code, count in enumerate(sums.tolist()):
        if count:
            ledger.notes[names[code], what] += int(count)
