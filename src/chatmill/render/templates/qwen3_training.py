"""Qwen3 for training: the thinking block stands in every assistant turn, so that turns never change later."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversations import Conversations
from chatmill.render.template import Ints
from chatmill.render.templates.qwen3 import Qwen3


class Qwen3Training(Qwen3):
    """Equal to TRL's training template in ids and, with the policy `trl`, in what is trained."""

    name = "qwen3_training"
    prefix_stable = True
    default_policy = "trl"
    declares = (
        "Every assistant turn has a thinking block, empty where there is no reasoning; newlines around reasoning and "
        "before the answer are trimmed; reasoning written as <think>...</think> inside a content without reasoning of "
        "its own is taken out of it."
    )

    def _shows_reasoning(self, index: int, count: int, last_query: int, reasoning: str) -> bool:
        return True

    def _places_of(self, batch: Conversations, who: Ints) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Every message is as if it were the last one."""
        every = np.ones(len(who), dtype=np.bool_)
        return every, every


TEMPLATE = Qwen3Training
