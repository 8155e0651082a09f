"""The audit: on a sample of rows, what the fast path made is compared with what the official renderer makes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import first_difference, offsets_of
from chatmill.distill.input_shards import ShardRows
from chatmill.distill.rows import KDBatch
from chatmill.errors import ChatmillError, ConfigError
from chatmill.systems.synth_kd import OfficialRows

AUDIT_RATE = 1 / 200
PENDING = 256
"""Rows that wait to be compared, at most about so many."""
FIRST_ROWS = 64
"""Rows at the beginning of every shard that are always compared."""


class AuditError(ChatmillError, RuntimeError):
    """The fast path and the official renderer differ: nothing of the build can be trusted."""


def check_rate(rate: float) -> float:
    """The share of rows to compare: 0 (none at all) to 1 (all)."""
    if not 0 <= rate <= 1:
        raise ConfigError(f"audit is {rate}; it is the share of rows to compare, from 0 to 1 (0.005: 1 in 200)")
    return rate


def audited(first: int, count: int, rate: float) -> NDArray[np.bool_]:
    """Which of the rows `first`, `first + 1`, ... of a shard are compared; depends on nothing but the row's number.

    One row in each `1 / rate`, at a place that differs from one such stretch to the next; and the first rows.
    """
    if rate == 0:
        return np.zeros(count, dtype=np.bool_)
    rows = np.arange(first, first + count, dtype=np.uint64)
    period = np.uint64(max(1, round(1 / rate)))
    stretch = rows // period
    place = ((stretch * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)) % period
    chosen: NDArray[np.bool_] = (rows % period == place) | (rows < FIRST_ROWS)
    return chosen


class _Row(NamedTuple):
    """A row to compare: what it was, what the fast path made of it, and where it is, in words."""

    text: bytes | None
    ids: NDArray[np.int32]
    spans: NDArray[np.uint8]
    where: str


class Audit:
    """Compares chosen rows with what the official renderer makes of them, several at a time.

    Together they take less time: the tables of the official renderer stay in the processor's cache meanwhile.
    """

    def __init__(self, official: OfficialRows, rate: float) -> None:
        """`rate` is the share of rows that is compared."""
        self._official, self._rate = official, rate
        self._pending: list[_Row] = []
        self.rows = 0
        """Rows that were chosen."""

    def add(self, batch: KDBatch, rows: ShardRows) -> None:
        """Choose from a rendered batch; the first difference that is found is an `AuditError`."""
        chosen = np.flatnonzero(audited(rows.first, len(rows.ids), self._rate)[batch.rows])
        offsets = offsets_of(batch.lengths)
        for number in chosen.tolist():
            place = int(batch.rows[number])
            if place not in batch.official:
                own = slice(int(offsets[number]), int(offsets[number + 1]))
                where = f"{rows.where(place)}, record {rows.id_text(place)!r}"
                self._pending.append(_Row(rows.texts.raw(place), batch.ids[own].copy(), batch.spans[own].copy(), where))
        self.rows += len(chosen)
        if len(self._pending) >= PENDING:
            self.compare()

    def compare(self) -> None:
        """Compare what was chosen and not compared yet."""
        for row in self._pending:
            expected = self._official.render(row.text)
            for name, ours, theirs in (("id", row.ids, expected.ids), ("span", row.spans, expected.spans)):
                at = first_difference(ours, theirs)
                if at is not None:
                    raise AuditError(_sentence(name, at, ours, theirs, row.where))
        self._pending = []


def _sentence(name: str, at: int, ours: NDArray[Any], theirs: NDArray[Any], where: str) -> str:
    mine, official = (str(values[at]) if at < len(values) else "nothing" for values in (ours, theirs))
    return (
        f"{where}: {name} {at} is {mine}, the official renderer has {official} ({len(ours)} and {len(theirs)} tokens). "
        "The fast path is wrong here: report the row"
    )
