"""A split of packed rows to look at: episodes and the pack plan beside them; every item is a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from chatmill.look.items import Ints, Item, LookLayout, LookSplit, TokenBatch
from chatmill.look.stored_splits import EpisodeSplit
from chatmill.store.split import even_ranges


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
