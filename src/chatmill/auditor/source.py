"""The rows that Chatmill makes of the records a set was made of, as columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Conversation
from chatmill.core.tokens import Tokens, offsets_of
from chatmill.render.model_template import ModelTemplate
from chatmill.render.render import Rendered, render

Ints = NDArray[np.int64]
BATCH = 1_000
"""Records that are rendered at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRow:
    """One row, with the kind and the message of every token."""

    ids: Ints
    kinds: NDArray[np.uint8]
    messages: Ints


@dataclass(slots=True, kw_only=True)
class SourceRows:
    """All rows of all records, one behind the other."""

    ids: NDArray[np.int32]
    kinds: NDArray[np.uint8]
    messages: NDArray[np.int32]
    """The message of each token, counted in its record; -1 for tokens of none."""
    offsets: Ints
    """One more than there are rows."""
    records: Ints
    """The record of each row, in order."""
    message_offsets: Ints
    """Offsets of each row's messages in `weights`."""
    weights: NDArray[np.float32]
    """What each message of each row says about its training: NaN for nothing, 0 for `train: false`."""
    doubtful: NDArray[np.bool_]
    """Rows with an answer whose mask cannot be proved."""
    refused: Counter[str] = field(default_factory=Counter)
    """Records that cannot be written, by reason."""
    count: int = 0
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
        firsts = np.repeat(self.message_offsets[:-1], np.diff(self.offsets))
        numbers = np.where(self.messages >= 0, firsts + self.messages, -1)
        return np.append(self.weights, np.float32(np.nan))[numbers]

    def whole(self) -> tuple[Ints, Ints]:
        """Records, and the row of each that shows the whole conversation: its last one."""
        last = np.append(self.records[1:] != self.records[:-1], True)[: len(self.records)]
        return self.records[last], np.flatnonzero(last)

    def row(self, number: int) -> SourceRow:
        """One row."""
        span = slice(int(self.offsets[number]), int(self.offsets[number + 1]))
        return SourceRow(
            ids=self.ids[span].astype(np.int64), kinds=self.kinds[span], messages=self.messages[span].astype(np.int64)
        )


def render_source(conversations: Iterable[Conversation], bound: ModelTemplate) -> SourceRows:
    """Render all records."""
    stream = iter(conversations)
    refused: Counter[str] = Counter()
    batches: list[Rendered] = []
    firsts: list[int] = []
    count = 0
    while batch := list(islice(stream, BATCH)):
        rendered = render(batch, bound, collect_failures=True)
        refused.update(error.code for _, error in rendered.failed)
        batches.append(rendered)
        firsts.append(count)
        count += len(batch)
    tokens = [one.tokens for one in batches]
    records = _joined([one.kept + first for one, first in zip(batches, firsts, strict=True)], np.int64)
    return SourceRows(
        ids=_joined([one.ids for one in tokens], np.int32),
        kinds=_joined([one.kinds for one in tokens], np.uint8),
        messages=_joined([one.messages for one in tokens], np.int32),
        offsets=offsets_of(_joined([one.lengths for one in tokens], np.int64)),
        records=records,
        message_offsets=offsets_of(_joined([_message_counts(one) for one in tokens], np.int64)),
        weights=_joined([one.message_weights for one in tokens], np.float32),
        doubtful=_joined([one.untrained for one in batches], np.int64) > 0,
        refused=refused,
        count=count,
    )


def _message_counts(tokens: Tokens) -> Ints:
    return np.diff(tokens.message_offsets)


def _joined(parts: list[NDArray[np.generic]], dtype: type[np.generic]) -> NDArray:  # type: ignore[type-arg]
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype=dtype)
