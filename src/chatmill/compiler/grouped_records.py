"""The records of a chunk that share trees, brought together by their groups."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversations import Conversations


class GroupedRecords:
    """Batches of a chunk as they are read; all of them are in memory until the chunk was read whole."""

    def __init__(self) -> None:
        self._batches: list[Conversations] = []
        self._numbers: dict[str, int] = {}
        self._codes: list[int] = []

    def add(self, batch: Conversations, groups: list[str]) -> None:
        """Records, and the group of each."""
        self._batches.append(batch)
        self._codes += [self._numbers.setdefault(group, len(self._numbers)) for group in groups]

    def batches(self, most: int) -> Iterator[tuple[Conversations, NDArray[np.int64]]]:
        """All records, groups in the order of their first ones, in batches of about `most` bytes of text.

        Beside each batch, the number of each record's group. No group is in two batches.
        """
        if not self._batches:
            return
        codes = np.array(self._codes, dtype=np.int64)
        order = np.argsort(codes, kind="stable")
        records, codes = Conversations.joined(self._batches).take(order), codes[order]
        text = np.append(0, np.cumsum(records.messages.contents.lengths))[records.offsets]
        starts = np.flatnonzero(np.append(True, codes[1:] != codes[:-1]))
        begin = 0
        for end in [*starts[1:].tolist(), len(codes)]:
            if end == len(codes) or text[end] - text[begin] >= most:
                own = np.arange(begin, end)
                yield records.take(own), codes[own]
                begin = end
