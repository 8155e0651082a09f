"""Splits of episodes and of blocks to look at: columns as arrays, items as views, whole passes in bounded memory."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of
from chatmill.look.items import Ints, Item, LookLayout, LookSplit, TokenBatch
from chatmill.store.block_rows import BlockRows
from chatmill.store.blocks import BlockDataset, BlockShard
from chatmill.store.documents import BATCH_TOKENS, EpisodeDocuments
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.mapped import MappedFile

RELEASE_TOKENS = 16 << 20
"""Tokens after which a pass over a split unmaps what it has read, so that mapped pages do not pile up."""
SEARCH_BYTES = 1 << 22
"""Bytes of record ids that are searched at a time."""
SIMILAR_SAMPLE = 20_000
"""Record ids that are compared with one that is not there."""


class EpisodeSplit(LookSplit):
    """Episodes: every item is one document."""

    layout = LookLayout.EPISODES

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self._dataset = EpisodeDataset(directory, name)
        self._documents = EpisodeDocuments(self._dataset)
        self.has_weights, self.has_kinds = self._documents.has_weights, self._documents.has_kinds
        self.has_record_ids = "record_id" in self._dataset.columns
        self.source_names = self._dataset.source_names
        self.features = ("tokens", *(("mask",) if self.has_weights else ()), *self._dataset.columns)

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def tokens(self) -> Ints:
        """Tokens of every episode."""
        return self._documents.lengths

    @cached_property
    def documents(self) -> Ints:
        """1 for every episode."""
        return np.ones(len(self), dtype=np.int64)

    @property
    def document_lengths(self) -> Ints:
        """Tokens of every episode."""
        return self.tokens

    @cached_property
    def sources(self) -> NDArray[np.integer] | None:
        """The source of every episode."""
        return self._dataset.column("source") if "source" in self._dataset.columns else None

    @cached_property
    def turns(self) -> NDArray[np.integer] | None:
        """Turns of every episode."""
        return self._dataset.column("turns") if "turns" in self._dataset.columns else None

    def _stored_trained(self) -> Ints | None:
        if self.has_weights and "trained" in self._dataset.columns:
            return self._dataset.column("trained").astype(np.int64)
        return super()._stored_trained()

    def item(self, number: int) -> Item:
        """One episode."""
        episode = self._dataset[number]
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

    def batches(self, *, ids: bool = False) -> Iterator[TokenBatch]:
        """All episodes in order."""
        read = 0
        for numbers in self._documents.batches():
            some = self._documents.gather(numbers)
            yield TokenBatch(
                items=numbers,
                offsets=some.offsets,
                ids=some.ids if ids else None,
                weights=some.weights,
                kinds=some.kinds,
            )
            read += len(some.ids)
            if read >= RELEASE_TOKENS:
                read = 0
                del some
                for shard in self._dataset.shards:
                    shard.release()

    def record_ids(self, numbers: Ints) -> list[str] | None:
        """Record ids of some episodes."""
        return self._documents.facts("record_id", numbers)

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
        spec = self._dataset.columns["record_id"]
        for number, first in enumerate(self._dataset.episode_offsets[:-1].tolist()):
            shard = self._dataset.shard(number)
            offsets = MappedFile(shard.folder / spec.offsets_file, "<u8", shard.episodes + 1).array
            known = -1
            for place in _places(shard.column("record_id"), wanted):
                row = int(np.searchsorted(offsets, place, side="right")) - 1
                if row != known and place + len(wanted) <= int(offsets[row + 1]):
                    known = row
                    yield first + row, shard.text("record_id", row) or ""


def _places(data: NDArray[np.uint8], wanted: bytes) -> Iterator[int]:
    """Where some bytes stand in mapped ones; a piece at a time."""
    for begin in range(0, len(data), SEARCH_BYTES):
        piece = data[begin : begin + SEARCH_BYTES + len(wanted) - 1].tobytes()
        place = piece.find(wanted)
        while place >= 0:
            yield begin + place
            place = piece.find(wanted, place + 1)


class BlockSplit(LookSplit):
    """Blocks: every item is a packed row."""

    layout = LookLayout.BLOCKS

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self._dataset = BlockDataset(directory, name)
        self.capacity = self._dataset.capacity
        self.has_weights, self.has_kinds = self._dataset.weights_dtype is not None, self._dataset.has_kinds
        per_token = [name for name, there in (("weights", self.has_weights), ("kinds", self.has_kinds)) if there]
        self.features = ("ids", *per_token, "document_starts", "documents")

    def __len__(self) -> int:
        return len(self._dataset)

    def _per_shard(self, values: Callable[[BlockShard], NDArray[Any]]) -> Ints:
        """A column of all shards, one after the other."""
        shards = range(len(self._dataset.shards))
        return np.concatenate([values(self._dataset.shard(number)) for number in shards]).astype(np.int64)

    @cached_property
    def tokens(self) -> Ints:
        """Tokens of every row."""
        return self._dataset.row_lengths

    @cached_property
    def documents(self) -> Ints:
        """Documents of every row."""
        return self._per_shard(lambda shard: np.diff(shard.starts_offsets))

    @cached_property
    def document_lengths(self) -> Ints:
        """Tokens of every document, row by row."""
        starts = self._per_shard(lambda shard: shard.starts)
        return _lengths(starts, offsets_of(self.documents), self.tokens)

    def item(self, number: int) -> Item:
        """One row without its padding."""
        row = self._dataset[number]
        tokens = slice(row.row_length)
        return Item(
            split=self.name,
            number=number,
            ids=row.ids[tokens],
            weights=None if row.weights is None else row.weights[tokens],
            kinds=None if row.kinds is None else row.kinds[tokens],
            starts=row.document_starts.astype(np.int64),
            documents=row.documents,
            capacity=self.capacity,
            features=self.features,
        )

    def nearest_document(self, document: int) -> int:
        """The number of a document that is there and closest to a given one."""
        stored = self._per_shard(lambda shard: shard.documents)
        return int(stored[np.argmin(np.abs(stored - document))])

    def rows_of_document(self, document: int) -> list[int]:
        """The rows that hold a document, by its number in the order of the build."""
        found: list[int] = []
        for number, first in enumerate(self._dataset.row_offsets[:-1].tolist()):
            shard = self._dataset.shard(number)
            places = np.flatnonzero(shard.documents == document)
            found += (first + np.searchsorted(shard.starts_offsets, places, side="right") - 1).tolist()
        return found

    def batches(self, *, ids: bool = False) -> Iterator[TokenBatch]:
        """All rows in order, their documents without padding."""
        capacity, read = self._dataset.capacity, 0
        for number, base in enumerate(self._dataset.row_offsets[:-1].tolist()):
            step = max(1, BATCH_TOKENS // capacity)
            for first in range(0, self._dataset.shards[number].record.rows, step):
                shard = self._dataset.shard(number)
                yield _row_batch(shard.rows(first, min(first + step, len(shard))), base + first, capacity, ids)
                read += step * capacity
                if read >= RELEASE_TOKENS:
                    read = 0
                    shard.release()


def _row_batch(rows: BlockRows, first: int, capacity: int, with_ids: bool) -> TokenBatch:
    """Packed rows as flat documents; `first` is the number of the first row."""
    counts = np.diff(rows.start_offsets)
    lengths = _lengths(rows.start_values, rows.start_offsets, rows.row_lengths)
    real = np.arange(capacity) < rows.row_lengths[:, None]
    columns = (rows.ids if with_ids else None, rows.weights, rows.kinds)
    ids, weights, kinds = (None if column is None else column[real] for column in columns)
    return TokenBatch(
        items=first + np.repeat(np.arange(len(counts), dtype=np.int64), counts),
        offsets=offsets_of(lengths),
        ids=ids,
        weights=weights,
        kinds=kinds,
    )


def _lengths(starts: Ints, offsets: Ints, row_lengths: Ints) -> Ints:
    """Tokens of each document from the starts in its row; `offsets` cut the starts into rows."""
    ends = np.empty_like(starts)
    ends[:-1] = starts[1:]
    ends[offsets[1:] - 1] = row_lengths
    return ends - starts
