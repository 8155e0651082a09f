"""The token-stream loader: random windows of flat token files, each inside one shard; and `make_loader`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.core.tokens import offsets_of
from chatmill.errors import ConfigError, FormatError
from chatmill.load.config import DatasetMode, SamplingMode, as_training_config
from chatmill.load.loader import BatchLoader, directory_of
from chatmill.load.row_buffer import LaidRows, RowBuffer
from chatmill.load.rows import Ints, Rows
from chatmill.store.episode_layout import SPLITS
from chatmill.store.token_files import TokenFiles

log = logging.getLogger(__name__)


class WindowRows(Rows):
    """The windows of block_size + 1 tokens of one split, numbered over all shards."""

    def __init__(self, files: TokenFiles, *, width: int) -> None:
        """Count the windows of each shard; a split without any is an error."""
        super().__init__(str(files.folder), width=width)
        self.data, self.has_masks = files, files.mask_dtype is not None
        self.weight_dtype = np.dtype(files.mask_dtype or np.uint8)
        self._offsets = offsets_of(np.maximum(files.tokens - width + 1, 0))
        self.order_facts = {"windows": self.rows_of(0)}
        if not self._offsets[-1]:
            raise FormatError(
                f"{files.folder}: no window of block_size + 1 = {width} tokens fits: the largest of its "
                f"{len(files.shards)} shards has {int(files.tokens.max(initial=0)):,} tokens"
            )

    def rows_of(self, epoch: int) -> int:
        """Windows in all shards."""
        return int(self._offsets[-1])

    def lay(self, buffer: RowBuffer, epoch: int, rows: Ints, slots: Ints) -> LaidRows:
        """Lay windows, each of which fills its slot."""
        numbers = np.searchsorted(self._offsets, rows, side="right") - 1
        starts = rows - self._offsets[numbers]
        places = slots * self.width
        for number in dict.fromkeys(numbers.tolist()):
            mine = numbers == number
            shard = self.data.shards[number]
            count = int(np.count_nonzero(mine))
            span = starts[mine].tolist(), [self.width] * count, places[mine].tolist()
            buffer.lay_ids(shard.token_ids, *span)
            if buffer.weights is not None:
                buffer.lay_weights(shard.mask, *span)
        return LaidRows(slots=slots, starts=np.zeros_like(slots), lengths=np.full_like(slots, self.width))


class GPTDataLoader(BatchLoader):
    """Random windows of a stream of tokens: `(x, y)` or `(x, y, mask)`, each `(batch_size, block_size)`.

    Reads `train/*.bin` and `val/*.bin` (uint32), or the `tokens.bin` files of an episode dataset.
    """

    kind = "token_stream"

    def __init__(
        self,
        config: Any,
        tokenizer: Any = None,
        dataset_dir: str | Path | None = None,
        use_loss_mask: bool = False,
        *,
        device: Any = None,
        pin_memory: bool | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Open `dataset_dir` (or the config's). The tokenizer is not needed: windows have no padding.

        The draws have the config's `epoch_seed`; its other epoch options are for episodes. Masks are given where
        `use_loss_mask` or the config asks for them; missing masks are an error.
        """
        config = as_training_config(config).replace(dataset_mode=DatasetMode.TOKEN_STREAM)
        self.tokenizer = tokenizer
        use_loss_mask = use_loss_mask or config.use_loss_mask
        if config.policy is not None:
            raise ConfigError(
                f"policy {config.policy!r} chooses what is trained in episodes; windows of a token_stream have stored "
                "masks alone: use use_loss_mask, or dataset_mode sft_episode"
            )
        if config.batch_sampling_mode is SamplingMode.EPOCH:
            log.warning("[TokenLoader] batch_sampling_mode=epoch is for sft_episode; windows are drawn at random")
        self.directory = directory_of(dataset_dir, config)
        splits = [s for s in SPLITS if s == "train" or (self.directory / s).exists()]
        opened = {split: TokenFiles(self.directory / split) for split in splits}
        problems = [f.mask_problem for f in opened.values() if use_loss_mask and f.mask_problem]
        if problems:
            raise ConfigError(
                f"masks are asked for and cannot be had: {'; '.join(problems)}. Without them every token would be "
                "trained: set use_loss_mask to false to do that on purpose"
            )
        # options for episodes alone do not apply: windows have no padding and are drawn at random
        chosen = config.replace(use_loss_mask=use_loss_mask, batch_sampling_mode=SamplingMode.RANDOM, pack=False)
        rows = {split: WindowRows(files, width=chosen.block_size + 1) for split, files in opened.items()}
        for split, files in opened.items():
            log.info(
                "[TokenLoader] split=%s shards=%d tokens=%d windows=%d mask=%s",
                split,
                len(files.shards),
                int(files.tokens.sum()),
                rows[split].rows_of(0),
                "true" if files.mask_dtype is not None else "false",
            )
        super().__init__(
            rows,
            chosen,
            dataset=str(self.directory),
            rank=rank,
            world_size=world_size,
            device=device,
            pin_memory=pin_memory,
        )


def make_loader(
    config: Any, dataset_dir: str | Path | None = None, tokenizer: Any = None, **options: Any
) -> BatchLoader:
    """Return a `GPTEpisodeDataLoader` for `dataset_mode` sft_episode, else a `GPTDataLoader`.

    `config` is a `TrainingConfig`, the path of an XML or YAML file, a mapping, or an object with the attributes;
    `options` are keyword arguments of the loader, such as `device` or `rank`.
    """
    settings = as_training_config(config)
    if settings.dataset_mode is DatasetMode.TOKEN_STREAM:
        return GPTDataLoader(settings, tokenizer, dataset_dir, **options)
    from chatmill.load.episodes import GPTEpisodeDataLoader

    return GPTEpisodeDataLoader(settings, tokenizer, dataset_dir, **options)
