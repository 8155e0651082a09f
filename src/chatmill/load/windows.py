"""`order: windows`: shards in a random order, cut into windows, with rows permuted and packed inside a window.

Each shard is read once an epoch, and only the shards of two windows are needed at a time. So a dataset that is larger
than the cache, or on a slow disk, is read at the speed of the store. The order depends on seed, epoch, lengths and the
size of a window alone: it is the same for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chatmill.files import remote
from chatmill.load.order import random_state
from chatmill.pack.plan import Strategy, plan

Ints = NDArray[np.int64]
ALL_BYTES = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """The rows of one epoch, and the windows of shards that they are read from."""

    order: Ints
    """Episodes, row after row."""
    offsets: Ints
    """Where rows begin in `order`; one more at the end."""
    rows: Ints
    """The order of rows."""
    windows: tuple[Ints, ...] = ()
    """The shards of each window; empty for rows in a global order."""
    bounds: Ints | None = None
    """Where windows begin in `rows`; one more at the end."""


def plan_windows(
    lengths: Ints,
    shard_starts: Ints,
    *,
    window: int,
    width: int,
    strategy: Strategy | None,
    seed: int | None,
) -> EpochPlan:
    """Plan the rows of an epoch window by window.

    Args:
        lengths: Tokens of every episode that is read.
        shard_starts: The first episode of each shard, and the number of episodes.
        window: Shards of a window.
        width: Tokens of a row.
        strategy: How rows are packed; None puts one episode into each.
        seed: Seed of the epoch; None reads everything in the order of the dataset.
    """
    shards = np.arange(len(shard_starts) - 1)
    generator = None if seed is None else random_state(seed)
    if generator is not None:
        shards = generator.permutation(shards)
    orders: list[Ints] = []
    counts: list[Ints] = []
    rows: list[Ints] = []
    bounds = [0]
    windows = tuple(shards[start : start + window] for start in range(0, len(shards), window))
    for own in windows:
        episodes = np.concatenate([np.arange(shard_starts[shard], shard_starts[shard + 1]) for shard in own.tolist()])
        if generator is not None:
            episodes = generator.permutation(episodes)
        sizes = np.ones(len(episodes), dtype=np.int64)
        if strategy is not None and len(episodes):
            packing = plan(lengths[episodes], width, strategy)
            episodes = episodes[packing.order]
            sizes = np.diff(packing.bin_offsets)
        own_rows = np.arange(len(sizes))
        if generator is not None and strategy is not None:
            own_rows = generator.permutation(own_rows)
        orders.append(episodes)
        counts.append(sizes)
        rows.append(bounds[-1] + own_rows)
        bounds.append(bounds[-1] + len(sizes))
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.concatenate(counts))])
    return EpochPlan(
        order=np.concatenate(orders).astype(np.int64, copy=False),
        offsets=offsets,
        rows=np.concatenate(rows).astype(np.int64, copy=False),
        windows=windows,
        bounds=np.array(bounds, dtype=np.int64),
    )


def mean_distance(shards: Ints, rows: Ints) -> float:
    """Return by how many rows two documents of one shard are apart, on average; `rows` are those of the documents."""
    order = np.argsort(shards, kind="stable")
    sorted_shards = shards[order]
    positions = rows[order].astype(np.float64)
    starts = np.flatnonzero(np.append(True, sorted_shards[1:] != sorted_shards[:-1]))
    sizes = np.diff(np.append(starts, len(shards)))
    rank = np.arange(len(shards)) - np.repeat(starts, sizes)
    size = np.repeat(sizes, sizes)
    total = float((positions * (2 * rank - size + 1)).sum())
    pairs = float((sizes * (sizes - 1) // 2).sum())
    return total / pairs if pairs else 0.0


class ShardPrefetch:
    """Fetches the shards of a remote dataset before their rows are needed; does nothing for a local one."""

    def __init__(
        self,
        plan_of: Callable[[int], EpochPlan],
        files_of: Callable[[int], Sequence[Path]],
        release: Callable[[], None],
        most: int | None,
    ) -> None:
        """Take what gives the plan of an epoch, the files of a shard, and what closes files of earlier windows."""
        self._plan_of = plan_of
        self._files_of = files_of
        self._release = release
        self._prefetch = remote.Prefetch(ALL_BYTES if most is None else most)
        self._last: tuple[int, int] | None = None

    def at(self, epoch: int, row: int) -> None:
        """Begin to fetch what follows a row of an epoch, where a window begins with it."""
        planned = self._plan_of(epoch)
        assert planned.bounds is not None
        window = int(np.searchsorted(planned.bounds, row, side="right")) - 1
        if (epoch, window) == self._last or window >= len(planned.windows):
            return
        self._last = (epoch, window)
        self._release()
        shards = list(planned.windows[window])
        if window + 1 < len(planned.windows):
            shards += list(planned.windows[window + 1])
        else:
            shards += list(self._plan_of(epoch + 1).windows[0])
        self._prefetch.want([file for shard in shards for file in self._files_of(int(shard))])

    def fetch_all(self, shards: int) -> None:
        """Begin to fetch all shards."""
        self._prefetch.want([file for shard in range(shards) for file in self._files_of(shard)])


def fits_cache(name: str, shards: Sequence[Sequence[Path]], window: int | None) -> bool:
    """Return whether files are those of a remote dataset; refuse one that needs more of the cache than it may hold.

    Args:
        name: The dataset, for the error.
        shards: The files of each shard that the rows need.
        window: Shards of a window; None for rows in a global order.
    """
    sizes = [sum(remote.stored_size(file) or 0 for file in files) for files in shards]
    total = sum(sizes)
    if not total:
        return False
    if window is None:
        remote.refuse_larger(
            name,
            total,
            ", or read it in windows: order=windows needs two windows of shards at a time and gives each byte once an "
            "epoch",
        )
        return True
    largest = sorted(sizes, reverse=True)[: 2 * window]
    remote.refuse_larger(name, sum(largest), f", or give a smaller window than {window} shards")
    return True
