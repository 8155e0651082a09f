"""Lays out what was written: all pieces are encoded in one call, and literals and ids are put in their places."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import Tokens, offsets_of, ranges
from chatmill.render.frames import KIND_BITS, KIND_MASK, FrameTable
from chatmill.render.written import Ints, Written
from chatmill.tokenizer.protocol import Encoded, Tokenizer


def lay_out(written: Written, table: FrameTable, tokenizer: Tokenizer) -> Tokens:
    """Encode all pieces and lay everything out as runs."""
    encoded = tokenizer.encode_batch(written.pieces)
    layout = _Layout(table, written.events)
    run_offsets = offsets_of(_run_lengths(written, layout, tokenizer, encoded))
    conversation_runs = layout.event_runs[written.conversation_events]
    return Tokens(
        ids=_interleave(layout, run_offsets, encoded[0]),
        offsets=run_offsets[conversation_runs],
        run_offsets=run_offsets,
        run_kinds=layout.kinds,
        run_messages=np.repeat(written.event_messages, np.diff(layout.event_runs)),
        conversation_runs=conversation_runs,
        message_offsets=offsets_of(written.message_counts),
        message_weights=written.message_weights,
    )


class _Layout:
    """The frames of a batch, spread out into runs."""

    def __init__(self, table: FrameTable, events: Ints) -> None:
        flat = np.array([run for runs in table.frames for run in runs], dtype=np.int64)
        first = offsets_of(np.array([len(runs) for runs in table.frames], dtype=np.int64))
        has_text = np.array([any(run >= 0 for run in runs) for runs in table.frames], dtype=np.bool_)
        counts = np.diff(first)[events]
        self.event_runs: Ints = offsets_of(counts)
        """First run of each event, and the number of all runs."""
        runs = flat[ranges(first[events], counts)]
        self.is_literal: NDArray[np.bool_] = runs < 0
        piece = np.repeat(np.cumsum(has_text[events]) - 1, counts)
        self.sources: Ints = np.where(self.is_literal, runs >> KIND_BITS, piece)
        """The piece of each run, or ~literal."""
        self.kinds: NDArray[np.uint8] = (runs & KIND_MASK).astype(np.uint8)
        self.literal_flat = np.array([i for ids in table.literals for i in ids], dtype=np.int32)
        self.literal_offsets = offsets_of(np.array([len(ids) for ids in table.literals], dtype=np.int64))
        self._table, self._events = table, events

    def headed_runs(self) -> tuple[Ints, list[str]]:
        """The runs that are the head of their piece, and the heads."""
        return self._fixed_runs(self._table.heads, 0)

    def runs_before_tails(self) -> tuple[Ints, list[str]]:
        """The runs that the tail of their piece follows, and the tails."""
        return self._fixed_runs(self._table.tails, -2)

    def _fixed_runs(self, texts: list[str], place: int) -> tuple[Ints, list[str]]:
        """Of all events whose frame has such a text: the run at a place among the runs of its piece, and the text."""
        has = np.array([bool(text) for text in texts], dtype=np.bool_)
        which = np.flatnonzero(has[self._events]) if has.any() else np.empty(0, dtype=np.int64)
        if not len(which):
            return which, []
        inside = np.zeros(len(texts), dtype=np.int64)
        for number in np.flatnonzero(has).tolist():
            inside[number] = [i for i, run in enumerate(self._table.frames[number]) if run >= 0][place]
        frames = self._events[which]
        return self.event_runs[which] + inside[frames], [texts[number] for number in frames.tolist()]


def _run_lengths(written: Written, layout: _Layout, tokenizer: Tokenizer, encoded: Encoded) -> Ints:
    lengths = np.empty(len(layout.sources), dtype=np.int64)
    lengths[layout.is_literal] = np.diff(layout.literal_offsets)[~layout.sources[layout.is_literal]]
    lengths[~layout.is_literal] = np.diff(encoded[1])[layout.sources[~layout.is_literal]]
    runs, prefixes = layout.headed_runs()
    if written.cuts:
        events, parts, more = zip(*written.cuts, strict=True)
        runs = np.concatenate([runs, layout.event_runs[list(events)] + np.array(parts, dtype=np.int64)])
        prefixes = [*prefixes, *more]
    ends, starts = lengths.copy(), np.zeros_like(lengths)  # of each run, inside its piece
    if len(runs):
        points = tokenizer.split_points(encoded, layout.sources[runs], prefixes, written.pieces)
        ends[runs] = points
        starts[runs + 1] = points
    runs, tails = layout.runs_before_tails()
    if len(runs):
        points = tokenizer.tail_points(encoded, layout.sources[runs], tails, written.pieces)
        ends[runs] = points
        starts[runs + 1] = points
    return ends - starts


def _interleave(layout: _Layout, run_offsets: Ints, text_ids: NDArray[np.int32]) -> NDArray[np.int32]:
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
