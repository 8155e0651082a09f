"""The episode loader: whole conversations in rows of fixed shape, in a deterministic order."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from chatmill.core.special_ids import special_id
from chatmill.errors import ConfigError, member
from chatmill.label.policy import Policy
from chatmill.label.presets import find_policy
from chatmill.load.config import DatasetMode, SamplingMode, TrainingConfig, as_training_config
from chatmill.load.distributed import rank_and_world
from chatmill.load.episode_feed import EpisodeFeed, EpisodeOptions, flag
from chatmill.load.loader import BatchLoader, choose_device, directory_of
from chatmill.load.long_episodes import LongEpisodes, check_long_episodes
from chatmill.load.order import RankShare
from chatmill.load.rows import EpisodeRows, PlannedRows, Planning, Weights, strategy_named
from chatmill.store.episode_layout import SPLITS
from chatmill.store.episodes import EpisodeDataset

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class GPTEpisodeDataLoader(BatchLoader):
    """Samples whole conversations, never crosses their boundaries, and always returns the same shapes.

    `get_batch` gives `(x, y)` or `(x, y, mask)`, each `(batch_size, block_size)`: x and y int64, mask float32
    and aligned with y. With `pack=True` it gives a `PackedBatch`: `(x, y, mask, document_starts)`.
    """

    kind = "sft_episode"

    def __init__(
        self,
        config: Any,
        tokenizer: Any = None,
        dataset_dir: str | Path | None = None,
        *,
        use_loss_mask: bool | None = None,
        batch_sampling_mode: str | None = None,
        epoch_shuffle: bool | None = None,
        epoch_drop_last: bool | None = None,
        epoch_seed: int | None = None,
        pad_token_id: int | None = None,
        episode_min_tokens: int | None = None,
        device: Any = None,
        pack: bool = False,
        packing_strategy: str | None = None,
        planning: str = Planning.AUTO,
        policy: Policy | str | None = None,
        overflow: str | None = None,
        val: Mapping[str, Any] | None = None,
        strict: bool = False,
        check: bool = False,
        prefetch: bool = True,
        pin_memory: bool | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Open `dataset_dir` (or the config's); an option that is None is as the config says.

        - `packing_strategy`: how `pack=True` plans its rows (`chatmill.pack.plan.Strategy`); default: that of the plan
          beside the episodes, else best_fit.
        - `planning`: `auto` takes the rows of that plan where they fill block_size, and changes their order alone from
          epoch to epoch; `epoch` packs again for each epoch.
        - `policy`: choose what is trained from the stored kinds, by name or as a `Policy`, not from the masks.
        - `overflow`: episodes longer than a row are cut ("cut", the default), left out ("drop") or refused ("error").
          What is lost is counted and logged as a warning.
        - `val`: options of the split val alone, such as `{"batch_size": 16}`. Where neither these nor the config set
          `epoch_shuffle` and `epoch_drop_last`, val is given in order and whole, the same in every pass.
        - `strict`: masks that are asked for and are missing or of the wrong length, and a split whose writer
          did not finish, are errors instead of a warning.
        - `check`: compare the files of each shard with the hashes of the split's manifest before it is read.
        - `prefetch`: a thread prepares the next batch. `pin_memory`: by default when the device is a GPU.
        """
        overrides = {
            "use_loss_mask": use_loss_mask,
            "batch_sampling_mode": batch_sampling_mode,
            "epoch_shuffle": epoch_shuffle,
            "epoch_drop_last": epoch_drop_last,
            "epoch_seed": epoch_seed,
            "pad_token_id": pad_token_id,
            "episode_min_tokens": episode_min_tokens,
            "overflow": overflow,
            "val": val,
        }
        self.config = as_training_config(config).replace(
            **{name: value for name, value in overrides.items() if value is not None}
        )
        policy = self.config.policy if policy is None else policy
        if policy is not None and use_loss_mask is False:
            raise ConfigError(f"policy {policy!r} chooses what is trained, but use_loss_mask=False refuses masks")
        self.rank, self.world_size = rank_and_world(rank, world_size)
        device = choose_device(device, self.config.device)
        self.directory = directory_of(dataset_dir, self.config)
        splits = [s for s in SPLITS if s == "train" or (self.directory / s).exists()]
        options = {
            split: episode_options(
                self.config.for_split(split),
                tokenizer,
                rank=self.rank,
                world_size=self.world_size,
                policy=policy,
                pack=pack or self.config.pack,
                strategy=packing_strategy or self.config.packing_strategy,
                planning=planning,
                pin=str(device).startswith("cuda") if pin_memory is None else pin_memory,
            )
            for split in splits
        }
        self.options = options["train"]
        datasets = {s: EpisodeDataset(self.directory, s, strict=strict, check=check) for s in splits}
        opened = {split: options[split].rows(dataset, check=check) for split, dataset in datasets.items()}
        report_opened(opened, self.options, strict=strict)
        feeds = {split: EpisodeFeed(split, rows, options[split]) for split, rows in opened.items()}
        super().__init__(feeds, dataset=str(self.directory), device=device, prefetch=prefetch)
        self.batch_size, self.block_size = self.config.batch_size, self.config.block_size
        self.pad_token_id = self.options.pad_id

    def dataset(self, split: str = "train") -> EpisodeDataset:
        """The dataset that a split is read from."""
        return self._episode_feed(split).rows.dataset

    def epoch(self, split: str = "train") -> int:
        """The epoch of the last delivered batch; 0 before the first, and in random mode."""
        self._feed(split)
        return int(self._places[split].epoch)

    def steps_per_epoch(self, split: str = "train", epoch: int = 0) -> int:
        """How many batches an epoch has; packed, that may differ from epoch to epoch."""
        return self._episode_feed(split).steps_per_epoch(epoch)

    def split_options(self, split: str) -> EpisodeOptions:
        """The options that a split is read with."""
        return self._episode_feed(split).options

    def gives_masks(self, split: str = "train") -> bool:
        """Whether batches say which tokens are trained, from stored masks or a policy; else every token is."""
        return self._episode_feed(split).masks

    def rows_left_out(self, split: str = "train") -> int:
        """Rows of the present epoch that no rank gets, because they do not fill a global step (`epoch_drop_last`)."""
        feed, place, epoch = self._episode_feed(split), self._places[split], self.next_epoch(split)
        left = feed.rows.rows_of(epoch) - (place.position if epoch == place.epoch else 0)
        return left % feed.options.share.step if feed.options.drop_last else 0

    def data_report(self, split: str = "train") -> dict[str, Any]:
        """What of a split is not read: episodes that are too short, and tokens beyond the end of a row."""
        rows = self._episode_feed(split).rows
        lengths = rows.dataset.lengths
        short = lengths < self.options.min_tokens
        lost = rows.long_episodes()
        too_long, tokens = (0, 0) if lost is None else (lost.too_long, lost.tokens)
        dropped = too_long if self.options.overflow is LongEpisodes.DROP else 0
        return {
            "episodes": rows.episodes,
            "episodes_too_short": int(np.count_nonzero(short)),
            "episodes_cut": too_long - dropped,
            "episodes_dropped": dropped,
            "tokens_left_out": tokens + int(lengths[short].sum()),
            "trained_tokens_left_out": 0 if lost is None else lost.trained,
            "rows_left_out": self.rows_left_out(split) if self.options.sampling is SamplingMode.EPOCH else 0,
        }

    def __len__(self) -> int:
        """Batches of this rank in the train epoch that comes next."""
        if self.options.sampling is not SamplingMode.EPOCH:
            raise TypeError("batch_sampling_mode is random: the batches never end, so the loader has no length")
        return self.steps_per_epoch("train", self.next_epoch("train"))

    def __bool__(self) -> bool:
        """Always true, whatever the length."""
        return True

    def one_pass(self, split: str = "val") -> Iterator[tuple[torch.Tensor, ...]]:
        """The batches of the first epoch of a split, then no more: an evaluation.

        It does not move the split: `get_batch` continues as if nothing had been read. Every rank has as many batches.
        """
        feed = self._episode_feed(split)
        if feed.options.sampling is not SamplingMode.EPOCH:
            raise ConfigError(
                f"batch_sampling_mode of {split} is random, which has no end: give epoch (for val alone: "
                'val={"batch_sampling_mode": "epoch"})'
            )
        place = feed.begin()
        for _ in range(feed.steps_per_epoch(0)):
            step, tensors = self._prepare(split, place)
            yield self._to_device(tensors)
            place = step.after

    def last_episodes(self, split: str = "train") -> list[list[int]]:
        """The episodes in each row of the batch that `get_batch` gave last, as numbers in `dataset(split)`.

        Rows of padding are not there. For a loss that jumps: look at what the batch held.
        """
        if split not in self._last:
            raise ConfigError(f"get_batch({split!r}) was not called yet: there is no last batch")
        return self._episode_feed(split).episodes_of(self._last[split])

    def episodes_in_batch(self, number: int, split: str = "train") -> list[list[int]]:
        """The same for the batch `number` of a split, counted from the first one (0) of epoch 0 on this rank.

        Nothing is read and the split is not moved. Optimizer step s (from 0) with accumulation A has the batches
        s * A up to s * A + A - 1.
        """
        if number < 0:
            raise ConfigError(f"batch {number}: batches are counted from 0")
        feed = self._episode_feed(split)
        return feed.episodes_of(feed.step_at(feed.place_of(number)))

    def batches_left(self, split: str = "train", epochs: int = 1) -> int:
        """Batches of this rank from here to the end of the epoch with number `epochs - 1`; not for random mode."""
        return self._episode_feed(split).steps_left(self._places[split], epochs)

    def next_epoch(self, split: str = "train") -> int:
        """The epoch of the batch that comes next: `epoch`, or the one after it where that is used up."""
        epoch = self.epoch(split)
        return epoch if self.batches_left(split, epoch + 1) else epoch + 1

    def _episode_feed(self, split: str) -> EpisodeFeed:
        feed = self._feed(split)
        assert isinstance(feed, EpisodeFeed)
        return feed


def episode_options(
    config: TrainingConfig,
    tokenizer: Any,
    *,
    rank: int,
    world_size: int,
    policy: Policy | str | None,
    pack: bool,
    strategy: str | None,
    planning: str,
    pin: bool,
) -> EpisodeOptions:
    """Settle every option; a policy asks for masks by itself."""
    return EpisodeOptions(
        share=RankShare(batch_size=config.batch_size, rank=rank, world_size=world_size),
        block_size=config.block_size,
        sampling=config.sampling_in(DatasetMode.SFT_EPISODE),
        shuffle=config.epoch_shuffle,
        drop_last=config.epoch_drop_last,
        seed=config.epoch_seed,
        pad_id=_pad_id(config, tokenizer),
        min_tokens=config.episode_min_tokens,
        use_mask=config.use_loss_mask or policy is not None,
        policy=None if policy is None else find_policy(policy),
        pack=pack,
        strategy=strategy_named(strategy),
        planning=member(Planning, "planning", planning),
        overflow=LongEpisodes.CUT if config.overflow is None else config.overflow,
        pin=pin,
    )


def report_opened(opened: dict[str, EpisodeRows], options: EpisodeOptions, *, strict: bool) -> None:
    """Log each split; warn, or raise, when masks cannot be had and where episodes are longer than a row."""
    problems: list[str] = []
    for split, rows in opened.items():
        dataset = rows.dataset
        if options.use_mask and rows.weights is Weights.ONES:
            problems.append(dataset.mask_problem or f"{dataset.folder}: there is no mask.bin")
        left_out = len(dataset) - rows.episodes
        log.info(
            "[EpisodeLoader] split=%s episodes=%d tokens=%d shards=%d mask=%s%s",
            split,
            rows.episodes,
            dataset.tokens,
            len(dataset.shards),
            flag(dataset.has_masks),
            (f" shorter_than_{options.min_tokens}={left_out}" if left_out else "")
            + (f" planned_rows={rows.rows_of(0)}" if isinstance(rows, PlannedRows) else ""),
        )
    if problems:
        message = f"masks are asked for and cannot be had: {'; '.join(problems)}"
        if strict:
            raise ConfigError(message)
        warnings.warn(f"{message}; batches come without", UserWarning, stacklevel=3)
    for split, rows in opened.items():
        check_long_episodes(rows, f"[EpisodeLoader] split={split}", "block_size", spare=1)


def _pad_id(config: TrainingConfig, tokenizer: Any) -> int:
    if config.pad_token_id is not None:
        return config.pad_token_id
    eos = None if tokenizer is None else special_id(tokenizer, "eos")
    if eos is None:
        raise ConfigError(
            "rows need padding: set pad_token_id, or give a tokenizer with an eos id"
            + ("" if tokenizer is None else " (this one has none)")
        )
    return eos
