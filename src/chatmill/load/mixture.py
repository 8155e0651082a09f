"""Several datasets mixed by weight: which one each row comes from is drawn from a seed, by global position."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import ConfigError
from chatmill.load.config import SamplingMode, TrainingConfig
from chatmill.load.episode_rows import EpisodeRows, episode_rows
from chatmill.load.episodes import episode_config, report_opened
from chatmill.load.feed import Feed, RowGroup, RowStep
from chatmill.load.loader import BatchLoader
from chatmill.load.order import CHUNK, Draws, EpochPlace, take_rows
from chatmill.load.placement import Placement, placed
from chatmill.store.episode_layout import SPLITS
from chatmill.store.episodes import EpisodeDataset

log = logging.getLogger(__name__)
Ints = NDArray[np.int64]


def seed_of_source(seed: int, number: int) -> int:
    """The seed of the draws of a source in random mode; `number` is its place in the mixture, counted from 0.

    Every source has its own, and none has that of the mixture: with one seed for all, sources of the same size would
    draw the same row numbers.
    """
    return int(np.random.RandomState([seed, number]).randint(0, 2**31))


class SourceDraws(Draws):
    """The source of every row of the mixture, indexed by global position.

    Chunk j of 65,536 rows is `searchsorted(cumulative shares, RandomState(seed + j).random_sample(65536), "right")`.
    """

    def __init__(self, seed: int, weights: Sequence[float]) -> None:
        """Weights are relative to their sum."""
        super().__init__(seed, len(weights))
        shares = np.cumsum(np.asarray(weights, dtype=np.float64))
        self._shares = shares / shares[-1]

    def _draw(self, random: np.random.RandomState) -> NDArray[np.integer]:
        return np.searchsorted(self._shares[:-1], random.random_sample(CHUNK), side="right")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixturePlace:
    """The place of a mixture: rows taken in all, and the place of each source in its own epochs."""

    position: int
    sources: tuple[EpochPlace, ...]


class MixtureFeed(Feed):
    """The batches of one split, mixed from several datasets."""

    def __init__(
        self,
        split: str,
        rows: Mapping[str, EpisodeRows],
        weights: Sequence[float],
        config: TrainingConfig,
        place: Placement,
    ) -> None:
        """The rows of the sources by name, and their weights in the same order."""
        super().__init__(dict(enumerate(rows.values())), config, place)
        self.split, self.names, self.rows = split, list(rows), list(rows.values())
        self._weights = [float(weight) for weight in weights]
        self._which = SourceDraws(config.epoch_seed, weights)
        self._draws: list[Draws] | None = None
        if config.batch_sampling_mode is SamplingMode.RANDOM:
            pairs = zip(self._source_seeds, self.rows, strict=True)
            self._draws = [Draws(seed, source.rows_of(0)) for seed, source in pairs]

    @property
    def _source_seeds(self) -> list[int]:
        return [seed_of_source(self.config.epoch_seed, number) for number in range(len(self.rows))]

    @property
    def fingerprint(self) -> str:
        """Of all sources, in order."""
        return sha256("\0".join(source.dataset.fingerprint for source in self.rows).encode()).hexdigest()

    @property
    def order(self) -> dict[str, Any]:
        """With other weights a position would mean other rows."""
        sources = {
            name: {"weight": weight, **source.order_facts}
            for name, weight, source in zip(self.names, self._weights, self.rows, strict=True)
        }
        seeds = {} if self._draws is None else {"source_seeds": self._source_seeds}
        return super().order | {"sources": sources} | seeds

    def begin(self) -> MixturePlace:
        """Every source at its first row."""
        return MixturePlace(position=0, sources=tuple(EpochPlace() for _ in self.rows))

    def step_at(self, place: MixturePlace) -> RowStep:
        """Rows of the whole global step are given to their sources; this rank keeps its own."""
        share = self.share
        which = self._which.take(place.position, share.step)
        groups: list[RowGroup] = []
        begun: list[tuple[int, int]] = []
        after: list[EpochPlace] = []
        for source, at in enumerate(place.sources):
            slots = np.flatnonzero(which == source) - share.first
            pieces, end = self._take(source, at, len(slots))
            after.append(end)
            done = 0
            for epoch, first, rows in pieces:
                begun += [(source, epoch)] if first == 0 and self._draws is None else []
                mine = slots[done : done + len(rows)]
                chosen = (mine >= 0) & (mine < share.batch_size)
                if chosen.any():
                    groups.append(RowGroup(source=source, epoch=epoch, rows=rows[chosen], slots=mine[chosen]))
                done += len(rows)
        after_all = MixturePlace(position=place.position + share.step, sources=tuple(after))
        return RowStep(groups=tuple(groups), begun=tuple(begun), after=after_all)

    def _take(self, source: int, at: EpochPlace, count: int) -> tuple[list[tuple[int, int, Ints]], EpochPlace]:
        """The next rows of a source as (epoch, first position, rows); its own epochs follow one another."""
        if self._draws is not None:
            rows = self._draws[source].take(at.position, count)
            return [(0, at.position, rows)], EpochPlace(position=at.position + count)
        pieces, end = take_rows(at, self.rows[source].rows_of, count)
        return [(e, first, self.rows[source].select(e, first, number)) for e, first, number in pieces], end

    def announce(self, step: RowStep) -> None:
        """One line when a source begins an epoch."""
        for source, epoch in step.begun:
            log.info(
                "[EpisodeLoader] split=%s source=%s epoch=%d episodes=%d",
                self.split,
                self.names[source],
                epoch,
                self.rows[source].episodes,
            )

    def place_to_json(self, place: MixturePlace) -> dict[str, Any]:
        """The position, and epoch and position of every source by name."""
        sources = {name: asdict(at) for name, at in zip(self.names, place.sources, strict=True)}
        return {"position": place.position, "sources": sources}

    def place_from_json(self, value: Mapping[str, Any]) -> MixturePlace:
        """The place that `place_to_json` described."""
        saved = value["sources"]
        places = (EpochPlace(epoch=int(saved[n]["epoch"]), position=int(saved[n]["position"])) for n in self.names)
        return MixturePlace(position=int(value["position"]), sources=tuple(places))


class MixtureLoader(BatchLoader):
    """Rows of several episode datasets, mixed by weight; every dataset goes through its own epochs.

    Batches are those of `GPTEpisodeDataLoader`. No row is dropped at an epoch's end: the next epoch of that dataset
    follows, whatever `epoch_drop_last` says. The `val` split mixes the datasets that have one.
    """

    kind = "mixture"

    def __init__(
        self,
        config: Any,
        datasets: Mapping[str | Path, float],
        tokenizer: Any = None,
        *,
        device: Any = None,
        strict: bool = False,
        prefetch: bool = True,
        pin_memory: bool | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        **options: Any,
    ) -> None:
        """`datasets`: folder -> weight. Weights are shares of the rows, over the sum of all weights.

        The other arguments are those of `GPTEpisodeDataLoader`; `options` (`pack`, `policy`, `overflow`, ...) replace
        those of the config.
        """
        settled = episode_config(config, tokenizer, **options)
        weights = _checked_weights(datasets)
        device = settled.device if device is None else device
        place = placed(rank=rank, world_size=world_size, device=device, pin_memory=pin_memory)
        configs = {split: settled.for_split(split, in_order=False) for split in SPLITS}
        opened: dict[str, dict[str, EpisodeRows]] = {}
        for split in SPLITS:
            for name in weights:
                if split == "train" or (Path(name) / split).exists():
                    dataset = EpisodeDataset(Path(name), split, strict=strict)
                    opened.setdefault(split, {})[name] = episode_rows(dataset, configs[split])
        described = {f"{split} source={name}": one for split, rows in opened.items() for name, one in rows.items()}
        report_opened(described, settled, strict=strict)
        feeds = {
            split: MixtureFeed(split, rows, [weights[name] for name in rows], configs[split], place)
            for split, rows in opened.items()
        }
        super().__init__(feeds, settled, place, dataset=", ".join(weights), prefetch=prefetch)


def _checked_weights(datasets: Mapping[str | Path, float]) -> dict[str, float]:
    """The weights by the names of the sources, which are those of their folders."""
    if not datasets:
        raise ConfigError("a mixture needs at least one dataset: {folder: weight, ...}")
    for path, weight in datasets.items():
        if not np.isfinite(weight) or weight <= 0:
            raise ConfigError(f"the weight of {path} is {weight!r}; weights are finite and above 0")
    named = {str(path): weight for path, weight in datasets.items()}
    if len(named) < len(datasets):
        raise ConfigError(f"two sources of the mixture have the same name: {', '.join(sorted(map(str, datasets)))}")
    return named
