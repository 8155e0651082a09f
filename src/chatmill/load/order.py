"""Which rows a global step takes: epoch orders, the endless stream of draws, and the arithmetic of positions.

Pure numpy. A position is global: it counts the rows that all ranks together have taken, so that a run may resume
with another number of ranks. A global step takes `world_size * batch_size` rows; rank `r` gets the rows from
`r * batch_size` on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import ConfigError

CHUNK = 65_536
"""Draws per chunk; chunk j has the seed `seed + j`."""
MAX_SEED = 2**32 - 1
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """This rank's part of every global step."""

    batch_size: int
    rank: int = 0
    world_size: int = 1

    @property
    def step(self) -> int:
        """Rows of a global step, over all ranks."""
        return self.batch_size * self.world_size

    @property
    def first(self) -> int:
        """The first of this rank's rows in a global step."""
        return self.rank * self.batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlace:
    """A place in the endless sequence of epochs."""

    epoch: int = 0
    position: int = 0
    """Rows of this epoch that are taken, over all ranks."""


def random_state(seed: int) -> np.random.RandomState:
    """Return the generator of a seed; a seed beyond 32 bits is a `ConfigError`."""
    if not 0 <= seed <= MAX_SEED:
        raise ConfigError(
            f"seed {seed} is outside 0 to {MAX_SEED} (epoch_seed plus epoch or chunk): choose a smaller epoch_seed"
        )
    return np.random.RandomState(seed)


def epoch_order(seed: int, epoch: int, rows: int, *, shuffle: bool) -> NDArray[np.int64]:
    """Return the order of one epoch: `RandomState(seed + epoch).permutation(rows)`, or 0, 1, 2, ..."""
    if not shuffle:
        return np.arange(rows, dtype=np.int64)
    return random_state(seed + epoch).permutation(rows).astype(np.int64, copy=False)


class Draws:
    """The endless stream of draws with replacement from `rows` rows, indexed by global position."""

    def __init__(self, seed: int, rows: int) -> None:
        """Chunk j is `RandomState(seed + j).randint(0, rows, CHUNK)`; the last one used is kept."""
        self._seed, self._rows = seed, rows
        self._number, self._chunk = -1, np.empty(0, dtype=np.int64)

    def take(self, position: int, count: int) -> NDArray[np.int64]:
        """Draws `position` up to `position + count - 1`."""
        parts = []
        while count > 0:
            number, start = divmod(position, CHUNK)
            if number != self._number:
                draws = random_state(self._seed + number).randint(0, self._rows, CHUNK)
                self._number, self._chunk = number, draws.astype(np.int64, copy=False)
            parts.append(self._chunk[start : start + count])
            position += len(parts[-1])
            count -= len(parts[-1])
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def epoch_step(
    place: EpochPlace, rows_of: Callable[[int], int], share: RankShare, *, drop_last: bool, name: str
) -> tuple[EpochPlace, int, EpochPlace]:
    """Find where the global step at `place` begins, how many rows this rank has in it, and where the next one begins.

    `rows_of(epoch)` is the number of rows of an epoch, `name` names them in errors.
    With `drop_last` the next epoch begins when fewer rows than a global step are left; without it the last step of
    an epoch is filled up with padding.
    """
    left = rows_of(place.epoch) - place.position
    if left <= 0 or (drop_last and left < share.step):
        place = EpochPlace(epoch=place.epoch + 1) if place.position else place
        left = rows_of(place.epoch)
    if drop_last and left < share.step:
        raise ConfigError(
            f"{name}: {left:,} rows in an epoch, but a global step takes {share.step:,} ({share.world_size} ranks x "
            f"batch_size {share.batch_size}): lower batch_size, or set epoch_drop_last to false"
        )
    real = max(0, min(share.batch_size, left - share.first))
    return place, real, EpochPlace(epoch=place.epoch, position=place.position + min(left, share.step))


def steps_per_epoch(rows: int, share: RankShare, *, drop_last: bool) -> int:
    """Global steps in an epoch of `rows` rows."""
    return rows // share.step if drop_last else -(-rows // share.step)


class Recent(Generic[ValueT]):
    """The values of the last two epochs asked for; they are large, and steps ask for one or two of them."""

    def __init__(self, make: Callable[[int], ValueT]) -> None:
        self._make = make
        self.get = lru_cache(maxsize=2)(make)

    def __reduce__(self) -> tuple[type[Recent[ValueT]], tuple[Callable[[int], ValueT]]]:
        """Another process makes its own."""
        return Recent, (self._make,)
