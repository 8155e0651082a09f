"""The episode loader: whole conversations in rows of fixed shape, in a deterministic order."""

from __future__ import annotations

import logging
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.core.special_ids import special_id
from chatmill.core.tokens import offsets_of
from chatmill.errors import ConfigError
from chatmill.label.policy import Policy
from chatmill.load.config import DatasetMode, TrainingConfig, as_training_config
from chatmill.load.episode_rows import EpisodeRows, long_episodes, trained_tokens_cut, warn_of_long_episodes
from chatmill.load.loader import BatchLoader, RowStep, directory_of
from chatmill.store.episode_layout import SPLITS
from chatmill.store.episodes import EpisodeDataset

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
        order: str | None = None,
        window: int | None = None,
        prefetch: int | None = None,
        device: Any = None,
        pack: bool = False,
        packing_strategy: str | None = None,
        policy: Policy | str | None = None,
        teacher: bool = False,
        logprobs: bool = False,
        strict: bool = False,
        pin_memory: bool | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Open `dataset_dir` (or the config's); an option that is None is as the config says.

        Of episodes longer than a row the first tokens are read; what is lost is counted and logged as a warning.

        - `order`, `window`: `windows` permutes shards, and rows inside windows of `window` shards, so that each shard
          is read once an epoch; `global` (the default) permutes all rows, and needs the whole dataset at a time.
        - `prefetch`: bytes of a dataset at a URL that are fetched ahead; default: this window and the next one.
        - `packing_strategy`: how `pack=True` plans its rows (`chatmill.pack.plan.Strategy`); default: that of the
          build, else best_fit.
        - `policy`: choose what is trained from the stored kinds, by name or as a `Policy`, not from the masks.
        - `teacher`: give `teacher_ids`, `teacher_logprobs` (batch, block, k) and `teacher_rest`, aligned with y, as the
          last three of a batch, or as `batch.teacher` of a packed one; -inf if there is no entry.
        - `logprobs`: give the log-probabilities of sampled tokens, float32 and aligned with y, after the mask, or as
          `batch.logprobs` of a packed one; NaN where none is known, 0 on padding.
        - `epoch_shuffle`, `epoch_drop_last`: if nothing sets them, val is given in order and whole, the same in
          every pass.
        - `strict`: masks that are asked for and are missing or of the wrong length are errors instead of a warning.
        - `pin_memory`: by default when the device is a GPU.
        """
        options = {
            "use_loss_mask": use_loss_mask,
            "batch_sampling_mode": batch_sampling_mode,
            "epoch_shuffle": epoch_shuffle,
            "epoch_drop_last": epoch_drop_last,
            "epoch_seed": epoch_seed,
            "pad_token_id": pad_token_id,
            "episode_min_tokens": episode_min_tokens,
            "order": order,
            "window": window,
            "prefetch": prefetch,
            "pack": pack or None,
            "packing_strategy": packing_strategy,
            "policy": policy,
            "teacher": teacher or None,
            "logprobs": logprobs or None,
        }
        overrides = {name: value for name, value in options.items() if value is not None}
        chosen = as_training_config(config).replace(dataset_mode=DatasetMode.SFT_EPISODE, **overrides)
        chosen = chosen.replace(pad_token_id=_pad_id(chosen, tokenizer))
        if chosen.policy is not None and use_loss_mask is False:
            raise ConfigError(
                f"policy {chosen.policy!r} chooses what is trained, but use_loss_mask=False refuses masks"
            )
        self.directory = directory_of(dataset_dir, chosen)
        splits = [split for split in SPLITS if split == "train" or (self.directory / split).exists()]
        datasets = {split: EpisodeDataset(self.directory, split, strict=strict) for split in splits}
        for episodes in datasets.values():
            _refuse_unfit(episodes)
        opened = {split: EpisodeRows(episodes, chosen.for_split(split)) for split, episodes in datasets.items()}
        _report_opened(opened, chosen, strict=strict)
        self._episodes = opened
        super().__init__(
            opened,
            chosen,
            dataset=str(self.directory),
            rank=rank,
            world_size=world_size,
            device=device,
            pin_memory=pin_memory,
        )

    def dataset(self, split: str = "train") -> EpisodeDataset:
        """Return the dataset that a split is read from."""
        return self.episode_rows(split).dataset

    def episode_rows(self, split: str = "train") -> EpisodeRows:
        """Return the rows of a split."""
        self.rows(split)
        return self._episodes[split]

    def rows_left_out(self, split: str = "train") -> int:
        """Rows of the present epoch that no rank gets, because they do not fill a global step (`epoch_drop_last`)."""
        rows, place, epoch = self.rows(split), self._places[split], self.next_epoch(split)
        left = rows.rows_of(epoch) - (place.position if epoch == place.epoch else 0)
        return left % self._share.step if self._configs[split].epoch_drop_last else 0

    def data_report(self, split: str = "train") -> dict[str, Any]:
        """Return what of a split is not read: episodes that are too short, and tokens beyond the end of a row."""
        rows = self.episode_rows(split)
        lengths = rows.dataset.lengths
        short = lengths < self.config.episode_min_tokens
        long = long_episodes(rows)
        return {
            "episodes": rows.episodes,
            "episodes_too_short": int(np.count_nonzero(short)),
            "episodes_cut": len(long),
            "tokens_left_out": int((lengths[long] - rows.width).sum()) + int(lengths[short].sum()),
            "trained_tokens_left_out": trained_tokens_cut(rows),
            "rows_apart": rows.rows_apart(),
            "rows_left_out": 0 if self.is_endless() else self.rows_left_out(split),
        }

    def last_episodes(self, split: str = "train") -> list[list[int]]:
        """Return the episodes in each row of the batch that `get_batch` gave last, as numbers in `dataset(split)`.

        Rows of padding are not there. For a loss that jumps: look at what the batch held.
        """
        return self._episodes_of(split, self.last_step(split))

    def episodes_in_batch(self, number: int, split: str = "train") -> list[list[int]]:
        """Return the same for the batch `number` of a split, counted from the first one (0) of epoch 0 on this rank.

        Nothing is read and the split is not moved. Optimizer step s (from 0) with accumulation A has the batches
        s * A up to s * A + A - 1.
        """
        return self._episodes_of(split, self.step_number(number, split))

    def _episodes_of(self, split: str, step: RowStep) -> list[list[int]]:
        """Return the numbers of the episodes in each row of a step, in the order in which they are in the row."""
        numbers, counts = self.episode_rows(split).documents(step.epoch, step.rows)
        return [numbers[a:b].tolist() for a, b in pairwise(offsets_of(counts).tolist())]

    def _announce(self, split: str, epoch: int) -> None:
        """Log one line at each epoch's start."""
        config, rows = self._configs[split], self.episode_rows(split)
        log.info(
            "[EpisodeLoader] split=%s epoch=%d episodes=%d batches=%d shuffle=%s drop_last=%s pad_id=%d mask=%s%s",
            split,
            epoch,
            rows.episodes,
            self.steps_per_epoch(split, epoch),
            _flag(config.epoch_shuffle),
            _flag(config.epoch_drop_last),
            config.pad_token_id,
            _flag(self.gives_masks(split)),
            f" packed_rows={rows.rows_of(epoch)}" if config.pack else "",
        )


def _refuse_unfit(dataset: EpisodeDataset) -> None:
    """Refuse data of which batches of tokens would lose something."""
    if dataset.has_sides:
        raise ConfigError(
            f"{dataset.folder} holds answers that people compared (preferences: pairs), and this loader would "
            "train the rejected ones too: use to_hf_dataset, or an export for a trainer of preferences"
        )
    if dataset.has_pictures:
        raise ConfigError(
            f"{dataset.folder} holds pictures, and this loader gives tokens alone: use to_hf_dataset and "
            "PictureCollator"
        )


def _report_opened(opened: dict[str, EpisodeRows], config: TrainingConfig, *, strict: bool) -> None:
    """Log each split; warn or raise if masks are missing or episodes are longer than a row."""
    problems: list[str] = []
    for split, rows in opened.items():
        dataset = rows.dataset
        if config.wants_masks and not rows.has_masks:
            problems.append(dataset.mask_problem or f"{dataset.folder}: mask.bin is missing")
        left_out = len(dataset) - rows.episodes
        log.info(
            "[EpisodeLoader] split=%s episodes=%d tokens=%d shards=%d mask=%s%s",
            split,
            rows.episodes,
            dataset.tokens,
            len(dataset.shards),
            _flag(dataset.has_masks),
            f" shorter_than_{config.episode_min_tokens}={left_out}" if left_out else "",
        )
    if problems:
        message = f"masks are asked for and cannot be had: {'; '.join(problems)}"
        if strict:
            raise ConfigError(message)
        warnings.warn(f"{message}; batches come without", UserWarning, stacklevel=3)
    for split, rows in opened.items():
        if rows.window is not None:
            log.info(
                "[EpisodeLoader] split=%s order=windows window=%d: documents of one shard are %s rows apart "
                "on average, and about %s in a global order",
                split,
                rows.window,
                f"{rows.rows_apart():,.0f}",
                f"{rows.rows_of(0) / 3:,.0f}",
            )
        for sentence in rows.policy_losses():
            log.warning("[EpisodeLoader] split=%s: %s", split, sentence)
        warn_of_long_episodes(rows, f"[EpisodeLoader] split={split}")


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


def _flag(value: bool) -> str:
    """`true` or `false`, as the log lines have it."""
    return "true" if value else "false"
