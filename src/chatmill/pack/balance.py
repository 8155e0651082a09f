"""The second objective of a plan: bins are put into batches so that attention is shared out evenly."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from chatmill.core.tokens import offsets_of, ranges
from chatmill.errors import DataError, member
from chatmill.pack.plan import Plan, whole


class Balance(StrEnum):
    """What is made even. The cost of a bin is the sum of its squared document lengths."""

    WITHIN_BATCHES = "within_batches"
    """The bins of one batch cost about the same: no worker waits for the one with the longest documents."""
    ACROSS_BATCHES = "across_batches"
    """All batches cost about the same: every step takes about the same time."""


def attention_cost(plan: Plan, lengths: ArrayLike) -> NDArray[np.float64]:
    """One value per bin: the sum of the squared lengths of its documents (each attends to itself alone)."""
    given = np.asarray(lengths)
    if given.shape != plan.order.shape:
        raise DataError(f"the plan is over {plan.documents} documents, and lengths has shape {given.shape}")
    if not plan.bins:
        return np.empty(0, dtype=np.float64)
    squares = given[plan.order].astype(np.float64) ** 2
    return np.add.reduceat(squares, plan.bin_offsets[:-1])


def balance(
    plan: Plan,
    lengths: ArrayLike,
    rows_per_batch: int,
    objective: Balance | str = Balance.WITHIN_BATCHES,
) -> Plan:
    """The same bins in another order, meant to be read as consecutive batches of `rows_per_batch` bins.

    Bins are sorted from the dearest to the cheapest (ties: their order in the plan); the cheapest
    `bins % rows_per_batch` are left for the last, smaller batch. `within_batches` cuts the sorted bins into
    batches. `across_batches` deals them out in `rows_per_batch` rounds: each batch gets one bin a round, the
    batch that is cheapest so far the dearest of them. Full batches are then in the order of their earliest
    bin, and the bins inside a batch in the order of the plan. Bins themselves are not changed.
    """
    chosen = member(Balance, "balance objective", objective)
    rows = whole(rows_per_batch, "rows_per_batch is a whole number, 1 or more")
    cost = attention_cost(plan, lengths)
    dearest_first = np.argsort(-cost, kind="stable")
    batches = plan.bins // rows
    full, rest = np.split(dearest_first, [batches * rows])
    dealt = full.reshape(batches, rows) if chosen is Balance.WITHIN_BATCHES else _dealt_out(full, cost, rows)
    dealt = np.sort(dealt, axis=1)
    dealt = dealt[np.argsort(dealt[:, 0])]
    return _reordered(plan, np.concatenate([dealt.ravel(), np.sort(rest)]))


def _dealt_out(bins: NDArray[np.int64], cost: NDArray[np.float64], rows: int) -> NDArray[np.int64]:
    """Batches x rows: in each round every batch gets one bin, the cheapest batch so far the dearest bin."""
    rounds = bins.reshape(rows, -1)
    dealt = np.empty_like(rounds)
    total = np.zeros(rounds.shape[1], dtype=np.float64)
    for number, dearest_first in enumerate(rounds):
        dealt[number, np.argsort(total, kind="stable")] = dearest_first
        total += cost[dealt[number]]
    return dealt.T


def _reordered(plan: Plan, bins: NDArray[np.int64]) -> Plan:
    """The plan with its bins in the given order."""
    sizes = np.diff(plan.bin_offsets)[bins]
    order = plan.order[ranges(plan.bin_offsets[bins], sizes)]
    return replace(plan, order=order, bin_offsets=offsets_of(sizes))
