"""A built split, opened for a check, and the place of every value of it on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from chatmill.core.tokens import offsets_of
from chatmill.errors import FormatError
from chatmill.store.episode_layout import INDEX, MASK, TOKENS
from chatmill.store.episode_manifest import Per
from chatmill.store.episode_shard import EpisodeShard
from chatmill.store.episodes import EpisodeDataset


def open_split(directory: Path, split: str) -> EpisodeDataset:
    """A split whose sizes, index and layout are right; a `FormatError` says what is wrong."""
    dataset = EpisodeDataset(directory, split)
    for shard in dataset.shards:
        _refuse_gaps(shard)
        for name, spec in dataset.columns.items():  # looking at a column checks its size
            shard.column(name)
            if spec.offsets_file:
                shard.offsets(name)
    return dataset


def _refuse_gaps(shard: EpisodeShard) -> None:
    """A build writes episodes one after another."""
    starts, lengths = shard.index.astype(np.int64).T
    expected = offsets_of(lengths)
    wrong = np.flatnonzero(starts != expected[:-1])
    if len(wrong):
        row = int(wrong[0])
        raise FormatError(
            f"{shard.folder / INDEX}: record {row:,} (byte {row * 16:,}) starts at token {starts[row]:,}; the "
            f"episodes before it end at {expected[row]:,}"
        )
    if expected[-1] != shard.tokens:
        raise FormatError(
            f"{shard.folder / TOKENS}: {shard.tokens:,} tokens, and {INDEX} has {expected[-1]:,} in its episodes"
        )


def place_of(dataset: EpisodeDataset, number: int, column: str, token: int) -> tuple[Path, int]:
    """File and byte of one value: of `ids`, `weights`, `kinds`, or of a column of the episode itself."""
    shard_number = int(np.searchsorted(dataset.episode_offsets, number, side="right")) - 1
    shard = dataset.shards[shard_number]
    row = number - int(dataset.episode_offsets[shard_number])
    at = int(shard.index[row, 0]) + token
    if column == "ids":
        return shard.folder / TOKENS, at * 4
    if column == "length":
        return shard.folder / INDEX, row * 16 + 8
    if column == "weights":
        return shard.folder / MASK, at * (shard.mask_dtype.itemsize if shard.mask_dtype else 1)
    spec = dataset.columns.get(column)
    if spec is None:
        return shard.folder, 0
    if spec.offsets_file:
        return shard.folder / spec.offsets_file, row * 8
    return shard.folder / spec.file, (at if spec.per is Per.TOKEN else row) * np.dtype(spec.dtype).itemsize
