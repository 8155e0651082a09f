"""Caps in tokens: how many rows of each shard fit, found by rendering them in order before the build begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from chatmill.core.texts import OptionalTexts
from chatmill.distill.input_shards import KDInput, Shard, shard_batches
from chatmill.distill.rows import KDBatch
from chatmill.errors import ConfigError

UNLIMITED = 2**62
Render = Callable[[OptionalTexts], KDBatch]


def cap_tokens(
    source: KDInput, render: Render, *, max_tokens: int | None = None, max_tokens_per_shard: int | None = None
) -> KDInput:
    """The input with only its first rows, in shard order, as long as their tokens stay within the caps.

    Rows are taken whole, and rows that fail have no tokens. This renders what a smoke build takes, once more than the
    build itself; which rows those are depends on neither workers nor chunks.
    """
    shards, left = [], max_tokens
    for shard in source.shards:
        cap = min(UNLIMITED if left is None else left, max_tokens_per_shard or UNLIMITED)
        rows, tokens = _rows_within(shard, render, cap) if cap else (0, 0)
        if left is not None:
            # A row that does not fit ends the build's input, even if a shorter one follows.
            left = left - tokens if rows == shard.taken or cap < left else 0
        shards.append(replace(shard, taken=rows))
    if not any(shard.taken for shard in shards):
        raise ConfigError("no row fits into the cap of tokens: the first one alone has more. Give a larger cap")
    return replace(source, shards=tuple(shards))


def _rows_within(shard: Shard, render: Render, cap: int) -> tuple[int, int]:
    """The first rows of a shard whose tokens are at most `cap`, and those tokens."""
    rows = tokens = 0
    for batch in shard_batches(shard, 0, shard.taken):
        rendered = render(batch.usable)
        lengths = np.zeros(len(batch.ids), dtype=np.int64)
        lengths[rendered.rows] = rendered.lengths
        sums = tokens + np.cumsum(lengths)
        fit = int(np.searchsorted(sums, cap, side="right"))
        if fit < len(lengths):
            return rows + fit, int(sums[fit - 1]) if fit else tokens
        rows, tokens = rows + fit, int(sums[-1])
    return rows, tokens
