"""Lays out what was written: all pieces are encoded in one call, and literals and ids are put in their places."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.gather import gathered
from chatmill.core.texts import Chosen
from chatmill.core.tokens import Tokens, offsets_of, ranges
from chatmill.render.frames import KIND_BITS, KIND_MASK, FrameTable
from chatmill.render.written import Ints, Written
from chatmill.tokenizer.protocol import Encoded, Tokenizer


def lay_out(written: Written, table: FrameTable, tokenizer: Tokenizer) -> Tokens:
    """Encode all pieces and lay everything out as runs."""
    encoded = tokenizer.encode_batch(written.pieces)
    layout = _Layout(table, written.events)
    layout.lengths[layout.text_runs] = _text_lengths(written, layout, tokenizer, encoded)
    run_offsets = offsets_of(layout.lengths)
    conversation_runs = layout.event_runs[written.conversation_events]
    return Tokens(
        ids=_interleave(layout, encoded[0]),
        offsets=run_offsets[conversation_runs],
        run_offsets=run_offsets,
        run_kinds=layout.kinds,
        run_messages=np.repeat(written.event_messages, layout.run_counts),
        conversation_runs=conversation_runs,
        message_offsets=offsets_of(written.message_counts),
        message_weights=written.message_weights,
    )


class _Layout:
    """The frames of a batch, spread out into runs. A piece has one run of text, or more with head, tail or cuts."""

    def __init__(self, table: FrameTable, events: Ints) -> None:
        runs = np.array([run for runs in table.frames for run in runs], dtype=np.int64)
        literal_offsets = offsets_of(np.array([len(ids) for ids in table.literals], dtype=np.int64))
        is_literal = runs < 0
        literal = ~(runs[is_literal] >> KIND_BITS)
        starts, lengths = np.zeros(len(runs), dtype=np.int64), np.zeros(len(runs), dtype=np.int64)
        starts[is_literal], lengths[is_literal] = literal_offsets[literal], np.diff(literal_offsets)[literal]
        first = offsets_of(np.array([len(frame) for frame in table.frames], dtype=np.int64))
        self.run_counts: Ints = np.diff(first)[events]
        self.event_runs: Ints = offsets_of(self.run_counts)
        """First run of each event, and the number of all runs."""
        at = ranges(first[events], self.run_counts)
        self.kinds: NDArray[np.uint8] = (runs & KIND_MASK).astype(np.uint8)[at]
        self.is_text: NDArray[np.bool_] = ~is_literal[at]
        self.lengths: Ints = lengths[at]
        """Tokens of each run; 0 for text at first."""
        self.literal_starts: Ints = starts[at]
        self.literal_flat = np.array([i for ids in table.literals for i in ids], dtype=np.int32)
        self.text_runs: Ints = np.flatnonzero(self.is_text)
        texts_of_frame = np.diff(offsets_of((~is_literal).view(np.uint8))[first])
        self.piece_runs: Ints = offsets_of(texts_of_frame[events])
        """First run of text of each event, counted among the runs of text."""
        self._table, self._events = table, events

    def pieces_of_text_runs(self) -> Ints:
        """The piece that each run of text belongs to."""
        counts = np.diff(self.piece_runs)
        return np.repeat(np.arange(np.count_nonzero(counts)), counts[counts > 0])

    def headed_runs(self) -> tuple[Ints, Chosen]:
        """The runs of text that are the head of their piece, and the heads."""
        which, texts = self._with_text(self._table.heads)
        return self.piece_runs[which], texts

    def runs_before_tails(self) -> tuple[Ints, Chosen]:
        """The runs of text that the tail of their piece follows, and the tails."""
        which, texts = self._with_text(self._table.tails)
        return self.piece_runs[which + 1] - 2, texts

    def _with_text(self, texts: list[str]) -> tuple[Ints, Chosen]:
        """The events whose frame has such a text, and the text."""
        has = np.array([bool(text) for text in texts], dtype=np.bool_)
        which = np.flatnonzero(has[self._events])
        return which, Chosen(texts, self._events[which])


def _text_lengths(written: Written, layout: _Layout, tokenizer: Tokenizer, encoded: Encoded) -> Ints:
    """Tokens of each run of text; a token of several runs in one piece belongs to the one it starts in."""
    pieces = layout.pieces_of_text_runs()
    ends = np.diff(encoded[1])[pieces]
    starts = np.zeros_like(ends)  # of each run, inside its piece
    prefixes: Sequence[str]
    runs, prefixes = layout.headed_runs()
    if written.cuts:
        events, parts, more = zip(*written.cuts, strict=True)
        runs = np.concatenate([runs, layout.piece_runs[list(events)] + np.array(parts, dtype=np.int64)])
        prefixes = [*prefixes, *more]
    if len(runs):
        points = tokenizer.split_points(encoded, pieces[runs], prefixes, written.pieces)
        ends[runs] = points
        starts[runs + 1] = points
    runs, tails = layout.runs_before_tails()
    if len(runs):
        points = tokenizer.tail_points(encoded, pieces[runs], tails, written.pieces)
        ends[runs] = points
        starts[runs + 1] = points
    return ends - starts


def _interleave(layout: _Layout, text_ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """Lay literals and encoded pieces out in run order; pieces came in order, so their ids just fill the gaps."""
    starts = layout.literal_starts
    starts[layout.text_runs] = offsets_of(layout.lengths[layout.text_runs])[:-1]
    return gathered([layout.literal_flat, text_ids], layout.is_text.view(np.uint8), starts, layout.lengths)
