"""The rows of one split of episodes: which episodes there are, in which order, and how they are laid into a batch."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of, ranges
from chatmill.errors import ConfigError, FormatError, member
from chatmill.label.policy import Policy
from chatmill.label.presets import find_policy
from chatmill.load.config import Planning, TrainingConfig
from chatmill.load.feed import Rows
from chatmill.load.long_episodes import LongEpisodes, LongEpisodesReport, report_long_episodes
from chatmill.load.order import Recent, epoch_order, random_state
from chatmill.load.stage import Laid, Stage
from chatmill.pack.plan import Plan, Strategy, plan
from chatmill.store.episode_shard import EpisodeShard
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.pack_plan import PackPlan, read_pack_plan

log = logging.getLogger(__name__)
Ints = NDArray[np.int64]


class EpisodeRows(Rows):
    """One episode per row: its first `width` tokens, and their weights."""

    def __init__(
        self,
        dataset: EpisodeDataset,
        *,
        width: int,
        min_tokens: int,
        seed: int,
        shuffle: bool,
        use_mask: bool,
        policy: Policy | None,
        overflow: LongEpisodes = LongEpisodes.CUT,
    ) -> None:
        """Episodes shorter than `min_tokens` are left out; `width` is block_size + 1.

        With a policy the weights come from the stored kinds; else, with `use_mask`, from the stored masks. `overflow`
        says what becomes of episodes that are longer than `width`; the caller refuses them (`long_episodes`).
        """
        if policy is not None:
            _refuse_unfit_policy(dataset, policy)
        super().__init__(str(dataset.folder), width=width, seed=seed, shuffle=shuffle)
        self.dataset = dataset
        self.min_tokens, self.overflow = min_tokens, overflow
        self._long: tuple[LongEpisodesReport | None] | tuple[()] = ()
        self._policy = policy
        self.has_masks = policy is not None or (use_mask and dataset.has_masks)
        lengths = dataset.lengths
        valid = lengths >= min_tokens
        if overflow is LongEpisodes.DROP:
            valid &= lengths <= width
        self.episodes = int(np.count_nonzero(valid))
        """Episodes that are read."""
        if not self.episodes and lengths.max() >= min_tokens:
            raise ConfigError(
                f"{dataset.folder}: every episode is longer than a row of {width:,} tokens, and overflow='drop' leaves "
                f"them all out: the shortest has {int(lengths.min()):,}"
            )
        if not self.episodes:
            raise FormatError(
                f"{dataset.folder}: an empty split: none of its {len(dataset):,} episodes has episode_min_tokens = "
                f"{min_tokens} tokens (the longest has {int(lengths.max())})"
            )
        self._valid: Ints | None = None if self.episodes == len(dataset) else np.flatnonzero(valid)

    def long_episodes(self, *, exact: bool = True) -> LongEpisodesReport | None:
        """What is lost of episodes that are longer than a row; of many, unless `exact`, counted in a sample."""
        known = self._long[0] if self._long else None
        if not self._long or (exact and known is not None and known.counted < known.too_long):
            found = report_long_episodes(
                self.dataset,
                width=self.width,
                min_tokens=self.min_tokens,
                overflow=self.overflow,
                trains=self._trains,
                exact=exact,
            )
            self._long = (found,)
        return self._long[0]

    def _trains(self, shard: EpisodeShard, starts: Ints, lengths: Ints) -> NDArray[np.bool_]:
        """Which tokens of whole episodes of one shard are trained."""
        weights, begins = self._weights(shard, starts.tolist(), lengths)
        return weights[ranges(np.array(begins, dtype=np.int64), lengths)] > 0

    def _weights(self, shard: EpisodeShard, starts: list[int], lengths: Ints) -> tuple[NDArray[Any], list[int]]:
        """Values that hold the weights of whole episodes of one shard, and where in them those of each begin."""
        if self._policy is not None:
            offsets = offsets_of(lengths)
            kinds = shard.column("kinds")
            pieces = [kinds[start : start + length] for start, length in zip(starts, lengths.tolist(), strict=True)]
            return self._policy.token_weights(np.concatenate(pieces), offsets), offsets[:-1].tolist()
        if self.has_masks:
            return shard.mask, starts
        return np.ones(int(lengths.max(initial=0)), dtype=np.uint8), [0] * len(starts)

    @property
    def weight_dtype(self) -> np.dtype[Any]:
        """The type in which weights are laid: uint8 unless a policy or a shard has fractions."""
        whole = all(shard.mask_dtype == np.uint8 for shard in self.dataset.shards)
        if self._policy is not None or (self.has_masks and not whole):
            return np.dtype(np.float32)
        return np.dtype(np.uint8)

    @property
    def fingerprint(self) -> str:
        """Of the dataset's files."""
        return self.dataset.fingerprint

    @property
    def order_facts(self) -> dict[str, Any]:
        """What gives a position its meaning, beside the options."""
        return {"episodes": self.episodes}

    def rows_of(self, epoch: int) -> int:
        """Rows of an epoch: here the episodes, whatever the epoch."""
        return self.episodes

    def lay(self, stage: Stage, epoch: int, rows: Ints, slots: Ints) -> Laid:
        """Lay rows into the given slots of a stage."""
        limits = np.full(len(rows), self.width)
        lengths = self._lay(stage, self._numbers(rows), slots * self.width, limits)
        return Laid(slots=slots, starts=np.zeros(len(rows), dtype=np.int64), lengths=lengths)

    def documents(self, epoch: int, row: int) -> Ints:
        """The episodes of one row; numbers in the dataset."""
        return self._numbers(np.array([row], dtype=np.int64))

    def _numbers(self, rows: Ints) -> Ints:
        """Episode numbers in the dataset of rows counted among the valid ones."""
        return rows if self._valid is None else self._valid[rows]

    def _lay(self, stage: Stage, episodes: Ints, places: Ints, limits: Ints) -> Ints:
        """Lay the first `limits` tokens of each episode at its place, and its weights when the stage has any.

        Returns how many tokens of each were laid.
        """
        numbers, starts, lengths = self.dataset.locate(episodes)
        used = np.minimum(lengths, limits)
        for number in dict.fromkeys(numbers.tolist()):
            mine = numbers == number if len(self.dataset.shards) > 1 else slice(None)
            shard = self.dataset.shard(number)
            span = starts[mine].tolist(), used[mine].tolist(), places[mine].tolist()
            stage.lay_ids(shard.token_ids, *span)
            if stage.weights is not None:
                weights, begins = self._weights(shard, span[0], lengths[mine])
                stage.lay_weights(weights, begins, *span[1:])
        return used


class PackedEpisodeRows(EpisodeRows):
    """Several episodes per row, planned anew for each epoch from their lengths.

    The plan of epoch e depends on lengths, width and `seed + e` alone: it is the same on every rank.
    """

    def __init__(self, dataset: EpisodeDataset, *, strategy: Strategy, **options: Any) -> None:
        """`options` as for `EpisodeRows`; episodes longer than a row give their first `width` tokens."""
        super().__init__(dataset, **options)
        self.strategy = strategy
        lengths = dataset.lengths if self._valid is None else dataset.lengths[self._valid]
        self._lengths: Ints = np.minimum(lengths, self.width)
        shortest = np.sort(self._lengths)[: self.width]
        self.most_documents = int(np.searchsorted(np.cumsum(shortest), self.width, side="right"))
        """No row of any epoch holds more documents than this."""
        self._plans: Recent[tuple[Plan, Ints, Ints]] = Recent(self._plan)

    def _plan(self, epoch: int) -> tuple[Plan, Ints, Ints]:
        """The plan over the epoch's order, that order, and the order of its rows."""
        if not self.shuffle:
            made = plan(self._lengths, self.width, self.strategy)
            return made, np.arange(self.episodes), np.arange(made.bins)
        generator = random_state(self.seed + epoch)
        order = generator.permutation(self.episodes)
        made = plan(self._lengths[order], self.width, self.strategy)
        return made, order, generator.permutation(made.bins)

    def rows_of(self, epoch: int) -> int:
        """Packed rows of an epoch."""
        return self._plans.get(epoch)[0].bins

    def select(self, epoch: int, first: int, count: int) -> Ints:
        """Bins of the epoch's plan."""
        return self._plans.get(epoch)[2][first : first + count]

    def documents(self, epoch: int, row: int) -> Ints:
        """The episodes of one bin, in the order of the row; numbers in the dataset."""
        made, order, _ = self._plans.get(epoch)
        return self._numbers(order[made.bin(row)])

    def lay(self, stage: Stage, epoch: int, rows: Ints, slots: Ints) -> Laid:
        """Lay packed rows; the first token of a document is never a target."""
        made, order, _ = self._plans.get(epoch)
        counts = made.bin_offsets[rows + 1] - made.bin_offsets[rows]
        chosen = order[made.order[ranges(made.bin_offsets[rows], counts)]]
        lengths = self._lengths[chosen]
        ends, firsts = offsets_of(lengths), offsets_of(counts)
        starts = ends[:-1] - np.repeat(ends[firsts[:-1]], counts)
        slot_of = np.repeat(slots, counts)
        places = slot_of * self.width + starts
        self._lay(stage, self._numbers(chosen), places, lengths)
        if stage.weights is not None:
            stage.weights.reshape(-1)[places] = 0
        return Laid(slots=slot_of, starts=starts, lengths=lengths)


class PlannedRows(PackedEpisodeRows):
    """The rows of the plan beside the episodes: nothing is planned, and epochs differ in the order of rows alone."""

    def __init__(self, dataset: EpisodeDataset, *, stored: PackPlan, **options: Any) -> None:
        """`options` as for `EpisodeRows`. Episodes that are too short leave gaps; a row without any other goes."""
        super().__init__(dataset, strategy=member(Strategy, "packing strategy", stored.strategy), **options)
        self._fingerprint = stored.fingerprint
        order, borders = stored.order, stored.row_offsets
        if self._valid is not None:
            among_valid = np.full(len(dataset), -1, dtype=np.int64)
            among_valid[self._valid] = np.arange(self.episodes)
            order = among_valid[order]
            borders = np.unique(offsets_of((order >= 0).astype(np.int64))[borders])
            order = order[order >= 0]
        self._made = Plan(
            order=order,
            bin_offsets=borders,
            capacity=stored.length,
            strategy=self.strategy,
            tokens=int(self._lengths.sum()),
            lower_bound=stored.lower_bound,
        )
        self._identity: Ints = np.arange(self.episodes)

    @property
    def order_facts(self) -> dict[str, Any]:
        """With another plan a position would mean other rows."""
        return super().order_facts | {"pack_plan": self._fingerprint}

    def _plan(self, epoch: int) -> tuple[Plan, Ints, Ints]:
        rows = epoch_order(self.seed, epoch, self._made.bins, shuffle=self.shuffle)
        return self._made, self._identity, rows


def episode_rows(dataset: EpisodeDataset, config: TrainingConfig, *, check: bool = False) -> EpisodeRows:
    """The rows of a split under the options of a loader; `check` compares a plan with its hashes."""
    options: dict[str, Any] = {
        "width": config.block_size + 1,
        "min_tokens": config.episode_min_tokens,
        "seed": config.epoch_seed,
        "shuffle": config.epoch_shuffle,
        "use_mask": config.wants_masks,
        "policy": None if config.policy is None else find_policy(config.policy),
        "overflow": config.overflow or LongEpisodes.CUT,
    }
    if not config.pack:
        return EpisodeRows(dataset, **options)
    strategy = strategy_named(config.packing_strategy)
    return packed_rows(dataset, strategy=strategy, planning=config.planning, check=check, **options)


def packed_rows(
    dataset: EpisodeDataset,
    *,
    width: int,
    strategy: Strategy | None,
    planning: Planning,
    check: bool = False,
    **options: Any,
) -> PackedEpisodeRows:
    """Packed rows by the plan beside the episodes, or planned here; `strategy` None takes the plan's, else best_fit.

    A plan is used where its rows fill `width` tokens, or all but one: the last place of a row is a target only.
    """
    stored = None if planning is Planning.EPOCH else read_pack_plan(dataset.folder, dataset.lengths, check=check)
    if stored is not None:
        if width - stored.length in (0, 1) and strategy in (None, stored.strategy):
            return PlannedRows(dataset, stored=stored, width=width, **options)
        log.warning(
            "%s: packed anew: its plan has rows of %d tokens by %s; rows of %d (block_size + 1) by %s are asked for",
            dataset.folder,
            stored.length,
            stored.strategy,
            width,
            strategy or "any strategy",
        )
    return PackedEpisodeRows(dataset, strategy=strategy or Strategy.BEST_FIT, width=width, **options)


def strategy_named(name: str | None) -> Strategy | None:
    """A packing strategy by name; None for None."""
    return None if name is None else member(Strategy, "packing strategy", name)


def _refuse_unfit_policy(dataset: EpisodeDataset, policy: Policy) -> None:
    if "kinds" not in dataset.columns:
        raise ConfigError(
            f"{dataset.folder}: policy {policy.name!r} at load needs the kinds of the tokens, and they are not stored: "
            "write the dataset with kinds, or use its masks (use_loss_mask)"
        )
    policy.token_weights(np.zeros(1, dtype=np.uint8))
