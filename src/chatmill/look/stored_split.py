"""A split of the store to look at: episodes, the rows of their pack plan, or documents of a distillation set."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.harmony_ids import spans_of_kinds
from chatmill.core.trees import Branches
from chatmill.images.column import StoredPicture, stored_pictures
from chatmill.look.items import Ints, Item, LookLayout, LookSplit, TokenBatch, pictures_of
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.kd import COLUMNS
from chatmill.store.kd_documents import KDDocuments
from chatmill.store.mapped import MappedFile
from chatmill.store.split import even_ranges

SEARCH_BYTES = 1 << 22
"""Bytes of record ids that are searched at a time."""
SIMILAR_SAMPLE = 20_000
"""Record ids that are compared with one that is not there."""


class StoredSplit(LookSplit):
    """The documents of a split, each an item; with `rows` the items are rows of several, by the plan of the split.

    In a distillation set, a token that is shown as analysis or final is one whose own prediction counts in the loss.
    """

    def __init__(self, stored: EpisodeDataset | KDDocuments, name: str, *, rows: bool = False) -> None:
        self.stored, self.name = stored, name
        self._plan = stored.plan if rows else None
        self.capacity = None if self._plan is None else self._plan.length
        self.has_weights = stored.has_masks
        self.has_spans = isinstance(stored, KDDocuments)
        self.has_kinds = stored.has_kinds and not self.has_spans
        self._columns = {} if isinstance(stored, KDDocuments) else stored.columns
        self.has_record_ids = "record_id" in self._columns
        if isinstance(stored, KDDocuments):
            self.layout, self.features = LookLayout.KD, COLUMNS
            self.source_names = tuple(shard.name for shard in stored.shards)
        else:
            self.layout = LookLayout.ROWS if rows else LookLayout.EPISODES
            self.features = ("tokens", *(("mask",) if self.has_weights else ()), *self._columns)
            self.features += ("pack",) if rows else ()
            self.source_names = () if rows else stored.source_names

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def tokens(self) -> Ints:
        """Tokens of every item."""
        return self.stored.lengths if self._plan is None else self._plan.row_tokens

    @cached_property
    def documents(self) -> Ints:
        """Documents of every item."""
        return np.ones(len(self), dtype=np.int64) if self._plan is None else np.diff(self._plan.row_offsets)

    @cached_property
    def document_lengths(self) -> Ints:
        """Tokens of every document, item by item."""
        return self.stored.lengths if self._plan is None else self.stored.lengths[self._plan.order]

    @cached_property
    def sources(self) -> NDArray[np.integer] | None:
        """The source of every document, in a distillation set its shard; None for rows, which may have several."""
        if isinstance(self.stored, KDDocuments):
            return np.repeat(np.arange(self.stored.shard_count, dtype=np.int32), np.diff(self.stored.firsts))
        return self._column("source") if self._plan is None else None

    @cached_property
    def turns(self) -> NDArray[np.integer] | None:
        """Turns of every episode."""
        return self._column("turns") if self._plan is None else None

    @cached_property
    def stored_trained(self) -> Ints | None:
        """By the column of the files, summed for rows."""
        if not self.has_weights:
            return self.tokens
        trained = self._column("trained")
        if trained is None or self._plan is None:
            return None if trained is None else trained.astype(np.int64)
        return np.add.reduceat(trained[self._plan.order].astype(np.int64), self._plan.row_offsets[:-1])

    def _column(self, name: str) -> NDArray[np.integer] | None:
        return self.stored.column(name) if isinstance(self.stored, EpisodeDataset) and name in self._columns else None

    def pictures(self) -> Iterator[StoredPicture]:
        """All pictures of the split, document by document."""
        for first, last in even_ranges(self.stored.lengths) if self.stored.has_pictures else ():
            for line in self.stored.facts("images", np.arange(first, last)) or ():
                yield from stored_pictures(line)

    def item(self, number: int) -> Item:
        """One item without its padding."""
        if isinstance(self.stored, EpisodeDataset) and self._plan is None:  # six times as fast as a batch of one
            one = self.stored[number]
            return Item(
                split=self.name,
                number=number,
                ids=one.ids,
                weights=one.weights,
                kinds=one.kinds,
                starts=np.zeros(min(1, len(one)), dtype=np.int64),
                branches=_branches(one.branches, np.array([0, len(one)])),
                record_id=one.record_id,
                source=one.source,
                turns=one.turns,
                side=one.side,
                pictures=pictures_of([one.images], np.zeros(1, dtype=np.int64)),
                features=self.features,
            )
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
            branches=_branches(self.stored.branches(documents), batch.offsets),
            pictures=pictures_of(self.stored.facts("images", documents), batch.offsets)
            if self.stored.has_pictures
            else (),
            features=self.features,
            **self._facts(number, documents),
        )

    def _facts(self, number: int, documents: Ints) -> dict[str, Any]:
        """What is known of an item besides its tokens, as fields of `Item`."""
        if isinstance(self.stored, KDDocuments):
            shard = int(np.searchsorted(self.stored.firsts, number, side="right")) - 1
            return {"source": f"{self.source_names[shard]} document {number - int(self.stored.firsts[shard]):,}"}
        ids, sources = (self.stored.facts(name, documents) for name in ("record_id", "source"))
        return {
            "documents": documents,
            "document_ids": None if ids is None else tuple(ids),
            "capacity": self.capacity,
            "source": None if sources is None else ", ".join(dict.fromkeys(sources)),
        }

    def _numbers(self, first: int, last: int) -> Ints:
        """The documents of the items `first` up to `last - 1`."""
        if self._plan is None:
            return np.arange(first, last, dtype=np.int64)
        return self._plan.order[self._plan.row_offsets[first] : self._plan.row_offsets[last]]

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

    @cached_property
    def episodes(self) -> StoredSplit:
        """The documents as they are stored, one after the other."""
        return self if self._plan is None else StoredSplit(self.stored, self.name)

    def episode(self, number: int) -> Item:
        """One document, cut out of its row where it is in one."""
        known = self.episodes.item(number)
        if self._plan is None:
            return known
        row = int(self._row_of[number])
        place = int(np.flatnonzero(self._plan.row(row) == number)[0])
        return replace(self.item(row).part(place), source=known.source, turns=known.turns)

    @cached_property
    def _row_of(self) -> Ints:
        """The row of every document; without a plan its own number."""
        if self._plan is None:
            return np.arange(len(self), dtype=np.int64)
        rows = np.empty(len(self._plan.order), dtype=np.int64)
        rows[self._plan.order] = np.repeat(np.arange(len(self)), self.documents)
        return rows

    def record_ids(self, numbers: Ints) -> list[str] | None:
        """Record ids of some items, those of a row joined by commas."""
        if not self.has_record_ids or self._plan is None:
            return self.stored.facts("record_id", numbers) if self.has_record_ids else None
        per_row = (self.stored.facts("record_id", self._plan.row(number)) or [] for number in numbers.tolist())
        return [", ".join(dict.fromkeys(ids)) for ids in per_row]

    def find(self, record_id: str) -> list[int]:
        """The items that hold a record."""
        return sorted({int(self._row_of[number]) for number in self.find_episodes(record_id)})

    def find_episodes(self, record_id: str) -> list[int]:
        """The documents of a record."""
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
        sample = self.stored.facts("record_id", np.arange(min(len(self.stored), SIMILAR_SAMPLE), dtype=np.int64)) or []
        for text in difflib.get_close_matches(record_id, list(dict.fromkeys(sample)), n=most):
            found.setdefault(text)
        return list(found)[:most]

    def _ids_with(self, wanted: bytes) -> Iterator[tuple[int, str]]:
        """(document, its id) wherever an id holds these bytes: one search over the bytes of all ids."""
        if not self.has_record_ids or not wanted or isinstance(self.stored, KDDocuments):
            return
        spec = self._columns["record_id"]
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


def _branches(branches: Branches, offsets: Ints) -> tuple[tuple[int, int], ...]:
    """Where branches begin, counted over trees with these offsets, and the position of their first token."""
    places = branches.flat_starts(np.diff(offsets))
    return tuple(zip(places.tolist(), branches.depths.tolist(), strict=True))
