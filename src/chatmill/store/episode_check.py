"""Checking a split of episodes byte by byte: sizes and hashes against the manifest, columns against each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from chatmill.core.kinds import KINDS
from chatmill.errors import FormatError
from chatmill.store.checksums import file_problems
from chatmill.store.episode_shard import EpisodeShard
from chatmill.store.episodes import EpisodeDataset


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCheck:
    """What a check found; the split is sound when there are no problems."""

    episodes: int
    tokens: int
    files: int
    """Files whose hash was compared with the manifest; 0 without a manifest."""
    problems: tuple[str, ...]
    """One line each: the file, the place and the numbers."""


def check_episodes(dir: str | Path, split: str = "train") -> SplitCheck:
    """Read every byte of a split and report all that is wrong; a split that cannot be opened is one problem."""
    try:
        dataset = EpisodeDataset(dir, split)
    except FormatError as error:
        return SplitCheck(episodes=0, tokens=0, files=0, problems=(str(error),))
    problems = list(_hash_problems(dataset))
    for number in range(len(dataset.shards)):
        problems += _column_problems(dataset, dataset.shard(number))
    files = sum(len(shard.files) for shard in dataset.manifest.shards) if dataset.manifest else 0
    return SplitCheck(episodes=len(dataset), tokens=dataset.tokens, files=files, problems=tuple(problems))


def _hash_problems(dataset: EpisodeDataset) -> Iterator[str]:
    if dataset.manifest is None:
        return
    for shard in dataset.manifest.shards:
        yield from file_problems(dataset.folder / shard.name, shard.files)


def _column_problems(dataset: EpisodeDataset, shard: EpisodeShard) -> Iterator[str]:
    """Values that cannot be, and counts that do not fit the tokens they count."""
    if "kinds" in dataset.columns and (kinds := shard.column("kinds")).max(initial=0) >= KINDS:
        place = int(np.argmax(kinds >= KINDS))
        yield f"{shard.folder}: kinds: token {place:,} has the code {kinds[place]}; codes are below {KINDS}"
    if "source" in dataset.columns:
        codes, names = shard.column("source"), len(dataset.source_names)
        if codes.max(initial=0) >= max(names, 1):
            row = int(np.argmax(codes >= names))
            yield f"{shard.folder}: source: episode {row:,} has the code {codes[row]}; the manifest has {names} names"
    if dataset.has_masks:
        mask = shard.mask
        if mask.dtype.kind == "f" and not (np.isfinite(mask).all() and mask.min(initial=0) >= 0):
            yield f"{shard.folder}: mask.bin holds a weight that is negative or not finite"
        if "trained" in dataset.columns:
            yield from _trained_problems(shard)


def _trained_problems(shard: EpisodeShard) -> Iterator[str]:
    """The stored count of trained tokens against the mask, for all episodes in one pass over the mask."""
    stored = shard.column("trained")
    starts, lengths = shard.index.astype(np.int64).T
    chosen = np.zeros(shard.tokens + 1, dtype=np.int64)
    np.cumsum(shard.mask != 0, out=chosen[1:])
    counted = chosen[starts + lengths] - chosen[starts]
    for row in np.flatnonzero(counted != stored)[:5].tolist():
        yield f"{shard.folder}: trained: episode {row:,} says {stored[row]}, its mask has {counted[row]} tokens above 0"
