"""Splits of the store to look at: episodes, the rows of a pack plan, and documents of a distillation set."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.harmony_ids import spans_of_kinds
from chatmill.look.items import Ints, Item, LookLayout, LookSplit, TokenBatch
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.kd import COLUMNS
from chatmill.store.kd_documents import KDDocuments
from chatmill.store.mapped import MappedFile
from chatmill.store.split import Split, even_ranges

SEARCH_BYTES = 1 << 22
"""Bytes of record ids that are searched at a time."""
SIMILAR_SAMPLE = 20_000
"""Record ids that are compared with one that is not there."""


class StoredSplit(LookSplit):
    """A split of the store; every item is one of its documents, unless a subclass says otherwise."""

    stored: Split

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def tokens(self) -> Ints:
        """Tokens of every document."""
        return self.stored.lengths

    def _numbers(self, first: int, last: int) -> Ints:
        """The documents of the items `first` up to `last - 1`."""
        return np.arange(first, last, dtype=np.int64)

    def _facts(self, number: int, documents: Ints) -> dict[str, Any]:
        """What is known of an item beside its tokens, as fields of `Item`."""
        return {}

    def item(self, number: int) -> Item:
        """One item without its padding."""
        documents = self._numbers(number, number + 1)
        batch = self._batch(number, number + 1, documents)
        return Item(
            split=self.name,
            number=number,
            ids=batch.ids,
            weights=batch.weights,
            kinds=batch.kinds,
            spans=batch.spans,
            starts=batch.offsets[:-1],
            features=self.features,
            **self._facts(number, documents),
        )

    def _batches(self) -> Iterator[TokenBatch]:
        for first, last in even_ranges(self.tokens):
            yield self._batch(first, last, self._numbers(first, last))

    def _batch(self, first: int, last: int, documents: Ints) -> TokenBatch:
        some = self.stored.gather(documents)
        return TokenBatch(
            items=np.repeat(np.arange(first, last), self.documents[first:last]),
            ids=some.ids,
            offsets=some.offsets,
            weights=some.weights,
            kinds=some.kinds if self.has_kinds else None,
            spans=spans_of_kinds(some.kinds) if self.has_spans and some.kinds is not None else None,
        )

    def release(self) -> None:
        """Unmap the files."""
        self.stored.release()


class EpisodeSplit(StoredSplit):
    """Episodes, one after the other."""

    layout = LookLayout.EPISODES

    def __init__(self, stored: EpisodeDataset) -> None:
        self.name = stored.split
        self.stored: EpisodeDataset = stored
        self.has_weights, self.has_kinds = self.stored.has_masks, self.stored.has_kinds
        self.has_record_ids = "record_id" in self.stored.columns
        self.source_names = self.stored.source_names
        self.features = ("tokens", *(("mask",) if self.has_weights else ()), *self.stored.columns)

    @cached_property
    def sources(self) -> NDArray[np.integer] | None:
        """The source of every episode."""
        return self.stored.column("source") if "source" in self.stored.columns else None

    @cached_property
    def turns(self) -> NDArray[np.integer] | None:
        """Turns of every episode."""
        return self.stored.column("turns") if "turns" in self.stored.columns else None

    @cached_property
    def stored_trained(self) -> Ints | None:
        """The column of the files."""
        if self.has_weights and "trained" in self.stored.columns:
            return self.stored.column("trained").astype(np.int64)
        return super().stored_trained

    def item(self, number: int) -> Item:
        """One episode; read directly, which is much faster than as a batch of one."""
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


class RowSplit(StoredSplit):
    """Rows by a pack plan; their documents are the episodes of the split, under the same numbers."""

    layout = LookLayout.ROWS

    def __init__(self, stored: EpisodeDataset) -> None:
        self.name, self.stored = stored.split, stored
        self.episodes = EpisodeSplit(stored)
        """The episodes as they are stored, one after the other."""
        plan = stored.plan
        assert plan is not None
        self._plan = plan
        self.capacity = plan.length
        self.has_weights, self.has_kinds = self.episodes.has_weights, self.episodes.has_kinds
        self.has_record_ids = self.episodes.has_record_ids
        self.features = (*self.episodes.features, "pack")

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
        return self.episodes.tokens[self._plan.order]

    @cached_property
    def _row_of(self) -> Ints:
        """The row of every episode."""
        rows = np.empty(len(self._plan.order), dtype=np.int64)
        rows[self._plan.order] = np.repeat(np.arange(len(self)), self.documents)
        return rows

    @cached_property
    def stored_trained(self) -> Ints | None:
        """The sums of the episodes' column."""
        trained = self.episodes.stored_trained
        return None if trained is None else np.add.reduceat(trained[self._plan.order], self._plan.row_offsets[:-1])

    def _numbers(self, first: int, last: int) -> Ints:
        return self._plan.order[self._plan.row_offsets[first] : self._plan.row_offsets[last]]

    def _facts(self, number: int, documents: Ints) -> dict[str, Any]:
        ids, sources = (self.stored.facts(name, documents) for name in ("record_id", "source"))
        return {
            "documents": documents,
            "document_ids": None if ids is None else tuple(ids),
            "capacity": self.capacity,
            "source": None if sources is None else ", ".join(dict.fromkeys(sources)),
        }

    def episode(self, number: int) -> Item:
        """One episode, cut out of its row."""
        row = int(self._row_of[number])
        place = int(np.flatnonzero(self._plan.row(row) == number)[0])
        known = self.episodes.item(number)
        return replace(self.item(row).part(place), source=known.source, turns=known.turns)

    def record_ids(self, numbers: Ints) -> list[str] | None:
        """Record ids of some rows, those of a row joined by commas."""
        if not self.has_record_ids:
            return None
        per_row = (self.episodes.record_ids(self._plan.row(number)) or [] for number in numbers.tolist())
        return [", ".join(dict.fromkeys(ids)) for ids in per_row]

    def find(self, record_id: str) -> list[int]:
        """The rows that hold a record."""
        return sorted({int(self._row_of[number]) for number in self.episodes.find(record_id)})

    def similar_ids(self, record_id: str, most: int = 3) -> list[str]:
        """As among the episodes."""
        return self.episodes.similar_ids(record_id, most)


class KDSplit(StoredSplit):
    """Documents of a distillation set, shard after shard, with the spans of their answers.

    A token that is shown as analysis or final is one whose own prediction counts in the loss.
    """

    layout = LookLayout.KD
    has_weights = True
    has_kinds = False
    has_spans = True
    features = COLUMNS

    def __init__(self, name: str, prefixes: Sequence[str]) -> None:
        """Open and check every shard; no tokens are read but those of a few documents."""
        self.name = name
        self.stored: KDDocuments = KDDocuments(prefixes)
        self.source_names = tuple(shard.name for shard in self.stored.shards)

    @cached_property
    def sources(self) -> NDArray[np.integer] | None:
        """The shard of every document."""
        return np.repeat(np.arange(self.stored.shard_count, dtype=np.int32), np.diff(self.stored.firsts))

    def _facts(self, number: int, documents: Ints) -> dict[str, Any]:
        shard = int(np.searchsorted(self.stored.firsts, number, side="right")) - 1
        return {"source": f"{self.source_names[shard]} document {number - int(self.stored.firsts[shard]):,}"}


def _places(data: NDArray[np.uint8], wanted: bytes) -> Iterator[int]:
    """Where some bytes are in mapped ones; a piece at a time."""
    for begin in range(0, len(data), SEARCH_BYTES):
        piece = data[begin : begin + SEARCH_BYTES + len(wanted) - 1].tobytes()
        place = piece.find(wanted)
        while place >= 0:
            yield begin + place
            place = piece.find(wanted, place + 1)
