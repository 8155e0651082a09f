"""The token-stream loader: random windows of flat token files, each inside one shard."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of
from chatmill.errors import ConfigError, FormatError
from chatmill.load.config import DatasetMode, SamplingMode, as_training_config
from chatmill.load.distributed import rank_and_world
from chatmill.load.loader import BatchLoader, SplitFeed, choose_device, directory_of
from chatmill.load.order import Draws, EpochPlace, RankShare
from chatmill.load.stage import Stage
from chatmill.store.episode_layout import SPLITS
from chatmill.store.token_files import TokenFiles

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStep:
    """This rank's windows of one global step, as numbers over all windows of the split."""

    windows: NDArray[np.int64]
    after: EpochPlace


class WindowFeed(SplitFeed):
    """The batches of one split: windows of block_size + 1 tokens, every one of the split equally likely."""

    def __init__(
        self, files: TokenFiles, share: RankShare, block_size: int, *, seed: int, use_mask: bool, pin: bool
    ) -> None:
        """Count the windows of each shard; a split without any is an error."""
        self._files, self._share, self._block, self._seed = files, share, block_size, seed
        self._offsets = offsets_of(np.maximum(files.tokens - block_size, 0))
        if not self._offsets[-1]:
            raise FormatError(
                f"{files.folder}: no window of block_size + 1 = {block_size + 1} tokens fits: the largest of its "
                f"{len(files.shards)} shards has {int(files.tokens.max(initial=0)):,} tokens"
            )
        self._draws = Draws(seed, self.windows)
        dtype = files.mask_dtype if use_mask else None
        self._stage = Stage(share.batch_size, block_size, pad_id=0, weights=dtype, pin=pin)

    @property
    def windows(self) -> int:
        """Windows in all shards."""
        return int(self._offsets[-1])

    @property
    def fingerprint(self) -> str:
        """Of the token files."""
        return self._files.fingerprint

    @property
    def order(self) -> dict[str, Any]:
        """What gives a position its meaning."""
        return {"epoch_seed": self._seed, "windows": self.windows}

    def step_at(self, place: EpochPlace) -> WindowStep:
        """The draws of this rank at a position."""
        share = self._share
        windows = self._draws.take(place.position + share.first, share.batch_size)
        return WindowStep(windows=windows, after=EpochPlace(position=place.position + share.step))

    def batch(self, step: WindowStep) -> tuple[torch.Tensor, ...]:
        """`(x, y)` or `(x, y, mask)`."""
        stage = self._stage
        numbers = np.searchsorted(self._offsets, step.windows, side="right") - 1
        starts = step.windows - self._offsets[numbers]
        places = np.arange(len(numbers)) * stage.width
        for number in dict.fromkeys(numbers.tolist()):
            mine = numbers == number
            shard = self._files.shard(number)
            count = int(np.count_nonzero(mine))
            span = starts[mine].tolist(), [stage.width] * count, places[mine].tolist()
            stage.lay_ids(shard.token_ids, *span)
            if stage.weights is not None:
                stage.lay_weights(shard.mask, *span)
        return stage.tensors(len(numbers))

    def unpin(self) -> None:
        """From now on make batches in ordinary memory."""
        self._stage.pin = False


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
        check: bool = False,
        prefetch: bool = True,
        pin_memory: bool | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Open `dataset_dir` (or the config's). The tokenizer is not needed: windows have no padding.

        The draws have the config's `epoch_seed`; its other epoch options are for episodes. Masks are given where
        `use_loss_mask` or the config asks for them; where they cannot be had, that is an error. `check`: compare files
        of an episode dataset with the hashes of its manifest before they are read.
        """
        self.config = as_training_config(config)
        self.tokenizer = tokenizer
        use_loss_mask = use_loss_mask or self.config.use_loss_mask
        if self.config.sampling_in(DatasetMode.TOKEN_STREAM) is SamplingMode.EPOCH:
            log.warning("[TokenLoader] batch_sampling_mode=epoch is for sft_episode; windows are drawn at random")
        self.rank, self.world_size = rank_and_world(rank, world_size)
        self.batch_size, self.block_size = self.config.batch_size, self.config.block_size
        self.directory = directory_of(dataset_dir, self.config)
        device = choose_device(device, self.config.device)
        share = RankShare(batch_size=self.batch_size, rank=self.rank, world_size=self.world_size)
        splits = [s for s in SPLITS if s == "train" or (self.directory / s).exists()]
        opened = {split: TokenFiles(self.directory / split, check=check) for split in splits}
        problems = [f.mask_problem for f in opened.values() if use_loss_mask and f.mask_problem]
        if problems:
            raise ConfigError(
                f"masks are asked for and cannot be had: {'; '.join(problems)}. Without them every token would be "
                "trained: set use_loss_mask to false to do that on purpose"
            )
        feeds = {
            split: WindowFeed(
                files,
                share,
                self.block_size,
                seed=self.config.epoch_seed,
                use_mask=use_loss_mask,
                pin=str(device).startswith("cuda") if pin_memory is None else pin_memory,
            )
            for split, files in opened.items()
        }
        for split, files in opened.items():
            log.info(
                "[TokenLoader] split=%s shards=%d tokens=%d windows=%d mask=%s",
                split,
                len(files.shards),
                int(files.tokens.sum()),
                feeds[split].windows,
                "true" if files.mask_dtype is not None else "false",
            )
        super().__init__(feeds, dataset=str(self.directory), device=device, prefetch=prefetch)
