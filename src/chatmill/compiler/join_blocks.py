"""Joins the parts of all chunks into blocks: the episodes of a split are planned at once, and copied row by row."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.compiler.faults import fault_point
from chatmill.compiler.recipe import Recipe
from chatmill.core.tokens import offsets_of
from chatmill.pack.assemble import assemble_rows
from chatmill.pack.plan import Plan, plan
from chatmill.store.block_writer import BlockWriter
from chatmill.store.episode_shard import EpisodeShard
from chatmill.store.episodes import EpisodeDataset

SLICE_TOKENS = 2 << 20
"""Tokens that are copied at a time; bounds the memory."""


def join_blocks(recipe: Recipe, parts: Sequence[Path], out: Path, split: str, pad_id: int) -> dict[str, Any]:
    """Plan all episodes of the split at once, then copy them row by row from the parts' files."""
    capacity = recipe.packing.max_length
    assert capacity is not None
    reader = _Gatherer(parts, split, has_kinds=recipe.keep_kinds)
    lengths = reader.lengths()
    planned = plan(lengths, capacity, recipe.packing.packing_strategy)
    rows_per_shard = max(1, recipe.shard_tokens // capacity)
    fractional = reader.weights_dtype == np.float32
    with BlockWriter(
        out, split, capacity=capacity, pad_id=pad_id, rows_per_shard=rows_per_shard, fractional=fractional
    ) as writer:
        step = max(1, SLICE_TOKENS // capacity)
        for first in range(0, planned.bins, step):
            reader.append_rows(writer, planned, lengths, first, min(first + step, planned.bins), pad_id)
            fault_point("during_join")
    return {
        "rows": planned.bins,
        "documents": len(lengths),
        "tokens": int(lengths.sum(dtype=np.int64)),
        "padding": planned.bins * capacity - int(lengths.sum(dtype=np.int64)),
        "fill": planned.fill,
        "lower_bound": planned.lower_bound,
    }


class _Gatherer:
    """Reads episodes of all parts by their number in the split; a part is mapped only while it is read."""

    def __init__(self, parts: Sequence[Path], split: str, *, has_kinds: bool) -> None:
        self._shards: list[EpisodeShard] = []
        for part in parts:
            self._shards.append(EpisodeDataset(part, split).shard(0))
            self._shards[-1].release()
        self._firsts = offsets_of(np.array([shard.episodes for shard in self._shards], dtype=np.int64))
        fractional = any(shard.mask_dtype == np.float32 for shard in self._shards)
        self.weights_dtype = np.dtype(np.float32 if fractional else np.uint8)
        self._has_kinds = has_kinds

    def lengths(self) -> NDArray[np.int32]:
        """Tokens of every episode."""
        lengths = np.empty(int(self._firsts[-1]), dtype=np.int32)
        for shard, first in zip(self._shards, self._firsts.tolist(), strict=False):
            lengths[first : first + shard.episodes] = shard.index[:, 1]
            shard.release()
        return lengths

    def append_rows(
        self, writer: BlockWriter, planned: Plan, lengths: NDArray[np.int32], first: int, last: int, pad_id: int
    ) -> None:
        """Copy the episodes of some bins out of the parts and append them as rows."""
        chosen = planned.order[planned.bin_offsets[first] : planned.bin_offsets[last]]
        ids, weights, kinds = self._gather(chosen, lengths[chosen])
        local = Plan(
            order=np.arange(len(chosen), dtype=np.int64),
            bin_offsets=planned.bin_offsets[first : last + 1] - planned.bin_offsets[first],
            capacity=planned.capacity,
            strategy=planned.strategy,
            tokens=int(lengths[chosen].sum(dtype=np.int64)),
            lower_bound=planned.lower_bound,
        )
        columns: dict[str, tuple[NDArray[Any], float]] = {"weights": (weights, 0)}
        if kinds is not None:
            columns["kinds"] = (kinds, 0)
        rows = assemble_rows(local, ids, offsets_of(lengths[chosen]), pad_id, columns=columns)
        writer.append(
            rows.ids,
            rows.row_lengths,
            rows.start_values,
            rows.start_offsets,
            chosen,
            weights=rows.columns["weights"],
            kinds=rows.columns.get("kinds"),
        )

    def _gather(
        self, episodes: NDArray[np.int64], lengths: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[Any], NDArray[np.uint8] | None]:
        """Flat ids, weights and kinds of some episodes, in their order; read part by part."""
        places = offsets_of(lengths)
        ids = np.empty(int(places[-1]), dtype=np.int32)
        weights = np.empty(len(ids), dtype=self.weights_dtype)
        kinds = np.empty(len(ids), dtype=np.uint8) if self._has_kinds else None
        parts = np.searchsorted(self._firsts, episodes, side="right") - 1
        by_part = np.argsort(parts, kind="stable")
        borders = np.flatnonzero(np.diff(parts[by_part], prepend=-1, append=-1))
        for first, last in itertools.pairwise(borders.tolist()):
            chosen = by_part[first:last]
            part = int(parts[chosen[0]])
            shard = self._shards[part]
            spans = shard.index[episodes[chosen] - self._firsts[part]].tolist()
            sources = [(shard.token_ids, ids), (shard.mask, weights)]
            if kinds is not None:
                sources.append((shard.column("kinds"), kinds))
            for (start, length), place in zip(spans, places[chosen].tolist(), strict=True):
                for source, target in sources:
                    target[place : place + length] = source[start : start + length]
            del sources
            shard.release()
        return ids, weights, kinds
