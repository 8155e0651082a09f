"""The emitter: templates write control ids and text into it; it encodes all text in one call and lays out columns.

What a template writes is a sequence of *frames*. A frame is fixed: literal runs, and at most one place for a text. So
writing a message costs two list entries, and everything else is done for the whole batch by NumPy at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Message, Role
from chatmill.core.tokens import Tokens, offsets_of, ranges
from chatmill.tokenizer.protocol import Encoded, Tokenizer

KIND_BITS = 6
KIND_MASK = (1 << KIND_BITS) - 1
"""A run of a frame is one integer: for a literal `~literal` above these bits (so it is negative), and the kind in them;
for a part of the frame's text the kind alone."""


class Frame(NamedTuple):
    """What stands around one text: a handle into a `FrameTable`, and the text it puts before that text."""

    number: int
    head: str
    """Fixed text that is encoded together with the text that follows; "" for none."""


class FrameTable:
    """The literals and frames of one template, made when it is bound to a tokenizer."""

    def __init__(self) -> None:
        """An empty table."""
        self.literals: list[list[int]] = []
        self.frames: list[tuple[int, ...]] = []
        """The runs of each frame."""
        self.heads: list[str] = []
        self._numbers: dict[tuple[int, ...], int] = {}

    def literal(self, ids: Sequence[int]) -> int:
        """Keep a fixed sequence of ids; its handle."""
        self.literals.append(list(ids))
        return len(self.literals) - 1

    def add(self, runs: tuple[int, ...], head: str = "") -> int:
        """Keep a frame; its number."""
        self.frames.append(runs)
        self.heads.append(head)
        return len(self.frames) - 1

    def number(self, runs: tuple[int, ...]) -> int:
        """The number of a frame without a head, kept once however often it is asked for."""
        found = self._numbers.get(runs)
        if found is None:
            found = self._numbers[runs] = self.add(runs)
        return found


def literal_run(literal: int, kind: int) -> int:
    """A literal as a run of this kind."""
    return (~literal << KIND_BITS) | kind


class Emitter:
    """Collects what a template writes for many conversations.

    A *literal* is a fixed sequence of ids that a template made once (control tokens, encoded headers). A *piece* is a
    text that is encoded as a whole. Both are written as runs: a run has one kind and belongs to one message.
    """

    def __init__(self, table: FrameTable) -> None:
        """An emitter for one batch of conversations of one template."""
        self.stripped = 0
        """Characters of the current conversation that the template chose not to show."""
        self._table = table
        self._events: list[int] = []  # frames, in order
        self._pieces: list[str] = []  # the text of every frame that has a place for one
        self._cuts: list[tuple[int, int, str]] = []  # event, part, and what stands before the next part of its piece
        self._mark_events: list[int] = []  # where the message changes
        self._mark_messages: list[int] = []
        self._conversation_events: list[int] = [0]
        self._first_piece = 0  # of the conversation that is being written
        self._message_counts: list[int] = []
        self._message_weights: list[float | None] = []
        self._stripped: list[int] = []

    def message(self, index: int) -> None:
        """What follows belongs to this message of the conversation; -1 for no message."""
        self._mark_events.append(len(self._events))
        self._mark_messages.append(index)

    def put(self, literal: int, kind: int) -> None:
        """Write a literal as one run."""
        self._events.append(self._table.number(((~literal << KIND_BITS) | kind,)))

    def text(self, text: str, kind: int) -> None:
        """Write a text as a piece and a run of its own."""
        self._events.append(self._table.number((kind,)))
        self._pieces.append(text)

    def framed(self, frame: Frame, text: str) -> None:
        """Write a text in a frame; of a head that shares its piece, a token belongs to the part it starts in."""
        self._events.append(frame.number)
        self._pieces.append(frame.head + text if frame.head else text)

    def framed_messages(self, messages: Sequence[Message], frames: Mapping[Role, Frame]) -> None:
        """Write messages 0, 1, ... of a conversation, the content of each in the frame of its role."""
        first = len(self._events)
        self._mark_events += range(first, first + len(messages))
        self._mark_messages += range(len(messages))
        chosen = [frames[message[0]] for message in messages]  # 0 is the role: an index is faster than a name
        self._events += [number for number, _ in chosen]
        self._pieces += [head + message[1] for (_, head), message in zip(chosen, messages, strict=True)]

    def joined(self, parts: Sequence[tuple[str, int]]) -> None:
        """Write several (text, kind) parts as one piece; a token belongs to the part it starts in."""
        event, prefix = len(self._events), ""
        for number, (text, _) in enumerate(parts):
            if number:
                self._cuts.append((event, number - 1, prefix))
            prefix += text
        self._events.append(self._table.number(tuple(kind for _, kind in parts)))
        self._pieces.append(prefix)

    def end_conversation(self, weights: Sequence[float | None]) -> None:
        """Close a conversation; `weights` has one entry per message, None where it says nothing."""
        self._conversation_events.append(len(self._events))
        self._first_piece = len(self._pieces)
        self._message_counts.append(len(weights))
        self._message_weights += weights
        self._stripped.append(self.stripped)
        self.stripped = 0

    def discard_conversation(self) -> None:
        """Forget what was written since the last conversation was closed."""
        keep = self._conversation_events[-1]
        del self._pieces[self._first_piece :], self._events[keep:]
        while self._cuts and self._cuts[-1][0] >= keep:
            del self._cuts[-1]
        while self._mark_events and self._mark_events[-1] >= keep:
            del self._mark_events[-1], self._mark_messages[-1]
        self.stripped = 0

    def finish(self, tokenizer: Tokenizer) -> tuple[Tokens, NDArray[np.int64]]:
        """Encode all pieces in one call and lay everything out; also characters stripped per conversation."""
        encoded = tokenizer.encode_batch(self._pieces)
        layout = _Layout(self._table, np.array(self._events, dtype=np.int64))
        run_lengths = self._run_lengths(layout, tokenizer, encoded)
        run_offsets = offsets_of(run_lengths)
        conversation_runs = layout.event_runs[self._conversation_events]
        marks = layout.event_runs[[*self._mark_events, len(self._events)]]
        tokens = Tokens(
            ids=_interleave(layout, run_offsets, encoded[0]),
            offsets=run_offsets[conversation_runs],
            run_offsets=run_offsets,
            run_kinds=layout.kinds,
            run_messages=np.repeat(np.array(self._mark_messages, dtype=np.int32), np.diff(marks)),
            conversation_runs=conversation_runs,
            message_offsets=offsets_of(np.array(self._message_counts, dtype=np.int64)),
            message_weights=np.array(self._message_weights, dtype=np.float32),
        )
        return tokens, np.array(self._stripped, dtype=np.int64)

    def _run_lengths(self, layout: _Layout, tokenizer: Tokenizer, encoded: Encoded) -> NDArray[np.int64]:
        lengths = np.empty(len(layout.sources), dtype=np.int64)
        lengths[layout.is_literal] = np.diff(layout.literal_offsets)[~layout.sources[layout.is_literal]]
        lengths[~layout.is_literal] = np.diff(encoded[1])[layout.sources[~layout.is_literal]]
        runs, prefixes = layout.headed_runs()
        if self._cuts:
            events, parts, more = zip(*self._cuts, strict=True)
            runs = np.concatenate([runs, layout.event_runs[list(events)] + np.array(parts, dtype=np.int64)])
            prefixes = [*prefixes, *more]
        if len(runs):
            points = tokenizer.split_points(encoded, layout.sources[runs], prefixes, self._pieces)
            ends, starts = lengths, np.zeros_like(lengths)  # of each run, inside its piece
            ends[runs] = points
            starts[runs + 1] = points
            lengths = ends - starts
        return lengths


class _Layout:
    """The frames of a batch, spread out into runs."""

    def __init__(self, table: FrameTable, events: NDArray[np.int64]) -> None:
        flat = np.array([run for runs in table.frames for run in runs], dtype=np.int64)
        first = offsets_of(np.array([len(runs) for runs in table.frames], dtype=np.int64))
        has_text = np.array([any(run >= 0 for run in runs) for runs in table.frames], dtype=np.bool_)
        counts = np.diff(first)[events]
        self.event_runs: NDArray[np.int64] = offsets_of(counts)
        """First run of each event, and the number of all runs."""
        runs = flat[ranges(first[events], counts)]
        self.is_literal: NDArray[np.bool_] = runs < 0
        piece = np.repeat(np.cumsum(has_text[events]) - 1, counts)
        self.sources: NDArray[np.int64] = np.where(self.is_literal, runs >> KIND_BITS, piece)
        """The piece of each run, or ~literal."""
        self.kinds: NDArray[np.uint8] = (runs & KIND_MASK).astype(np.uint8)
        self.literal_flat = np.array([i for ids in table.literals for i in ids], dtype=np.int32)
        self.literal_offsets = offsets_of(np.array([len(ids) for ids in table.literals], dtype=np.int64))
        self._table, self._events = table, events

    def headed_runs(self) -> tuple[NDArray[np.int64], list[str]]:
        """The runs that are the head of their piece, and the heads."""
        heads = self._table.heads
        is_headed = np.array([bool(head) for head in heads], dtype=np.bool_)
        if not is_headed.any():
            return np.empty(0, dtype=np.int64), []
        before = np.array(
            [next((i for i, run in enumerate(runs) if run >= 0), 0) for runs in self._table.frames], dtype=np.int64
        )
        which = np.flatnonzero(is_headed[self._events])
        frames = self._events[which]
        return self.event_runs[which] + before[frames], [heads[number] for number in frames.tolist()]


def _interleave(layout: _Layout, run_offsets: NDArray[np.int64], text_ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """Lay literals and encoded pieces out in run order; pieces came in order, so their ids just fill the gaps."""
    literal = layout.is_literal
    lengths = np.diff(run_offsets)[literal]
    ids = np.empty(int(run_offsets[-1]), dtype=np.int32)
    at = ranges(run_offsets[:-1][literal], lengths)
    is_text = np.ones(len(ids), dtype=np.bool_)
    is_text[at] = False
    ids[is_text] = text_ids
    ids[at] = layout.literal_flat[ranges(layout.literal_offsets[~layout.sources[literal]], lengths)]
    return ids
