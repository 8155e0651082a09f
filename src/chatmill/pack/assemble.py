"""From a plan and ragged documents to packed rows: dense arrays, row lengths and document starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.gather import gathered
from chatmill.core.tokens import offsets_of
from chatmill.errors import ConfigError, DataError
from chatmill.pack.plan import Plan

Ints = NDArray[np.int64]
Values = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """B rows of `capacity` tokens, padded on the right; document `d` of row `r` starts at its start value."""

    ids: NDArray[np.int32]
    """B x capacity token ids."""
    row_lengths: Ints
    """Tokens in each row; what follows them is padding, whatever its id."""
    start_values: Ints
    """Where each document starts in its row, all rows after one another; the first of a row is 0."""
    start_offsets: Ints
    """B + 1 offsets into `start_values`."""
    documents: Ints
    """Index of each document, aligned with `start_values`."""
    columns: Mapping[str, Values] = field(default_factory=dict)
    """Further B x capacity arrays, aligned with `ids` token by token."""

    def __len__(self) -> int:
        return len(self.row_lengths)

    def starts(self, row: int) -> Ints:
        """The document starts of one row (a view)."""
        row = range(len(self))[row]
        return self.start_values[self.start_offsets[row] : self.start_offsets[row + 1]]


def assemble_rows(
    plan: Plan,
    ids: NDArray[np.int32],
    offsets: Ints,
    pad_id: int,
    *,
    columns: Mapping[str, tuple[Values, float]] | None = None,
    first: int = 0,
    last: int | None = None,
) -> PackedRows:
    """Copy the documents of the plan's bins `first .. last` (default: all) into rows.

    Document `d` is `ids[offsets[d]:offsets[d + 1]]`. `columns` maps a name to (values aligned with `ids`,
    value on padding).
    """
    rows = range(plan.bins)[first:last]
    if len(offsets) != plan.documents + 1:
        raise DataError(f"the plan is over {plan.documents} documents, and the offsets of {len(offsets) - 1}")
    chosen = plan.order[plan.bin_offsets[rows.start] : plan.bin_offsets[rows.stop]]
    lengths = offsets[chosen + 1] - offsets[chosen]
    start_offsets = plan.bin_offsets[rows.start : rows.stop + 1] - plan.bin_offsets[rows.start]
    ends = offsets_of(lengths)
    row_starts = ends[start_offsets]
    row_lengths = np.diff(row_starts)
    if len(rows) and int(row_lengths.max()) > plan.capacity:
        row = int(np.argmax(row_lengths))
        raise DataError(
            f"bin {rows[row]} has {row_lengths[row]} tokens and a capacity of {plan.capacity}: "
            "the offsets are not those of the lengths that were planned"
        )
    row_ends, tokens = start_offsets[1:], int(offsets[-1])  # behind the documents of a row comes its padding
    which = np.insert(np.zeros_like(chosen), row_ends, 1)
    starts = np.insert(offsets[chosen], row_ends, 0)
    counts = np.insert(lengths, row_ends, plan.capacity - row_lengths)

    def dense(name: str, values: Values, pad: float) -> Values:
        if values.shape != (tokens,):
            raise DataError(f"column {name!r} has shape {values.shape}, and the documents have {tokens} tokens")
        padding = np.full(plan.capacity, pad, dtype=values.dtype)
        return gathered([values, padding], which, starts, counts).reshape(len(rows), plan.capacity)

    return PackedRows(
        ids=dense("ids", np.asarray(ids, dtype=np.int32), pad_id),
        row_lengths=row_lengths,
        start_values=ends[:-1] - np.repeat(row_starts[:-1], np.diff(start_offsets)),
        start_offsets=start_offsets,
        documents=chosen,
        columns={name: dense(name, *given) for name, given in (columns or {}).items()},
    )


def iter_rows(
    plan: Plan,
    ids: NDArray[np.int32],
    offsets: Ints,
    pad_id: int,
    *,
    rows_at_a_time: int,
    columns: Mapping[str, tuple[Values, float]] | None = None,
) -> Iterator[PackedRows]:
    """The rows of `assemble_rows` in consecutive groups, where all rows at once would not fit in memory."""
    if rows_at_a_time < 1:
        raise ConfigError(f"rows_at_a_time is 1 or more, not {rows_at_a_time!r}")
    for first in range(0, plan.bins, rows_at_a_time):
        last = first + rows_at_a_time
        yield assemble_rows(plan, ids, offsets, pad_id, columns=columns, first=first, last=last)
