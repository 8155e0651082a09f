"""What templates have written for a batch, before it is encoded: events, pieces of text, and whose they are.

Two such writings of different conversations (one made by `emit`, one by columns) become one in the batch's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.gather import gathered
from chatmill.core.texts import Texts
from chatmill.core.tokens import offsets_of, ranges

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """E events of C conversations; an event is a frame, and has one piece of text or none."""

    events: Ints
    """The frame of every event, in order."""
    event_messages: NDArray[np.int32]
    """The message each event belongs to, counted in its conversation; -1 for none."""
    conversation_events: Ints
    """C + 1 offsets into the events."""
    pieces: Sequence[str]
    """The text of every event that has one, in order; `Texts` where they came from columns."""
    conversation_pieces: Ints
    """C + 1 offsets into the pieces."""
    cuts: list[tuple[int, int, str]]
    """Event, part of its piece, and what stands before the next part of that piece."""
    message_counts: Ints
    """Messages of each conversation."""
    message_weights: NDArray[np.float32]
    """The weight of each message; NaN where it has none."""
    stripped: Ints
    """Characters of each conversation that the template chose not to show."""

    def __len__(self) -> int:
        return len(self.stripped)


def merged(first: Written, second: Written, is_second: NDArray[np.bool_]) -> Written:
    """Both writings as one; `is_second` tells for each conversation, in order, which of the two has it."""
    if not len(second):
        return first
    if not len(first):
        return second
    order = np.empty(len(is_second), dtype=np.int64)
    order[~is_second] = np.arange(len(first))
    order[is_second] = np.arange(len(first), len(is_second))
    events, conversation_events = _in_order(first.conversation_events, second.conversation_events, order)
    pieces, conversation_pieces = _in_order(first.conversation_pieces, second.conversation_pieces, order)
    weights, _ = _in_order(offsets_of(first.message_counts), offsets_of(second.message_counts), order)
    return Written(
        events=np.concatenate([first.events, second.events])[events],
        event_messages=np.concatenate([first.event_messages, second.event_messages])[events],
        conversation_events=conversation_events,
        pieces=_pieces_in_order(first.pieces, second.pieces, pieces),
        conversation_pieces=conversation_pieces,
        cuts=_moved_cuts(first, second, events),
        message_counts=np.concatenate([first.message_counts, second.message_counts])[order],
        message_weights=np.concatenate([first.message_weights, second.message_weights])[weights],
        stripped=np.concatenate([first.stripped, second.stripped])[order],
    )


def _pieces_in_order(first: Sequence[str], second: Sequence[str], order: Ints) -> Sequence[str]:
    """The pieces of both, one behind the other, put in order; where a text has no UTF-8 form, as strings."""
    try:
        columns = [texts if isinstance(texts, Texts) else Texts.of(texts) for texts in (first, second)]
    except UnicodeEncodeError:  # the tokenizer says which
        texts = [*first, *second]
        return [texts[i] for i in order.tolist()]
    which = (order >= len(first)).astype(np.uint8)
    starts = np.concatenate([texts.starts for texts in columns])[order]
    lengths = np.concatenate([texts.lengths for texts in columns])[order]
    return Texts.packed_in(gathered([texts.data for texts in columns], which, starts, lengths), lengths)


def _in_order(first: Ints, second: Ints, order: Ints) -> tuple[Ints, Ints]:
    """Of two ragged columns one behind the other: the element at each place of the merged one, and its offsets."""
    starts = np.concatenate([first[:-1], second[:-1] + first[-1]])
    lengths = np.concatenate([np.diff(first), np.diff(second)])[order]
    return ranges(starts[order], lengths), offsets_of(lengths)


def _moved_cuts(first: Written, second: Written, events: Ints) -> list[tuple[int, int, str]]:
    cuts = [*first.cuts, *((event + len(first.events), part, text) for event, part, text in second.cuts)]
    if not cuts:
        return []
    place = np.empty(len(events), dtype=np.int64)
    place[events] = np.arange(len(events))
    at = place[[event for event, _, _ in cuts]].tolist()
    return sorted((event, part, text) for event, (_, part, text) in zip(at, cuts, strict=True))
