"""Splits of episodes to look at, one by one or in the rows of a pack plan: columns, items, and passes over all."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chatmill.look.items import Ints, Item, LookLayout, LookSplit, TokenBatch
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.mapped import MappedFile
from chatmill.store.split import even_ranges

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


class RowSplit(LookSplit):
    """Rows by a pack plan; their documents are the episodes of the split, under the same numbers."""

    layout = LookLayout.ROWS

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self._episodes = EpisodeSplit(directory, name)
        plan = self._episodes.stored.plan
        assert plan is not None
        self._plan = plan
        self.capacity = plan.length
        self.has_weights, self.has_kinds = self._episodes.has_weights, self._episodes.has_kinds
        self.has_record_ids = self._episodes.has_record_ids
        self.features = (*self._episodes.features, "pack")

    def __len__(self) -> int:
        return len(self._plan)

    @property
    def tokens(self) -> Ints:
        """Tokens of every row."""
        return self._plan.row_tokens

    @cached_property
    def documents(self) -> Ints:
        """Episodes of every row."""
        return np.diff(self._plan.row_offsets)

    @cached_property
    def document_lengths(self) -> Ints:
        """Tokens of every episode, row by row."""
        return self._episodes.tokens[self._plan.order]

    @cached_property
    def _row_of(self) -> Ints:
        """The row of every episode."""
        rows = np.empty(len(self._plan.order), dtype=np.int64)
        rows[self._plan.order] = np.repeat(np.arange(len(self)), self.documents)
        return rows

    def _stored_trained(self) -> Ints | None:
        per_episode = self._episodes._stored_trained()
        return (
            None if per_episode is None else np.add.reduceat(per_episode[self._plan.order], self._plan.row_offsets[:-1])
        )

    def item(self, number: int) -> Item:
        """One row without its padding."""
        episodes = self._plan.row(number)
        some = self._episodes.stored.gather(episodes)
        ids = self._episodes.record_ids(episodes)
        sources = self._episodes.stored.facts("source", episodes)
        return Item(
            split=self.name,
            number=number,
            ids=some.ids,
            weights=some.weights,
            kinds=some.kinds,
            starts=some.offsets[:-1],
            documents=episodes,
            document_ids=None if ids is None else tuple(ids),
            capacity=self.capacity,
            source=None if sources is None else ", ".join(dict.fromkeys(sources)),
            features=self.features,
        )

    def episode(self, number: int) -> Item:
        """One episode, cut out of its row."""
        row = int(self._row_of[number])
        place = int(np.flatnonzero(self._plan.row(row) == number)[0])
        known = self._episodes.item(number)
        return replace(self.item(row).part(place), source=known.source, turns=known.turns)

    @property
    def episodes(self) -> LookSplit:
        """The episodes as they are stored, one after the other."""
        return self._episodes

    def _batches(self, ids: bool) -> Iterator[TokenBatch]:
        borders = self._plan.row_offsets
        for first, last in even_ranges(self.tokens):
            some = self._episodes.stored.gather(self._plan.order[borders[first] : borders[last]])
            yield TokenBatch(
                items=np.repeat(np.arange(first, last), self.documents[first:last]),
                offsets=some.offsets,
                ids=some.ids if ids else None,
                weights=some.weights,
                kinds=some.kinds,
            )

    def release(self) -> None:
        """Unmap the files."""
        self._episodes.release()

    def record_ids(self, numbers: Ints) -> list[str] | None:
        """Record ids of some rows, those of a row joined by commas."""
        if not self.has_record_ids:
            return None
        per_row = (self._episodes.record_ids(self._plan.row(number)) or [] for number in numbers.tolist())
        return [", ".join(dict.fromkeys(ids)) for ids in per_row]

    def find(self, record_id: str) -> list[int]:
        """The rows that hold a record."""
        return sorted({int(self._row_of[number]) for number in self._episodes.find(record_id)})

    def similar_ids(self, record_id: str, most: int = 3) -> list[str]:
        """As among the episodes."""
        return self._episodes.similar_ids(record_id, most)


def _places(data: NDArray[np.uint8], wanted: bytes) -> Iterator[int]:
    """Where some bytes are in mapped ones; a piece at a time."""
    for begin in range(0, len(data), SEARCH_BYTES):
        piece = data[begin : begin + SEARCH_BYTES + len(wanted) - 1].tobytes()
        place = piece.find(wanted)
        while place >= 0:
            yield begin + place
            place = piece.find(wanted, place + 1)
