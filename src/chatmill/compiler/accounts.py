"""Adds up what became of the tokens and records of one batch, and enters it into the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversations import Conversations
from chatmill.core.kinds import Part, RoleCode, parts_of, roles_of
from chatmill.core.ledger import SAVED_BY_TREES, Ledger
from chatmill.core.shared_rows import SharedRows
from chatmill.core.tokens import Tokens, offsets_of, segment_sums
from chatmill.pack.overflow import OverflowResult
from chatmill.pack.trees import Trees

Ints = NDArray[np.int64]
Weights = NDArray[np.float32]
ROLES = len(RoleCode)


class TurnSums(NamedTuple):
    """Counts of each conversation."""

    trained: Ints
    """Trained tokens."""
    turns: Ints
    """Messages of the assistant that have tokens."""
    unended: Ints
    """Those that are trained although their terminator is not, or is gone.

    A message that another one of the assistant follows at once (Harmony's analysis before the final answer) needs none.
    """
    endless: Ints
    """The same, such messages included."""


def sum_lengths(tokens: Tokens, lengths: Ints, weights: Weights, codes: Ints, count: int) -> Ints:
    """Lengths of runs, summed up by the code of their conversation, their role, and whether their weight is above 0.

    Codes are smaller than `count`; the result has the shape `(count, ROLES, 2)`.
    """
    places = np.repeat(codes * ROLES, np.diff(tokens.document_runs)) + roles_of(tokens.run_kinds)
    sums = np.bincount(2 * places + (weights > 0), weights=lengths, minlength=count * ROLES * 2)
    return sums.astype(np.int64).reshape(count, ROLES, 2)


def sum_rows(rows: SharedRows, weights: Weights, codes: Ints, count: int) -> Ints:
    """The same for all runs of rows that share some: each is trained in the rows that do not have it as repeated."""
    lengths = rows.own.run_lengths
    if rows.are_apart:
        return sum_lengths(rows.own, lengths, weights, codes, count)
    trained = sum_lengths(rows.merged, lengths * rows.unrepeated, weights, codes, count)
    repeated = lengths * (rows.times - rows.unrepeated)
    return trained + sum_lengths(rows.merged, repeated, np.zeros_like(weights), codes, count)


def sum_turns(tokens: Tokens, weights: Weights) -> TurnSums:
    """Sum up the runs of each conversation."""
    passed = offsets_of(np.where(weights > 0, tokens.run_lengths, 0))[tokens.document_runs]
    filled = np.flatnonzero(tokens.run_lengths)
    kinds = tokens.run_kinds[filled]
    place = np.flatnonzero(roles_of(kinds) == RoleCode.ASSISTANT)  # among the runs that are not empty
    if not len(place):
        nothing = np.zeros(len(tokens), dtype=np.int64)
        return TurnSums(np.diff(passed), nothing, nothing, nothing)
    run = filled[place]
    owners = np.repeat(np.arange(len(tokens)), np.diff(tokens.document_runs))[run]
    messages = tokens.run_messages[run]
    opens = np.ones(len(run), dtype=np.bool_)
    opens[1:] = (messages[1:] != messages[:-1]) | (owners[1:] != owners[:-1])
    first = np.flatnonzero(opens)
    trained = weights[run] > 0
    ended = trained & (parts_of(kinds[place]) == Part.TERMINATOR)
    endless = np.logical_or.reduceat(trained, first) & ~np.logical_or.reduceat(ended, first)
    owner = owners[first]
    goes_on = (place[first[1:]] == place[first[1:] - 1] + 1) & (np.diff(owner) == 0)
    unended = endless & ~np.append(goes_on, False)
    return TurnSums(
        np.diff(passed),
        np.bincount(owner, minlength=len(tokens)),
        *(np.bincount(owner, weights=flags, minlength=len(tokens)).astype(np.int64) for flags in (unended, endless)),
    )


def reasoning_of(batch: Conversations) -> Ints:
    """Count the characters of reasoning of each conversation, without answers that are context."""
    reasoning = batch.messages.reasoning
    counts = np.zeros(len(batch), dtype=np.int64)
    places = np.flatnonzero((reasoning.lengths > 0) & (batch.messages.weights != 0))
    np.add.at(counts, batch.owners(places), reasoning.take(places).characters())
    return counts


def empty_answers(batch: Conversations) -> Ints:
    """Answers of each conversation that hold nothing."""
    messages = batch.messages
    empty = (messages.roles == RoleCode.ASSISTANT) & (messages.contents.lengths == 0)
    empty &= (messages.reasoning.lengths == 0) & (messages.call_counts == 0) & ~messages.token_ids.present
    return segment_sums(empty, batch.offsets)


def account(
    ledger: Ledger,
    names: Sequence[str],
    codes: Ints,
    rows: SharedRows,
    run_weights: Weights,
    fitted: OverflowResult,
) -> tuple[Ints, Ints]:
    """Enter every rendered token and every injected one under its fate.

    Return the sums of those that are kept, and of the injected ones.
    """
    tokens = rows.merged
    rendered = sum_rows(rows, run_weights, codes, len(names))
    ledger.count_tokens(names, rendered.sum(axis=2), "rendered")
    kept, added = rendered, np.zeros_like(rendered)
    if fitted.tokens is not tokens:
        kept = sum_lengths(tokens, fitted.kept_of_run, run_weights, codes, len(names))
        is_dropped = np.zeros(len(tokens), dtype=np.int64)
        is_dropped[fitted.dropped] = 1
        lost = tokens.run_lengths - fitted.kept_of_run
        by_drop = sum_lengths(tokens, lost, run_weights, 2 * codes + is_dropped, 2 * len(names))
        for fate, sums in (("cut", by_drop[0::2]), ("dropped", by_drop[1::2])):
            ledger.count_tokens(names, sums[:, :, 0], f"{fate}_context")
            ledger.count_tokens(names, sums[:, :, 1], f"{fate}_trained")
        episodes = fitted.tokens
        injected = np.where(fitted.injected_runs, episodes.run_lengths, 0)
        added = sum_lengths(episodes, injected, fitted.run_weights, codes[fitted.source_index], len(names))
        ledger.count_tokens(names, added.sum(axis=2), "injected")
    ledger.count_tokens(names, kept[:, :, 0], "context")
    ledger.count_tokens(names, kept[:, :, 1], "trained")
    return kept, added


def account_trees(
    ledger: Ledger, names: Sequence[str], tree_codes: Ints, in_rows: tuple[Ints, Ints], trees: Trees
) -> None:
    """Enter all but one copy of each shared token as shared, and what trees repeat as injected.

    `in_rows` is what `account` has summed up for the rows that trees are made of.
    """
    lengths, is_injected = trees.tokens.run_lengths, trees.injected_runs
    kept, injected = (
        sum_lengths(trees.tokens, np.where(chosen, lengths, 0), trees.run_weights, tree_codes, len(names))
        for chosen in (~is_injected, is_injected)
    )
    shared = in_rows[0] - kept
    for place, fate in enumerate(("context", "trained")):
        ledger.count_tokens(names, shared[:, :, place], f"shared_{fate}")
        ledger.count_tokens(names, -shared[:, :, place], fate)
    ledger.count_tokens(names, (injected - in_rows[1]).sum(axis=2), "injected")
    note(ledger, names, tree_codes, "branches", trees.branches.counts)
    note(ledger, names, tree_codes, "tokens_repeated_by_splits", trees.split_tokens)


def note_saved_by_trees(
    ledger: Ledger, names: Sequence[str], codes: Ints, fitted: OverflowResult, in_rows: Ints, trees: Trees
) -> None:
    """Note how many tokens fewer than the rows that overflow left their trees have, or would have.

    `codes` has the source of each document before overflow, `in_rows` the tokens of each row that is left.
    """
    note(ledger, names, codes[fitted.source_index], SAVED_BY_TREES, in_rows)
    note(ledger, names, codes[fitted.source_index[trees.first_row]], SAVED_BY_TREES, -trees.tokens.lengths)


def account_records(ledger: Ledger, names: Sequence[str], codes: Ints, dropped: NDArray[np.bool_], reason: str) -> None:
    """Enter every rendered record by the code of its source, and by whether overflow dropped all of it."""
    for fate, why, chosen in (("skipped", reason, codes[dropped]), ("built", "", codes[~dropped])):
        for code, count in enumerate(np.bincount(chosen, minlength=len(names)).tolist()):
            if count:
                ledger.records[names[code], fate, why] += count


def note(ledger: Ledger, names: Sequence[str], codes: Ints, name: str, counts: Ints) -> None:
    """Add counts to a note, by the codes of their sources."""
    sums = np.bincount(codes, weights=counts, minlength=len(names)) if len(codes) else np.zeros(len(names))
    for code, count in enumerate(sums.tolist()):
        if count:
            ledger.notes[names[code], name] += int(count)
