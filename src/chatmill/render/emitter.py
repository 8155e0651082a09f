"""The emitter: templates write control ids and text into it, one conversation after another.

What a template writes is a sequence of *frames*. A frame is fixed: literal runs, and at most one place for a text. So
writing a message costs two list entries, and everything else is done for the whole batch by NumPy at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from chatmill.core.conversation import Message, Role
from chatmill.render.frames import KIND_BITS, Frame, FrameTable
from chatmill.render.written import Written


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
        self._conversation_pieces: list[int] = [0]
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

    def fixed(self, frame: Frame) -> None:
        """Write a frame that has no place for a text."""
        self._events.append(frame.number)

    def framed(self, frame: Frame, text: str) -> None:
        """Write a text in a frame; a token of head, text or tail, which are one piece, belongs to where it starts."""
        number, head, tail = frame
        self._events.append(number)
        self._pieces.append(f"{head}{text}{tail}")

    def framed_messages(self, messages: Sequence[Message], frames: Mapping[Role, Frame]) -> None:
        """Write messages 0, 1, ... of a conversation, the content of each in the frame of its role."""
        for index, message in enumerate(messages):
            self.message(index)
            self.framed(frames[message.role], message.content)

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
        self._conversation_pieces.append(len(self._pieces))
        self._message_counts.append(len(weights))
        self._message_weights += weights
        self._stripped.append(self.stripped)
        self.stripped = 0

    def discard_conversation(self) -> None:
        """Forget what was written since the last conversation was closed."""
        keep = self._conversation_events[-1]
        del self._pieces[self._conversation_pieces[-1] :], self._events[keep:]
        while self._cuts and self._cuts[-1][0] >= keep:
            del self._cuts[-1]
        while self._mark_events and self._mark_events[-1] >= keep:
            del self._mark_events[-1], self._mark_messages[-1]
        self.stripped = 0

    def written(self) -> Written:
        """Everything that was written, as columns."""
        marks = np.array([*self._mark_events, len(self._events)], dtype=np.int64)
        return Written(
            events=np.array(self._events, dtype=np.int64),
            event_messages=np.repeat(np.array(self._mark_messages, dtype=np.int32), np.diff(marks)),
            conversation_events=np.array(self._conversation_events, dtype=np.int64),
            pieces=self._pieces,
            conversation_pieces=np.array(self._conversation_pieces, dtype=np.int64),
            cuts=self._cuts,
            message_counts=np.array(self._message_counts, dtype=np.int64),
            message_weights=np.array(self._message_weights, dtype=np.float32),
            stripped=np.array(self._stripped, dtype=np.int64),
        )
