"""What templates have written for a batch, before it is encoded: events, pieces of text, and whose they are.

Two such writings of different conversations (one made by `emit`, one by columns) become one in the batch's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Role
from chatmill.core.tokens import offsets_of, ranges
from chatmill.render.frames import Frame

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """E events of C conversations (or other units); an event is a frame, and has one piece of text or none."""

    events: Ints
    """The frame of every event, in order."""
    event_messages: NDArray[np.int32]
    """The message each event belongs to, counted in its conversation; -1 for none."""
    conversation_events: Ints
    """C + 1 offsets into the events."""
    pieces: list[str]
    """The text of every event that has one, in order."""
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


def write_plain(
    roles: Sequence[Role], contents: Sequence[str], indexes: NDArray[np.int32], frames: Mapping[Role, Frame]
) -> Written:
    """Write messages, the content of each in the frame of its role; one unit a message, `indexes` are their numbers."""
    heads = {role: frame.head for role, frame in frames.items()}
    numbers = {role: frame.number for role, frame in frames.items()}
    each = np.arange(len(roles) + 1)
    return Written(
        events=np.array([numbers[role] for role in roles], dtype=np.int64),
        event_messages=indexes,
        conversation_events=each,
        pieces=[heads[role] + content for role, content in zip(roles, contents, strict=True)],
        conversation_pieces=each,
        cuts=[],
        message_counts=np.zeros(len(roles), dtype=np.int64),
        message_weights=np.empty(0, dtype=np.float32),
        stripped=np.zeros(len(roles), dtype=np.int64),
    )


def grouped(units: Written, offsets: Ints, message_counts: Ints) -> Written:
    """Single messages as conversations; `offsets` cut the units, `message_counts` has the messages of each."""
    return replace(
        units,
        conversation_events=units.conversation_events[offsets],
        conversation_pieces=units.conversation_pieces[offsets],
        message_counts=message_counts,
        message_weights=np.full(int(message_counts.sum()), np.nan, dtype=np.float32),
        stripped=np.diff(offsets_of(units.stripped)[offsets]),
    )


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
    texts = first.pieces + second.pieces
    return Written(
        events=np.concatenate([first.events, second.events])[events],
        event_messages=np.concatenate([first.event_messages, second.event_messages])[events],
        conversation_events=conversation_events,
        pieces=[texts[i] for i in pieces.tolist()],
        conversation_pieces=conversation_pieces,
        cuts=_moved_cuts(first, second, events),
        message_counts=np.concatenate([first.message_counts, second.message_counts])[order],
        message_weights=np.concatenate([first.message_weights, second.message_weights])[weights],
        stripped=np.concatenate([first.stripped, second.stripped])[order],
    )


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
