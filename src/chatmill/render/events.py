"""Events written from the columns of a batch: message by message in order, but for all of them at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.gather import gathered
from chatmill.core.texts import Texts
from chatmill.core.tokens import offsets_of
from chatmill.render.frames import FrameTable

Ints = NDArray[np.int64]


class EventColumns:
    """The events of M messages; each gets a frame, and the text in it where the frame has a place for one."""

    def __init__(self, table: FrameTable, counts: Ints) -> None:
        """`counts` has the number of events of each message."""
        self.first: Ints = offsets_of(counts)
        """First event of each message, and the number of all events."""
        total = int(self.first[-1])
        self.frames: Ints = np.zeros(total, dtype=np.int64)
        self.of_no_message: NDArray[np.bool_] = np.zeros(total, dtype=np.bool_)
        """Events that stand before the first message and belong to none (tool definitions, say)."""
        self.stripped: Ints = np.zeros(len(counts), dtype=np.int64)
        """Characters of each message that the template chose not to show."""
        self._table = table
        self._buffers: list[NDArray[np.uint8]] = []
        self._which = np.zeros(total, dtype=np.uint8)
        self._starts, self._lengths = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=np.int64)

    def put(self, at: Ints, frames: Ints | int, texts: Texts | None = None) -> None:
        """Write the events at these places; `texts` has one for each, None where the frames have no place for one."""
        self.frames[at] = frames
        if texts is None or not len(texts):
            return
        number = next((i for i, buffer in enumerate(self._buffers) if buffer is texts.data), len(self._buffers))
        if number == len(self._buffers):
            self._buffers.append(texts.data)
        self._which[at], self._starts[at], self._lengths[at] = number, texts.starts, texts.lengths

    def pieces(self) -> tuple[Texts, Ints]:
        """The text of every event that has one, in its head and tail; and E + 1 offsets: pieces before each event."""
        has_text, heads, tails = self._table.texts_around
        wanted = has_text[self.frames]
        frames, count = self.frames[wanted], len(self._buffers)
        which = np.empty((len(frames), 3), dtype=np.uint8)
        which[:] = count, 0, count + 1
        which[:, 1] = self._which[wanted]
        starts = np.stack([heads.starts[frames], self._starts[wanted], tails.starts[frames]], axis=1)
        lengths = np.stack([heads.lengths[frames], self._lengths[wanted], tails.lengths[frames]], axis=1)
        buffers = [*self._buffers, heads.data, tails.data]
        data = gathered(buffers, which.reshape(-1), starts.reshape(-1), lengths.reshape(-1))
        return Texts.packed_in(data, lengths.sum(axis=1)), offsets_of(wanted.view(np.uint8))
