"""Joins the parts of all chunks, in order, into the final dataset: episodes in shards, or blocks by one global plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.build.faults import fault_point
from chatmill.build.recipe import OutputFormat, Recipe
from chatmill.core.tokens import offsets_of
from chatmill.pack.assemble import assemble_rows
from chatmill.pack.plan import Plan, plan
from chatmill.store.block_writer import BlockWriter
from chatmill.store.episode_columns import EpisodeColumns
from chatmill.store.episode_shard import EpisodeShard
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.store.episodes import EpisodeDataset

SLICE_TOKENS = 2 << 20
"""Tokens that are copied at a time; bounds the memory of a join."""


class Join:
    """The growing dataset: parts are handed over as they are made, in any order, and joined in the order of chunks.

    Episodes are copied as soon as all parts before them are there, while other chunks are still at work. Blocks need
    the lengths of all episodes first, so they are planned and written in `finish`.
    """

    def __init__(self, recipe: Recipe, out: Path) -> None:
        """Join into the empty folder `out`."""
        self._recipe, self._out = recipe, out
        self._waiting: dict[int, tuple[Path, Sequence[str]]] = {}
        self._next = 0
        self._parts: dict[str, list[Path]] = {}
        self._writers: dict[str, EpisodeWriter] = {}

    def add(self, number: int, part: Path, splits: Sequence[str]) -> None:
        """Take the part of chunk `number`, which has these splits."""
        self._waiting[number] = part, splits
        while self._next in self._waiting:
            part, splits = self._waiting.pop(self._next)
            self._next += 1
            for split in splits:
                self._parts.setdefault(split, []).append(part)
                if self._recipe.format is OutputFormat.EPISODES:
                    append_part(self._writer(split), part, split)

    def _writer(self, split: str) -> EpisodeWriter:
        if split not in self._writers:
            self._writers[split] = EpisodeWriter(self._out, split, shard_tokens=self._recipe.shard_tokens)
        return self._writers[split]

    def finish(self, pad_id: int) -> dict[str, dict[str, Any]]:
        """Write what is left and close; what each split holds, for the manifest."""
        assert not self._waiting, f"chunk {self._next} was never handed over"
        if self._recipe.format is OutputFormat.BLOCKS:
            return {
                split: _join_blocks(self._recipe, self._parts[split], self._out, split, pad_id)
                for split in sorted(self._parts)
            }
        for writer in self._writers.values():
            writer.close()
        return {
            split: {"episodes": writer.episodes, "tokens": writer.tokens}
            for split, writer in sorted(self._writers.items())
        }

    def __enter__(self) -> Join:
        return self

    def __exit__(self, *error: object) -> None:
        for writer in self._writers.values():
            writer.abort()  # does nothing to one that is closed


def append_part(writer: EpisodeWriter, part: Path, split: str) -> None:
    """Copy all episodes of a part behind those that a writer has."""
    dataset = EpisodeDataset(part, split)
    shard = dataset.shard(0)
    for first, last in slices_of(dataset):
        ids, offsets, weights, kinds = columns_of(dataset, first, last)
        columns = EpisodeColumns(
            ids=ids,
            lengths=np.diff(offsets),
            mask=weights,
            kinds=kinds,
            source=shard.column("source")[first:last],
            turns=shard.column("turns")[first:last],
            trained=shard.column("trained")[first:last],
            record_id=shard.texts("record_id", first, last),
        )
        writer.append_columns(columns, dataset.source_names)
        del ids, weights, kinds, columns
        shard.release()  # pages of mapped files count as memory of this process
        fault_point("during_join")


def slices_of(dataset: EpisodeDataset) -> Iterator[tuple[int, int]]:
    """Ranges of episodes of a part that hold about `SLICE_TOKENS` tokens each."""
    ends = np.cumsum(dataset.lengths)
    first = 0
    while first < len(dataset):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + SLICE_TOKENS, side="right")))
        yield first, last
        first = last


def columns_of(
    dataset: EpisodeDataset, first: int, last: int
) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[Any], NDArray[np.uint8] | None]:
    """Flat ids, offsets, weights and kinds of consecutive episodes of a part (views of its files)."""
    shard = dataset.shard(0)
    lengths = shard.index[first:last, 1].astype(np.int64)
    start = int(shard.index[first, 0])
    tokens = slice(start, start + int(lengths.sum()))
    kinds = shard.column("kinds")[tokens] if "kinds" in dataset.columns else None
    return shard.token_ids[tokens], offsets_of(lengths), shard.mask[tokens], kinds


def _join_blocks(recipe: Recipe, parts: Sequence[Path], out: Path, split: str, pad_id: int) -> dict[str, Any]:
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
