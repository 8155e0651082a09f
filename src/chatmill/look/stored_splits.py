"""Splits of episodes to look at: columns as arrays, items as views, whole passes in bounded memory."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chatmill.look.items import Ints, Item, LookLayout, LookSplit, TokenBatch
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.mapped import MappedFile

SEARCH_BYTES = 1 << 22
"""Bytes of record ids that are searched at a time."""
SIMILAR_SAMPLE = 20_000
"""Record ids that are compared with one that is not there."""


class EpisodeSplit(LookSplit):
    """Episodes: every item is one document."""

    layout = LookLayout.EPISODES

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.stored = EpisodeDataset(directory, name)
        self.has_weights, self.has_kinds = self.stored.has_masks, self.stored.has_kinds
        self.has_record_ids = "record_id" in self.stored.columns
        self.source_names = self.stored.source_names
        self.features = ("tokens", *(("mask",) if self.has_weights else ()), *self.stored.columns)

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def tokens(self) -> Ints:
        """Tokens of every episode."""
        return self.stored.lengths

    @cached_property
    def sources(self) -> NDArray[np.integer] | None:
        """The source of every episode."""
        return self.stored.column("source") if "source" in self.stored.columns else None

    @cached_property
    def turns(self) -> NDArray[np.integer] | None:
        """Turns of every episode."""
        return self.stored.column("turns") if "turns" in self.stored.columns else None

    def _stored_trained(self) -> Ints | None:
        if self.has_weights and "trained" in self.stored.columns:
            return self.stored.column("trained").astype(np.int64)
        return super()._stored_trained()

    def item(self, number: int) -> Item:
        """One episode."""
        episode = self.stored[number]
        return Item(
            split=self.name,
            number=number,
            ids=episode.ids,
            weights=episode.weights,
            kinds=episode.kinds,
            starts=np.zeros(min(1, len(episode)), dtype=np.int64),
            record_id=episode.record_id,
            source=episode.source,
            turns=episode.turns,
            features=self.features,
        )

    def _batches(self, ids: bool) -> Iterator[TokenBatch]:
        for numbers in self.stored.batches():
            some = self.stored.gather(numbers)
            yield TokenBatch(
                items=numbers,
                offsets=some.offsets,
                ids=some.ids if ids else None,
                weights=some.weights,
                kinds=some.kinds,
            )

    def release(self) -> None:
        """Unmap the files."""
        for shard in self.stored.shards:
            shard.release()

    def record_ids(self, numbers: Ints) -> list[str] | None:
        """Record ids of some episodes."""
        return self.stored.facts("record_id", numbers)

    def find(self, record_id: str) -> list[int]:
        """The episodes of a record."""
        return [number for number, found in self._ids_with(record_id.encode()) if found == record_id]

    def similar_ids(self, record_id: str, most: int = 3) -> list[str]:
        """Ids that hold the text; else those closest to it among the first ones; else those that begin like it."""
        if not self.has_record_ids:
            return []
        found: dict[str, None] = {}
        for _, text in self._ids_with(record_id.encode()):
            found.setdefault(text)
            if len(found) == most:
                return list(found)
        sample = self.record_ids(np.arange(min(len(self), SIMILAR_SAMPLE), dtype=np.int64)) or []
        for text in difflib.get_close_matches(record_id, list(dict.fromkeys(sample)), n=most):
            found.setdefault(text)
        return list(found)[:most]

    def _ids_with(self, wanted: bytes) -> Iterator[tuple[int, str]]:
        """(episode, its id) wherever an id holds these bytes: one search over the bytes of all ids."""
        if not self.has_record_ids or not wanted:
            return
        spec = self.stored.columns["record_id"]
        for number, first in enumerate(self.stored.episode_offsets[:-1].tolist()):
            shard = self.stored.shard(number)
            offsets = MappedFile(shard.folder / spec.offsets_file, "<u8", shard.episodes + 1).array
            known = -1
            for place in _places(shard.column("record_id"), wanted):
                row = int(np.searchsorted(offsets, place, side="right")) - 1
                if row != known and place + len(wanted) <= int(offsets[row + 1]):
                    known = row
                    yield first + row, shard.text("record_id", row) or ""


def _places(data: NDArray[np.uint8], wanted: bytes) -> Iterator[int]:
    """Where some bytes are in mapped ones; a piece at a time."""
    for begin in range(0, len(data), SEARCH_BYTES):
        piece = data[begin : begin + SEARCH_BYTES + len(wanted) - 1].tobytes()
        place = piece.find(wanted)
        while place >= 0:
            yield begin + place
            place = piece.find(wanted, place + 1)
