"""What a run reads, one batch at a time: a loader of spec 4, blocks of the post-training stream, any iterable."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from chatmill.core.kinds import Part, RoleCode
from chatmill.errors import ConfigError
from chatmill.label.policy import Policy
from chatmill.load.episodes import EpisodeFeed, GPTEpisodeDataLoader
from chatmill.load.packed_row_loader import PackedRowLoader
from chatmill.train.batch import TrainBatch, as_batch
from chatmill.train.config import TrainConfig
from chatmill.train.losses import SPAN_FINAL, SPAN_REASONING

log = logging.getLogger("chatmill.train")
SPAN_POLICY = Policy(
    name="span_numbers",
    weights={
        (RoleCode.ASSISTANT, part): float(SPAN_REASONING if part is Part.REASONING else SPAN_FINAL)
        for part in Part
        if part is not Part.PAD
    },
)
"""Gives a token's span number in place of its weight."""


class TrainFeed:
    """Batches of one split, on the device of the run, with their spans where these are known."""

    def __init__(
        self,
        loader: Any,
        device: torch.device,
        split: str = "train",
        *,
        assistant_only: bool = False,
        vocabulary: int | None = None,
    ) -> None:
        """A loader has `get_batch(split)`; anything else is iterated over once.

        `assistant_only`: tokens of others are not trained, where the dataset knows whose they are. `vocabulary`:
        embeddings of the model; an id at or above is refused.
        """
        self.loader, self.split = loader, split
        self._assistant_only, self._logged = assistant_only, False
        self._device = device
        self._spans = span_feed(loader, split)
        self._iterator: Iterator[Any] | None = None
        self._warned = False
        self._vocabulary = vocabulary

    def next(self) -> TrainBatch | None:
        """The next batch; None when the data ends."""
        try:
            given = self._take()
        except StopIteration:
            return None
        if isinstance(self.loader, GPTEpisodeDataLoader) and len(given) == 2 and not self._warned:
            self._warned = True
            log.warning(
                "the loader gives no masks, so every token is trained, padding included: use pack=True, or store masks"
            )
        spans = None
        if self._spans is not None:
            spans = self._spans.batch(self.loader.last_step(self.split))[2].to(torch.uint8)
        batch = as_batch(given, self._device, spans, vocabulary=self._vocabulary)
        return self._assistant_tokens(batch) if self._assistant_only else batch

    def _assistant_tokens(self, batch: TrainBatch) -> TrainBatch:
        """The batch with weight 0 on what is not the assistant's, in whatever way the masks were made."""
        if batch.spans is None or batch.weights is None:
            return batch
        own = batch.weights * (batch.spans != 0)
        if not self._logged and not torch.equal(own, batch.weights):
            self._logged = True
            log.info("post_training: the masks of the dataset train tokens of others too; the assistant's are trained")
        return replace(batch, weights=own)

    def _take(self) -> Any:
        if hasattr(self.loader, "get_batch"):
            return self.loader.get_batch(self.split)
        if self._iterator is None:
            self._iterator = iter(self.loader)
        return next(self._iterator)

    @property
    def fingerprint(self) -> str | None:
        """Of the data that is read; None where the loader cannot say."""
        own = getattr(self.loader, "fingerprint", None)
        if own is not None:
            return str(own)
        state = self.state()
        splits = state.get("splits") if isinstance(state, dict) else None
        return str(splits[self.split]["fingerprint"]) if splits and self.split in splits else None

    def state(self) -> Any:
        """The place of the loader; None where it has no state."""
        return self.loader.state_dict() if hasattr(self.loader, "state_dict") else None

    def load_state(self, state: Any) -> None:
        """Go on from a state."""
        if not hasattr(self.loader, "load_state_dict"):
            raise ConfigError(
                "this run cannot resume: its data is a plain iterable, which has no state; use a loader "
                "with state_dict and load_state_dict, or another `out`"
            )
        splits = state.get("splits") if isinstance(state, dict) else None
        if splits and self.split in splits:  # another split may have changed: it is not read from here
            state = {**state, "splits": {self.split: splits[self.split]}}
        self.loader.load_state_dict(state)

    def begin_again(self, state: Any) -> None:
        """Go back to the beginning: to this state of the loader, or to the start of an iterable."""
        self._iterator = None
        if state is not None:
            self.load_state(state)

    def batches(self, config: TrainConfig, first_epoch: int = 0) -> int | None:
        """How many batches the data has: those of its epochs, or the length of what ends; None: endless."""
        passes = config.epochs or 1
        if self._has_epochs:
            epochs = range(first_epoch, first_epoch + passes)
            endless = self.loader.is_endless(self.split)
            return None if endless else sum(self.loader.steps_per_epoch(self.split, epoch) for epoch in epochs)
        try:
            return len(self.loader) * (passes if hasattr(self.loader, "get_batch") else 1)
        except TypeError:
            return None

    def batches_left(self, config: TrainConfig, first_epoch: int = 0) -> int | None:
        """How many of them come after the place where the loader is now; None: the loader cannot say."""
        if not self._has_epochs or self.loader.is_endless(self.split):
            return None
        passes = 1 if self.loader.ends else config.epochs or 1
        return int(self.loader.batches_left(self.split, first_epoch + passes))

    def first_epoch(self) -> int:
        """The epoch that the next batch belongs to; 0 for data without epochs, or with one."""
        return int(self.loader.next_epoch(self.split)) if self._has_epochs and not self.loader.ends else 0

    @property
    def _has_epochs(self) -> bool:
        """Whether the loader is an `EpochLoader`, or wraps one."""
        return hasattr(self.loader, "is_endless")

    def refuse_used(self, config: TrainConfig) -> None:
        """Refuse a loader whose one pass is used up; warn about one that is partly used."""
        if not getattr(self.loader, "ends", False):
            return
        total, left = self.batches(config), self.batches_left(config)
        if total is None or left is None or left == total:
            return
        if not left:
            raise ConfigError(
                f"this {type(self.loader).__name__} was used before: all of its {total} batches were given, and it "
                "makes one pass. Make a new one for each fit"
            )
        log.warning(
            "this %s was used before: %d of its %d batches were given, and the rest is trained",
            type(self.loader).__name__,
            total - left,
            total,
        )

    def refuse_partial_pass(self) -> None:
        """`ConfigError` where the one pass of post-training would leave rows out, or train every token."""
        loader = self.loader
        if isinstance(loader, PackedRowLoader) and not loader.ends:
            raise ConfigError("post_training trains assistant tokens, and packed texts do not say which these are")
        if not isinstance(loader, GPTEpisodeDataLoader):
            return
        if not loader.gives_masks(self.split):
            raise ConfigError(
                f"post_training trains assistant tokens only, but the loader of {loader.directory} trains every token: "
                'give it policy="assistant" (where kinds are stored) or use_loss_mask=True'
            )
        left_out = loader.rows_left_out(self.split)
        if left_out:
            raise ConfigError(
                f"post_training sees every row once, but epoch_drop_last would leave out {left_out} of "
                f"{loader.directory}: set epoch_drop_last to false"
            )


def span_feed(loader: Any, split: str) -> EpisodeFeed | None:
    """A second feed of the same rows whose masks are span numbers; None without episodes that store kinds.

    So the loader itself stays as it is, and a log can have the loss of reasoning beside that of answers.
    """
    if not isinstance(loader, GPTEpisodeDataLoader) or "kinds" not in loader.dataset(split).columns:
        return None
    return loader.episode_feed(split).with_policy(SPAN_POLICY)
