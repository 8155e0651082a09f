"""The spans of an episode loader's labels, from the stored kinds: a second feed that reads the same rows.

Its policy gives a token's span number in place of its weight. So the loader itself stays as it is, and a log can have
the loss of reasoning beside that of answers.
"""

from __future__ import annotations

from typing import Any

from chatmill.core.kinds import Part, RoleCode
from chatmill.label.policy import Policy
from chatmill.load.episodes import EpisodeFeed, GPTEpisodeDataLoader
from chatmill.train.losses import SPAN_FINAL, SPAN_REASONING

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


def span_feed(loader: Any, split: str) -> EpisodeFeed | None:
    """A feed of span numbers where the loader reads episodes with stored kinds, else None."""
    if not isinstance(loader, GPTEpisodeDataLoader) or "kinds" not in loader.dataset(split).columns:
        return None
    return loader.episode_feed(split).with_policy(SPAN_POLICY)
