"""The rows of one split of episodes: which episodes there are, in which order, how they are laid, and what is lost."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.ledger import Ledger
from chatmill.core.tokens import offsets_of, ranges
from chatmill.errors import ConfigError, FormatError, member
from chatmill.label.policy import Policy, Scope
from chatmill.label.presets import find_policy
from chatmill.load.config import RowOrder, SamplingMode, TrainingConfig
from chatmill.load.order import Recent, random_state
from chatmill.load.row_buffer import LaidRows, RowBuffer
from chatmill.load.rows import Ints, Rows
from chatmill.load.teacher import teacher_tensors, whole_teacher
from chatmill.load.windows import EpochPlan, ShardPrefetch, fits_cache, mean_distance, plan_windows
from chatmill.pack.plan import Strategy, plan
from chatmill.store.episode_layout import MASK, TOKENS
from chatmill.store.episode_manifest import BRANCHES, KINDS, LOGPROBS
from chatmill.store.episode_shard import EpisodeShard
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.receipts import read_manifest
from chatmill.store.split import even_ranges

log = logging.getLogger(__name__)
TOKENS_AT_A_TIME = 1 << 22


class EpisodeRows(Rows):
    """The first `width` tokens of an episode in each row, or with `pack` several episodes, and their weights.

    Packed rows are planned for each epoch: the plan of epoch e depends on lengths, width and `seed + e` alone, so it
    is the same on every rank.
    """

    def __init__(self, dataset: EpisodeDataset, config: TrainingConfig) -> None:
        """Episodes shorter than `episode_min_tokens` are left out.

        With a policy the weights come from the stored kinds; else, with `use_loss_mask`, from the stored masks.
        """
        self._policy = None if config.policy is None else find_policy(config.policy)
        if self._policy is not None:
            _refuse_unfit_policy(dataset, self._policy)
        self.teacher = whole_teacher(dataset, self._policy) if config.teacher else None
        self._gives_logprobs = config.logprobs
        if config.logprobs and not dataset.has_logprobs:
            raise ConfigError(
                f"{dataset.folder}: logprobs=True, and no log-probabilities are stored: build with logprobs: true"
            )
        width, min_tokens = config.block_size + 1, config.episode_min_tokens
        super().__init__(str(dataset.folder), width=width, seed=config.epoch_seed, shuffle=config.epoch_shuffle)
        self.data = self.dataset = dataset
        self.min_tokens = min_tokens
        self.has_trees = dataset.has_trees
        self.has_masks = self._policy is not None or (config.use_loss_mask and dataset.has_masks)
        whole = all(shard.mask_dtype == np.uint8 for shard in dataset.shards)
        if self._policy is not None or (self.has_masks and not whole):
            self.weight_dtype = np.dtype(np.float32)
        lengths = dataset.lengths
        valid = lengths >= min_tokens
        self.episodes = int(np.count_nonzero(valid))
        """Episodes that are read."""
        if not self.episodes:
            raise FormatError(
                f"{dataset.folder}: an empty split: none of its {len(dataset):,} episodes has episode_min_tokens = "
                f"{min_tokens} tokens (the longest has {int(lengths.max())})"
            )
        self.order_facts = {"episodes": self.episodes}
        self._valid: Ints | None = None if self.episodes == len(dataset) else np.flatnonzero(valid)
        self.strategy: Strategy | None = None
        """How rows are packed; None: one episode each."""
        if config.pack:
            stated = dataset.manifest.rows if dataset.manifest else None
            strategy = config.packing_strategy or (Strategy.BEST_FIT if stated is None else stated.strategy)
            self.strategy = member(Strategy, "packing strategy", strategy)
            self.order_facts = {**self.order_facts, "packing_strategy": str(self.strategy)}
            self._lengths: Ints = np.minimum(lengths if self._valid is None else lengths[self._valid], width)
            shortest = np.sort(self._lengths)[:width]
            self.most_documents = int(np.searchsorted(np.cumsum(shortest), width, side="right"))
        self.window = config.window if config.order is RowOrder.WINDOWS else None
        """Shards of a window; None for rows in a global order."""
        if self.window is not None:
            if config.batch_sampling_mode is SamplingMode.RANDOM:
                raise ConfigError("order=windows is for epochs: rows drawn at random need the whole dataset at a time")
            self.order_facts = {**self.order_facts, "order": str(RowOrder.WINDOWS), "window": self.window}
            self._lengths = np.minimum(lengths if self._valid is None else lengths[self._valid], width)
        self._plans: Recent[EpochPlan] = Recent(self._plan)
        self._prepare_cache(config.prefetch)

    def _prepare_cache(self, prefetch: int | None) -> None:
        """Compare what the rows need of a remote dataset with the limit of the cache, and begin to fetch it."""
        self._prefetch: ShardPrefetch | None = None
        shards = range(len(self.dataset.shards))
        if fits_cache(self.name, [self.shard_files(shard) for shard in shards], self.window):
            self._prefetch = ShardPrefetch(self.epoch_plan, self.shard_files, self.dataset.release, prefetch)
            if self.window is None:
                self._prefetch.fetch_all(len(shards))

    def shard_files(self, shard: int) -> list[Path]:
        """Return the large files of a shard that its rows are laid from."""
        wanted = {
            TOKENS: True,
            MASK: self.has_masks and self._policy is None,
            KINDS.file: self._policy is not None,
            LOGPROBS.file: self._gives_logprobs,
            BRANCHES.file: self.has_trees,
            BRANCHES.offsets_file: self.has_trees,
        }
        return [self.dataset.shards[shard].folder / name for name, is_read in wanted.items() if is_read]

    def select(self, epoch: int, first: int, count: int) -> Ints:
        """Rows `first` up to `first + count - 1` in the order of an epoch; those after them are fetched meanwhile."""
        if self._prefetch is not None and self.window is not None:
            self._prefetch.at(epoch, first)
        return super().select(epoch, first, count)

    def rows_apart(self) -> float:
        """Return by how many rows two documents of one shard are apart, on average, in the first epoch."""
        numbers, counts = self.documents(0, self._orders.get(0))
        shards = np.searchsorted(self.dataset.episode_offsets, numbers, side="right") - 1
        return mean_distance(shards, np.repeat(np.arange(len(counts)), counts))

    def epoch_plan(self, epoch: int) -> EpochPlan:
        """Return the plan of an epoch: the last ones are kept."""
        return self._plans.get(epoch)

    def _plan(self, epoch: int) -> EpochPlan:
        """Plan the rows of an epoch; episodes are counted among those that are read."""
        if self.window is not None:
            starts = self.dataset.episode_offsets
            return plan_windows(
                self._lengths,
                starts if self._valid is None else np.searchsorted(self._valid, starts),
                window=self.window,
                width=self.width,
                strategy=self.strategy,
                seed=self.seed + epoch if self.shuffle else None,
            )
        assert self.strategy is not None
        if not self.shuffle:
            packing = plan(self._lengths, self.width, self.strategy)
            return EpochPlan(order=packing.order, offsets=packing.bin_offsets, rows=np.arange(packing.bins))
        generator = random_state(self.seed + epoch)
        order = generator.permutation(self.episodes)
        packing = plan(self._lengths[order], self.width, self.strategy)
        rows = generator.permutation(packing.bins)
        return EpochPlan(order=order[packing.order], offsets=packing.bin_offsets, rows=rows)

    @property
    def _is_planned(self) -> bool:
        return self.strategy is not None or self.window is not None

    def _order(self, epoch: int) -> Ints:
        return self._plans.get(epoch).rows if self._is_planned else super()._order(epoch)

    def policy_losses(self) -> list[str]:
        """Sentences about what a policy at load cannot see: kinds hold neither weights nor whole records."""
        if self._policy is None:
            return []
        said = []
        if any(shard.mask_dtype == np.float32 for shard in self.dataset.shards):
            said.append(
                f"the masks hold weights other than 0 and 1; policy {self._policy.name!r} at load gives its own, and "
                "those that messages brought along do not count"
            )
        is_last_turn = self._policy.scope is Scope.LAST_TURN
        if (is_last_turn or not self._policy.trains_answers_only) and _has_records_in_pieces(self.dataset):
            part = "the last turn of" if is_last_turn else "what is repeated in"
            said.append(
                f"policy {self._policy.name!r} at load trains {part} every episode, and some records have several "
                "(windows, or turns in documents of their own): build with this policy to train it once a record"
            )
        return said

    def trains(self, numbers: Ints) -> NDArray[np.bool_]:
        """Return which tokens of whole episodes are trained, flat."""
        whole = self.dataset.gather(numbers)
        if self._policy is not None:
            assert whole.kinds is not None
            return self._policy.token_weights(whole.kinds, whole.offsets) > 0
        return whole.trained if self.has_masks else np.ones(len(whole.ids), dtype=np.bool_)

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

    def rows_of(self, epoch: int) -> int:
        """Rows of an epoch: the episodes, or the packed rows."""
        return self.episodes if self.strategy is None else len(self._plans.get(epoch).rows)

    def documents(self, epoch: int, rows: Ints) -> tuple[Ints, Ints]:
        """The episodes in some rows, one row after the other, as numbers in the dataset; and how many each row has."""
        counts = np.ones_like(rows)
        if self._is_planned:
            planned = self._plans.get(epoch)
            counts = planned.offsets[rows + 1] - planned.offsets[rows]
            rows = planned.order[ranges(planned.offsets[rows], counts)]
        return rows if self._valid is None else self._valid[rows], counts

    def lay(self, buffer: RowBuffer, epoch: int, rows: Ints, slots: Ints) -> LaidRows:
        """Lay rows into the given slots of a buffer; the first token of an episode is never a target."""
        numbers, counts = self.documents(epoch, rows)
        shards, begins, whole = self.dataset.locate(numbers)
        lengths = np.minimum(whole, self.width)
        starts, slot_of = np.zeros_like(lengths), slots
        if len(numbers) > len(rows):  # no row is empty, so some hold several
            ends, slot_of = offsets_of(lengths), np.repeat(slots, counts)
            starts = ends[:-1] - np.repeat(ends[offsets_of(counts)[:-1]], counts)
        places = slot_of * self.width + starts
        for number in dict.fromkeys(shards.tolist()):
            mine = shards == number if len(self.dataset.shards) > 1 else slice(None)
            shard = self.dataset.shards[number]
            span = begins[mine].tolist(), lengths[mine].tolist(), places[mine].tolist()
            buffer.lay_ids(shard.token_ids, *span)
            if buffer.weights is not None:
                weights, weight_begins = self._weights(shard, span[0], whole[mine])
                buffer.lay_weights(weights, weight_begins, *span[1:])
        if buffer.weights is not None:
            buffer.weights.reshape(-1)[places] = 0
        if buffer.tree_columns is not None:
            buffer.lay_trees(self.dataset.branches(numbers).cut(lengths), lengths, places)
        laid = LaidRows(slots=slot_of, starts=starts, lengths=lengths)
        extra = {}
        if self._gives_logprobs:
            logprobs = self.dataset.gather(numbers, lengths).logprobs
            assert logprobs is not None
            extra["logprobs"] = buffer.targets(logprobs, laid)
        if self.teacher is not None:
            extra |= teacher_tensors(self.teacher.gather(numbers, lengths), laid, buffer)
        return replace(laid, extra=extra)


def long_episodes(rows: EpisodeRows) -> Ints:
    """Return the numbers of the episodes that are longer than a row, which are cut."""
    lengths = rows.dataset.lengths
    return np.flatnonzero((lengths > rows.width) & (lengths >= rows.min_tokens))


def trained_tokens_cut(rows: EpisodeRows) -> int:
    """Count the trained tokens that rows lose of episodes longer than they are: reads all of those."""
    long, lengths, lost = long_episodes(rows), rows.dataset.lengths, 0
    for first, last in even_ranges(lengths[long], TOKENS_AT_A_TIME):
        starts = offsets_of(lengths[long[first:last]])
        so_far = offsets_of(rows.trains(long[first:last]))
        lost += int((so_far[starts[1:]] - so_far[starts[:-1] + rows.width]).sum())
    return lost


def warn_of_long_episodes(rows: EpisodeRows, where: object) -> None:
    """Log how much is cut of episodes that are longer than a row; by their lengths alone, however many they are."""
    lengths, long = rows.dataset.lengths, long_episodes(rows)
    if not len(long):
        return
    log.warning(
        "%s: %s of %s episodes are longer than a row of %s tokens (the longest has %s) and are cut: %s of their tokens "
        "are lost (data_report() counts the trained ones). Give block_size=%d or more, or build again with "
        "--max-length and an overflow policy",
        where,
        *(f"{number:,}" for number in (len(long), rows.episodes, rows.width, int(lengths.max()))),
        f"{int((lengths[long] - rows.width).sum()):,}",
        int(lengths.max()) - 1,
    )


def _has_records_in_pieces(dataset: EpisodeDataset) -> bool:
    """Return whether the build has more episodes than records; of a split that was not built nothing is known."""
    try:
        about = read_manifest(dataset.folder.parent)
    except FormatError:
        about = None
    if about is None:
        return False
    ledger = Ledger.from_json(about["ledger"])
    episodes = sum(count for (_, note), count in ledger.notes.items() if note == "episodes")
    return episodes > ledger.total_records("built")


def _refuse_unfit_policy(dataset: EpisodeDataset, policy: Policy) -> None:
    if "kinds" not in dataset.columns:
        raise ConfigError(
            f"{dataset.folder}: policy {policy.name!r} at load needs the kinds of the tokens, and they are not stored: "
            "write the dataset with kinds, or use its masks (use_loss_mask)"
        )
    if dataset.has_trees and policy.scope is Scope.LAST_TURN:
        raise ConfigError(
            f"{dataset.folder}: policy {policy.name!r} at load would train the last turn of each tree, and a tree has "
            "the turns of a whole conversation: build with this policy"
        )
    policy.token_weights(np.array([], dtype=np.uint8))  # refuses one that kinds do not decide
