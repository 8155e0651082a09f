"""The spans of an episode loader's labels, from the stored kinds: a second feed that walks beside the loader's own.

The twin reads the same rows of the same dataset, but its policy gives a token's span number in place of its weight.
So the loader itself stays as it is, and a log can have the loss of reasoning beside that of answers.
"""

from __future__ import annotations

from typing import Any

import torch

from chatmill.core.kinds import Part, RoleCode
from chatmill.label.policy import Policy
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.train.span_loss import SPAN_FINAL, SPAN_REASONING

SPAN_POLICY = Policy(
    name="span_numbers",
    weights={
        (RoleCode.ASSISTANT, part): float(SPAN_REASONING if part is Part.REASONING else SPAN_FINAL)
        for part in Part
        if part is not Part.PAD
    },
)
SPAN_NAMES = {0: "other", SPAN_REASONING: "reasoning", SPAN_FINAL: "final"}
"""Names of the spans in a log; `other` is what is trained and is no assistant's."""


class SpanTwin:
    """Span numbers (rows, width) of one split's batches, asked for in the order in which the loader gives them."""

    def __init__(self, loader: GPTEpisodeDataLoader, split: str) -> None:
        """The loader's dataset must have kinds; see `twin_of`."""
        self._split = split
        self._feed = loader.episode_feed(split).with_policy(SPAN_POLICY)
        self.follow(loader)

    def follow(self, loader: GPTEpisodeDataLoader) -> None:
        """Move to the place of the loader."""
        self._place = self._feed.place_from_json(loader.state_dict()["splits"][self._split]["place"])

    def next(self) -> torch.Tensor:
        """The spans of the loader's next batch."""
        step = self._feed.step_at(self._place)
        self._place = step.after
        return self._feed.batch(step)[2].to(torch.uint8)


def twin_of(loader: Any, split: str) -> SpanTwin | None:
    """A twin where the loader reads episodes with stored kinds, else None."""
    if not isinstance(loader, GPTEpisodeDataLoader) or "kinds" not in loader.dataset(split).columns:
        return None
    return SpanTwin(loader, split)
