"""The ragged batch: flat token ids of many conversations, and the runs of equal kind they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from chatmill.core.words import counted

ScalarT = TypeVar("ScalarT", bound=np.generic)


def common_length(a: NDArray[Any], b: NDArray[Any]) -> int:
    """Length of the common prefix of two arrays."""
    short = min(len(a), len(b))
    different = np.flatnonzero(a[:short] != b[:short])
    return int(different[0]) if len(different) else short


def first_difference(a: NDArray[Any], b: NDArray[Any]) -> int | None:
    """Find the first position at which two arrays differ, or where the shorter one ends; None if they are equal."""
    same = common_length(a, b)
    return None if same == len(a) == len(b) else same


def offsets_of(lengths: NDArray[np.integer | np.bool_]) -> NDArray[np.int64]:
    """Offsets of consecutive pieces: `[0, l0, l0+l1, ...]`, one more than there are lengths."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def segment_sums(values: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of each piece `values[offsets[i]:offsets[i + 1]]`, empty ones too."""
    sums = offsets_of(values)
    return sums[offsets[1:]] - sums[offsets[:-1]]


def ranges(starts: NDArray[np.integer], lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the concatenation of `arange(s, s + n)` for each start and length, without a loop."""
    total = int(lengths.sum())
    if total == 0:
        return np.empty(0, dtype=np.int64)
    shift = np.asarray(starts, dtype=np.int64) - offsets_of(lengths)[:-1]
    return np.arange(total, dtype=np.int64) + np.repeat(shift, lengths)


@dataclass(frozen=True, kw_only=True, repr=False)
class Tokens:
    """Token ids of C documents in one flat array, cut into R runs; a run never crosses a document.

    Token `t` of document `c` is `ids[offsets[c] + t]`. All runs together cover all tokens, in order. A document is one
    rendering of a conversation, which may need several.
    """

    ids: NDArray[np.int32]
    """Token ids, N of them."""
    offsets: NDArray[np.int64]
    """C + 1 offsets into `ids`; the first is 0, the last N."""
    run_offsets: NDArray[np.int64]
    """R + 1 offsets into `ids`; every value of `offsets` is among them. A run may be empty."""
    run_kinds: NDArray[np.uint8]
    """Kind of each run (see `chatmill.core.kinds`)."""
    run_messages: NDArray[np.int32]
    """Index of the message each run belongs to, counted in its conversation; -1 for tokens of no message."""
    document_runs: NDArray[np.int64]
    """C + 1 offsets into the runs: those of each document."""
    message_offsets: NDArray[np.int64]
    """C + 1 offsets into the messages of the batch (a message may have no run)."""
    message_weights: NDArray[np.float32]
    """The weight each message brought along; NaN where it brought none."""
    logprobs: NDArray[np.float32] | None = None
    """Log-probability of each token for the model that sampled it, NaN where none is known; None: of no token."""
    part_weights: NDArray[np.float32] | None = None
    """Weight of each token in place of its message's, the same within a run, NaN where the message's holds; None: no
    part of a message has a weight of its own."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        return f"Tokens({counted(len(self), 'conversation')}, {counted(len(self.ids), 'token')})"

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens per conversation."""
        return np.diff(self.offsets)

    @cached_property
    def run_lengths(self) -> NDArray[np.int64]:
        """Tokens per run; kept, so it cannot be written to."""
        lengths = np.diff(self.run_offsets)
        lengths.flags.writeable = False
        return lengths

    @property
    def kinds(self) -> NDArray[np.uint8]:
        """Kind of every token (a new array of N values)."""
        return np.repeat(self.run_kinds, self.run_lengths)

    @property
    def messages(self) -> NDArray[np.int32]:
        """Message index of every token, counted in its conversation (a new array of N values)."""
        return np.repeat(self.run_messages, self.run_lengths)

    def per_token(self, run_values: NDArray[ScalarT]) -> NDArray[ScalarT]:
        """Spread one value per run over the tokens of the runs."""
        return np.repeat(run_values, self.run_lengths)

    def conversation(self, index: int) -> Tokens:
        """Return one conversation as a batch of its own."""
        return self.take(np.array([index]))

    def take(self, chosen: NDArray[np.int64]) -> Tokens:
        """Return the chosen documents, in that order."""
        lengths, runs = self.lengths[chosen], np.diff(self.document_runs)[chosen]
        at, run_at = ranges(self.offsets[chosen], lengths), ranges(self.document_runs[chosen], runs)
        messages = np.diff(self.message_offsets)[chosen]
        return Tokens(
            ids=self.ids[at],
            offsets=offsets_of(lengths),
            run_offsets=offsets_of(self.run_lengths[run_at]),
            run_kinds=self.run_kinds[run_at],
            run_messages=self.run_messages[run_at],
            document_runs=offsets_of(runs),
            message_offsets=offsets_of(messages),
            message_weights=self.message_weights[ranges(self.message_offsets[chosen], messages)],
            logprobs=None if self.logprobs is None else self.logprobs[at],
            part_weights=None if self.part_weights is None else self.part_weights[at],
        )

    @classmethod
    def joined(cls, parts: Sequence[Tokens]) -> Tokens:
        """Return the documents of several batches, one batch after the other."""
        return cls(
            ids=np.concatenate([part.ids for part in parts]),
            offsets=offsets_of(np.concatenate([part.lengths for part in parts])),
            run_offsets=offsets_of(np.concatenate([part.run_lengths for part in parts])),
            run_kinds=np.concatenate([part.run_kinds for part in parts]),
            run_messages=np.concatenate([part.run_messages for part in parts]),
            document_runs=offsets_of(np.concatenate([np.diff(part.document_runs) for part in parts])),
            message_offsets=offsets_of(np.concatenate([np.diff(part.message_offsets) for part in parts])),
            message_weights=np.concatenate([part.message_weights for part in parts]),
            logprobs=_joined_or_none([(part.logprobs, len(part.ids)) for part in parts]),
            part_weights=_joined_or_none([(part.part_weights, len(part.ids)) for part in parts]),
        )


def _joined_or_none(columns: Sequence[tuple[NDArray[np.float32] | None, int]]) -> NDArray[np.float32] | None:
    """Return columns one after another, NaN for one that is missing; None if all are. Each comes with its length."""
    if all(column is None for column, _ in columns):
        return None
    return np.concatenate([np.full(size, np.float32(np.nan)) if c is None else c for c, size in columns])
