"""The emitter: templates write runs of control ids and text into it; it encodes all text in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import Tokens, offsets_of, ranges
from chatmill.tokenizer.protocol import Encoded, Tokenizer

KIND_BITS = 6
"""A run is one integer: its source (a piece, or ~literal) above these bits, its kind in them."""
KIND_MASK = (1 << KIND_BITS) - 1


class Frame(NamedTuple):
    """What a template writes around one text: literal runs before and after, and a head that shares its piece."""

    before: tuple[int, ...]
    head: str
    """Fixed text that is encoded together with the text that follows; "" for none."""
    head_kind: int
    kind: int
    """Kind of the text itself."""
    after: tuple[int, ...]


def literal_run(literal: int, kind: int) -> int:
    """The integer that stands for a literal written as one run of this kind."""
    return (~literal << KIND_BITS) | kind


class Emitter:
    """Collects the runs of many conversations, then lays ids and kinds out as columns.

    A *literal* is a fixed sequence of ids that a template made once (control tokens, encoded headers). A *piece* is a
    text that is encoded as a whole. Both are written as runs: a run has one kind and belongs to one message.
    """

    def __init__(self) -> None:
        """An emitter for one batch of conversations."""
        self.stripped = 0
        """Characters of the current conversation that the template chose not to show."""
        self._runs: list[int] = []
        self._pieces: list[str] = []
        self._cut_runs: list[int] = []  # runs that end inside their piece
        self._cut_prefixes: list[str] = []
        self._mark_runs: list[int] = []  # where the message changes
        self._mark_messages: list[int] = []
        self._conversation_runs: list[int] = [0]
        self._first_piece = 0  # of the conversation that is being written
        self._message_counts: list[int] = []
        self._message_weights: list[float | None] = []
        self._stripped: list[int] = []

    def message(self, index: int) -> None:
        """What follows belongs to this message of the conversation; -1 for no message."""
        self._mark_runs.append(len(self._runs))
        self._mark_messages.append(index)

    def put(self, literal: int, kind: int) -> None:
        """Write a literal as one run."""
        self._runs.append((~literal << KIND_BITS) | kind)

    def text(self, text: str, kind: int) -> None:
        """Write a text as a piece and a run of its own."""
        self._runs.append((len(self._pieces) << KIND_BITS) | kind)
        self._pieces.append(text)

    def framed(self, frame: Frame, text: str) -> None:
        """Write a text in a frame; of a head that shares its piece, a token belongs to the part it starts in."""
        runs, source = self._runs, len(self._pieces) << KIND_BITS
        runs += frame.before
        if frame.head:
            self._cut_runs.append(len(runs))
            self._cut_prefixes.append(frame.head)
            runs.append(source | frame.head_kind)
            self._pieces.append(frame.head + text)
        else:
            self._pieces.append(text)
        runs.append(source | frame.kind)
        runs += frame.after

    def joined(self, parts: Sequence[tuple[str, int]]) -> None:
        """Write several (text, kind) parts as one piece; a token belongs to the part it starts in."""
        source, prefix = len(self._pieces) << KIND_BITS, ""
        for number, (text, kind) in enumerate(parts):
            if number:
                self._cut_runs.append(len(self._runs) - 1)
                self._cut_prefixes.append(prefix)
            self._runs.append(source | kind)
            prefix += text
        self._pieces.append(prefix)

    def end_conversation(self, weights: Sequence[float | None]) -> None:
        """Close a conversation; `weights` has one entry per message, None where it says nothing."""
        self._conversation_runs.append(len(self._runs))
        self._first_piece = len(self._pieces)
        self._message_counts.append(len(weights))
        self._message_weights += weights
        self._stripped.append(self.stripped)
        self.stripped = 0

    def discard_conversation(self) -> None:
        """Forget what was written since the last conversation was closed."""
        keep = self._conversation_runs[-1]
        del self._pieces[self._first_piece :], self._runs[keep:]
        while self._cut_runs and self._cut_runs[-1] >= keep:
            del self._cut_runs[-1], self._cut_prefixes[-1]
        while self._mark_runs and self._mark_runs[-1] >= keep:
            del self._mark_runs[-1], self._mark_messages[-1]
        self.stripped = 0

    def finish(self, tokenizer: Tokenizer, literals: Sequence[Sequence[int]]) -> tuple[Tokens, NDArray[np.int64]]:
        """Encode all pieces in one call and lay everything out; also characters stripped per conversation."""
        runs = np.array(self._runs, dtype=np.int64)
        sources = runs >> KIND_BITS
        encoded = tokenizer.encode_batch(self._pieces)
        literal_flat = np.array([i for ids in literals for i in ids], dtype=np.int32)
        literal_offsets = offsets_of(np.array([len(ids) for ids in literals], dtype=np.int64))
        run_lengths = self._run_lengths(sources, tokenizer, encoded, literal_offsets)
        run_offsets = offsets_of(run_lengths)
        ids = _interleave(sources, run_offsets, encoded[0], literal_flat, literal_offsets)
        conversation_runs = np.array(self._conversation_runs, dtype=np.int64)
        tokens = Tokens(
            ids=ids,
            offsets=run_offsets[conversation_runs],
            run_offsets=run_offsets,
            run_kinds=(runs & KIND_MASK).astype(np.uint8),
            run_messages=self._run_messages(len(runs)),
            conversation_runs=conversation_runs,
            message_offsets=offsets_of(np.array(self._message_counts, dtype=np.int64)),
            message_weights=np.array(self._message_weights, dtype=np.float32),
        )
        return tokens, np.array(self._stripped, dtype=np.int64)

    def _run_messages(self, runs: int) -> NDArray[np.int32]:
        marks = np.array([*self._mark_runs, runs], dtype=np.int64)
        return np.repeat(np.array(self._mark_messages, dtype=np.int32), np.diff(marks))

    def _run_lengths(
        self,
        sources: NDArray[np.int64],
        tokenizer: Tokenizer,
        encoded: Encoded,
        literal_offsets: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        lengths = np.empty(len(sources), dtype=np.int64)
        is_literal = sources < 0
        lengths[is_literal] = np.diff(literal_offsets)[~sources[is_literal]]
        lengths[~is_literal] = np.diff(encoded[1])[sources[~is_literal]]
        if self._cut_runs:
            cut = np.array(self._cut_runs, dtype=np.int64)
            points = tokenizer.split_points(encoded, sources[cut], self._cut_prefixes, self._pieces)
            ends, starts = lengths, np.zeros_like(lengths)  # of each run, inside its piece
            ends[cut] = points
            starts[cut + 1] = points
            lengths = ends - starts
        return lengths


def _interleave(
    sources: NDArray[np.int64],
    run_offsets: NDArray[np.int64],
    text_ids: NDArray[np.int32],
    literal_flat: NDArray[np.int32],
    literal_offsets: NDArray[np.int64],
) -> NDArray[np.int32]:
    """Lay literals and encoded pieces out in run order; pieces came in order, so their ids just fill the gaps."""
    is_literal = sources < 0
    lengths = np.diff(run_offsets)[is_literal]
    ids = np.empty(int(run_offsets[-1]), dtype=np.int32)
    at = ranges(run_offsets[:-1][is_literal], lengths)
    is_text = np.ones(len(ids), dtype=np.bool_)
    is_text[at] = False
    ids[is_text] = text_ids
    ids[at] = literal_flat[ranges(literal_offsets[~sources[is_literal]], lengths)]
    return ids
