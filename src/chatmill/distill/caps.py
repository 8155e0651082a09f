"""Caps in rows and tokens: how many rows of each shard a build takes, in shard order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chatmill.compiler.pipeline import Pipeline
from chatmill.distill.input_shards import COLUMNS, KDInput, Shard
from chatmill.errors import ConfigError
from chatmill.read.files import parquet_batches
from chatmill.read.shapes import SYNTH_KD

UNLIMITED = 2**62


def cap_rows(source: KDInput, max_rows: int | None, max_rows_per_shard: int | None) -> KDInput:
    """The input with only its first rows; rows that fail are counted, too."""
    left, takes = max_rows or UNLIMITED, []
    for shard in source.shards:
        takes.append(min(shard.taken, max_rows_per_shard or UNLIMITED, left))
        left -= takes[-1]
    return source.taking(takes)


def cap_tokens(
    source: KDInput, pipeline: Pipeline, max_tokens: int | None, max_tokens_per_shard: int | None
) -> KDInput:
    """The input with only its first rows, in shard order, as long as their tokens stay within the caps.

    Rows are taken whole, and rows that fail have no tokens. This renders what a smoke build takes, once more than the
    build itself; which rows those are depends on neither workers nor chunks.
    """
    takes: list[int] = []
    left = max_tokens or UNLIMITED
    for shard in source.shards:
        cap = min(left, max_tokens_per_shard or UNLIMITED)
        rows, tokens = _rows_within(shard, pipeline, cap) if cap else (0, 0)
        # A row that does not fit ends the build's input, even if a shorter one follows.
        left = left - tokens if rows == shard.taken or cap < left else 0
        takes.append(rows)
    if not any(takes):
        raise ConfigError("no row fits into the cap of tokens: the first one alone has more. Give a larger cap")
    return source.taking(takes)


def _rows_within(shard: Shard, pipeline: Pipeline, cap: int) -> tuple[int, int]:
    """The first rows of a shard whose tokens are at most `cap`, and those tokens."""
    rows = tokens = 0
    for lengths in _lengths(shard, pipeline):
        sums = tokens + np.cumsum(lengths)
        fit = int(np.searchsorted(sums, cap, side="right"))
        if fit < len(lengths):
            return rows + fit, int(sums[fit - 1]) if fit else tokens
        rows, tokens = rows + fit, int(sums[-1])
    return rows, tokens


def _lengths(shard: Shard, pipeline: Pipeline) -> Iterator[NDArray[np.int64]]:
    """The tokens of every row, a batch at a time; 0 for one that fails."""
    from chatmill.read.rows import read_rows  # pyarrow takes its time

    first = 0
    for batch in parquet_batches(Path(shard.path), 0, shard.taken, columns=COLUMNS):
        batch_rows, _ = read_rows(batch, first=first, path="", source=shard.name, shape=SYNTH_KD)
        compiled = pipeline.compile(batch_rows)
        places = np.array([int(where.rpartition(" ")[2]) - first for where in batch_rows.wheres[:]], dtype=np.int64)
        lengths = np.zeros(batch.num_rows, dtype=np.int64)
        lengths[places[compiled.source_index]] = compiled.tokens.lengths
        yield lengths
        first += batch.num_rows
