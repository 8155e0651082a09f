"""The rows that Chatmill makes of the records a set was made of, as columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Conversation
from chatmill.core.tokens import Tokens
from chatmill.render.model_template import ModelTemplate
from chatmill.render.render import Rendered, render

Ints = NDArray[np.int64]
BATCH = 1_000
"""Records that are rendered at once."""


class SourceRow(NamedTuple):
    """One row, with the kind and the message of every token."""

    ids: NDArray[np.int32]
    kinds: NDArray[np.uint8]
    messages: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRows:
    """All rows of all records, one after the other."""

    tokens: Tokens
    ids: NDArray[np.int32]
    offsets: Ints
    kinds: NDArray[np.uint8]
    messages: NDArray[np.int32]
    """The message of each token, counted in its record; -1 for tokens of none."""
    records: Ints
    """The record of each row, in order."""
    doubtful: NDArray[np.bool_]
    """Rows with an answer whose mask cannot be proved."""
    refused: Counter[str]
    """Records that cannot be written, by reason."""
    count: int
    """All records."""

    def __len__(self) -> int:
        return len(self.records)

    @property
    def unproved(self) -> NDArray[np.bool_]:
        """Rows of records with a doubtful row: they are not judged."""
        return np.isin(self.records, self.records[self.doubtful])

    @property
    def token_weights(self) -> NDArray[np.float32]:
        """What the message of each token says about its training: NaN for nothing, and for tokens of no message."""
        firsts = np.repeat(self.tokens.message_offsets[:-1], self.tokens.lengths)
        numbers = np.where(self.messages >= 0, firsts + self.messages, -1)
        return np.append(self.tokens.message_weights, np.float32(np.nan))[numbers]

    def row(self, number: int) -> SourceRow:
        """Return one row."""
        span = slice(int(self.offsets[number]), int(self.offsets[number + 1]))
        return SourceRow(self.ids[span], self.kinds[span], self.messages[span])


def render_source(conversations: Iterable[Conversation], bound: ModelTemplate) -> SourceRows:
    """Render all records."""
    stream = iter(conversations)
    refused: Counter[str] = Counter()
    renderings: list[Rendered] = []
    records, count = [], 0
    while (batch := list(islice(stream, BATCH))) or not renderings:
        rendered = render(batch, bound, collect_failures=True)
        refused.update(error.code for _, error in rendered.failed)
        renderings.append(rendered)
        records.append(rendered.kept + count)
        count += len(batch)
    tokens = Tokens.joined([rendered.tokens for rendered in renderings])
    return SourceRows(
        tokens=tokens,
        ids=tokens.ids,
        offsets=tokens.offsets,
        kinds=tokens.kinds,
        messages=tokens.messages,
        records=np.concatenate(records),
        doubtful=np.concatenate([rendered.untrained for rendered in renderings]) > 0,
        refused=refused,
        count=count,
    )
