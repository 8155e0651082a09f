"""The episodes of a built split by their number, whichever format holds them, with the place of every value on disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from chatmill.compiler.recipe import OutputFormat
from chatmill.core.tokens import offsets_of
from chatmill.errors import FormatError
from chatmill.store.block_manifest import DOCUMENTS, IDS, KINDS
from chatmill.store.block_rows import token_problem
from chatmill.store.blocks import BlockDataset
from chatmill.store.episode_layout import INDEX, MASK, TOKENS
from chatmill.store.episodes import EpisodeDataset

SLICE_TOKENS = 4 << 20
"""Tokens that are looked at together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEpisode:
    """One episode, or one document of a packed row; per-token arrays without padding."""

    ids: NDArray[np.uint32]
    weights: NDArray[Any] | None
    kinds: NDArray[np.uint8] | None
    source: str | None = None
    turns: int | None = None
    trained: int | None = None
    record_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSlice:
    """Consecutive episodes (of blocks: the documents of consecutive rows) as flat columns."""

    numbers: NDArray[np.int64]
    """The number of each episode in the order of the build."""
    ids: NDArray[np.uint32]
    offsets: NDArray[np.int64]
    weights: NDArray[Any] | None
    kinds: NDArray[np.uint8] | None
    sources: NDArray[np.uint32] | None
    """Source codes, one per episode; None in blocks."""
    trained: NDArray[np.uint32] | None
    """Stored counts of trained tokens, one per episode; None in blocks."""


class StoredSplit(Protocol):
    """One split."""

    episodes: int
    """Episodes, or documents."""
    tokens: int
    """Tokens of all of them, padding not counted."""
    padding: int

    def episode(self, number: int) -> StoredEpisode:
        """One episode by its number in the order of the build."""
        ...

    def place(self, number: int, column: str, token: int) -> tuple[Path, int]:
        """File and byte of one value: of `ids`, `weights`, `kinds`, or of a column of the episode itself."""
        ...

    def slices(self) -> Iterator[StoredSlice]:
        """Everything, in the order of the files."""
        ...

    def source_name(self, code: int) -> str:
        """The source with this code."""
        ...

    def padding_problems(self) -> Iterator[tuple[Path, str]]:
        """Folder and sentence about padding that is not padding."""
        ...


def open_split(directory: Path, split: str, format: OutputFormat) -> StoredSplit:
    """Open a split; sizes, index and layout are checked, and a `FormatError` says what is wrong."""
    if format is OutputFormat.EPISODES:
        return _EpisodeSplit(EpisodeDataset(directory, split))
    return BlockSplit(BlockDataset(directory, split))


class _EpisodeSplit:
    def __init__(self, dataset: EpisodeDataset) -> None:
        self._dataset = dataset
        self.episodes, self.tokens, self.padding = len(dataset), dataset.tokens, 0
        for number in range(len(dataset.shards)):
            self._refuse_gaps(number)

    def _refuse_gaps(self, number: int) -> None:
        """A build writes episodes one behind the other."""
        shard = self._dataset.shard(number)
        starts, lengths = shard.index.astype(np.int64).T
        expected = offsets_of(lengths)
        wrong = np.flatnonzero(starts != expected[:-1])
        if len(wrong):
            row = int(wrong[0])
            raise FormatError(
                f"{shard.folder / INDEX}: record {row:,} (byte {row * 16:,}) starts at token {starts[row]:,}; the "
                f"episodes before it end at {expected[row]:,}"
            )
        if expected[-1] != shard.tokens:
            raise FormatError(
                f"{shard.folder / TOKENS}: {shard.tokens:,} tokens, and {INDEX} has {expected[-1]:,} in its episodes"
            )

    def episode(self, number: int) -> StoredEpisode:
        found = self._dataset[number]
        return StoredEpisode(
            ids=found.ids,
            weights=found.weights,
            kinds=found.kinds,
            source=found.source,
            turns=found.turns,
            trained=found.trained,
            record_id=found.record_id,
        )

    def place(self, number: int, column: str, token: int) -> tuple[Path, int]:
        shard_number = int(np.searchsorted(self._dataset.episode_offsets, number, side="right")) - 1
        shard = self._dataset.shard(shard_number)
        row = number - int(self._dataset.episode_offsets[shard_number])
        at = int(shard.index[row, 0]) + token
        if column == "ids":
            return shard.folder / TOKENS, at * 4
        if column == "length":
            return shard.folder / INDEX, row * 16 + 8
        if column == "weights":
            return shard.folder / MASK, at * (shard.mask_dtype.itemsize if shard.mask_dtype else 1)
        spec = self._dataset.columns.get(column)
        if spec is None:
            return shard.folder, 0
        if spec.offsets_file:
            return shard.folder / spec.offsets_file, row * 8
        return shard.folder / spec.file, (at if column == "kinds" else row * np.dtype(spec.dtype).itemsize)

    def source_name(self, code: int) -> str:
        names = self._dataset.source_names
        return names[code] if code < len(names) else f"code {code}"

    def padding_problems(self) -> Iterator[tuple[Path, str]]:
        """Episodes have no padding."""
        return iter(())

    def slices(self) -> Iterator[StoredSlice]:
        dataset = self._dataset
        for number in range(len(dataset.shards)):
            shard = dataset.shard(number)
            ends = np.cumsum(shard.index[:, 1].astype(np.int64))
            first = 0
            while first < shard.episodes:
                begin = int(ends[first - 1]) if first else 0
                last = max(first + 1, int(np.searchsorted(ends, begin + SLICE_TOKENS, side="right")))
                tokens, rows = slice(begin, int(ends[last - 1])), slice(first, last)
                yield StoredSlice(
                    numbers=np.arange(first, last) + dataset.episode_offsets[number],
                    ids=shard.token_ids[tokens],
                    offsets=offsets_of(np.diff(ends[rows], prepend=begin)),
                    weights=shard.mask[tokens] if dataset.has_masks else None,
                    kinds=shard.column("kinds")[tokens] if "kinds" in dataset.columns else None,
                    sources=shard.column("source")[rows] if "source" in dataset.columns else None,
                    trained=shard.column("trained")[rows] if "trained" in dataset.columns else None,
                )
                first = last


class BlockSplit:
    """Finds documents by their number: 16 bytes of memory a document, as the build itself needs."""

    def __init__(self, dataset: BlockDataset) -> None:
        self._dataset = dataset
        self.episodes, self.tokens = dataset.manifest.documents, dataset.tokens
        self.padding = len(dataset) * dataset.capacity - dataset.tokens
        self._rows = np.full(self.episodes, -1, dtype=np.int64)
        self._starts = np.zeros(self.episodes, dtype=np.int32)
        self._lengths = np.zeros(self.episodes, dtype=np.int32)
        for number in range(len(dataset.shards)):
            self._find_documents(number)
        missing = np.flatnonzero(self._rows < 0)
        if len(missing):
            raise FormatError(f"{dataset.folder}: document {missing[0]:,} of {self.episodes:,} stands in no row")

    def _find_documents(self, number: int) -> None:
        shard = self._dataset.shard(number)
        documents, starts = shard.documents, shard.starts
        outside = np.flatnonzero(documents >= self.episodes)
        if len(outside):
            raise FormatError(
                f"{shard.folder / DOCUMENTS.file}: entry {outside[0]:,} is document {documents[outside[0]]:,}; the "
                f"split has {self.episodes:,}"
            )
        counts = np.diff(shard.starts_offsets)
        ends = np.append(starts[1:], 0)
        ends[shard.starts_offsets[1:] - 1] = shard.row_lengths
        if (self._rows[documents] >= 0).any() or len(np.unique(documents)) != len(documents):
            raise FormatError(f"{shard.folder / DOCUMENTS.file}: a document stands in two places")
        self._rows[documents] = int(self._dataset.row_offsets[number]) + np.repeat(np.arange(len(shard)), counts)
        self._starts[documents] = starts
        self._lengths[documents] = ends - starts

    @property
    def capacity(self) -> int:
        """Tokens of a row."""
        return self._dataset.capacity

    def row_documents(self) -> Iterator[tuple[Path, NDArray[np.int64]]]:
        """The numbers of the documents of each shard, in the order of the file."""
        for number in range(len(self._dataset.shards)):
            shard = self._dataset.shard(number)
            yield shard.folder / DOCUMENTS.file, shard.documents

    def episode(self, number: int) -> StoredEpisode:
        """One document."""
        block = self._dataset[int(self._rows[number])]
        tokens = slice(int(self._starts[number]), int(self._starts[number] + self._lengths[number]))
        return StoredEpisode(
            ids=block.ids[tokens],
            weights=None if block.weights is None else block.weights[tokens],
            kinds=None if block.kinds is None else block.kinds[tokens],
        )

    def place(self, number: int, column: str, token: int) -> tuple[Path, int]:
        """File and byte of one value of a document; what is no column of tokens is told by the row's first start."""
        dataset, row = self._dataset, int(self._rows[number])
        shard_number = int(np.searchsorted(dataset.row_offsets, row, side="right")) - 1
        local = row - int(dataset.row_offsets[shard_number])
        at = local * dataset.capacity + int(self._starts[number]) + token
        name = {"ids": IDS.name, "weights": "weights", "kinds": KINDS.name}.get(column, "starts")
        spec = dataset.manifest.column(name)
        if spec is None:
            return dataset.shards[shard_number].folder, 0
        size = np.dtype(spec.dtype).itemsize
        at = int(dataset.shard(shard_number).starts_offsets[local]) if name == "starts" else at
        return dataset.shards[shard_number].folder / spec.file, at * size

    def source_name(self, code: int) -> str:
        """Rows do not know their sources."""
        return f"code {code}"

    def padding_problems(self) -> Iterator[tuple[Path, str]]:
        """The first wrong value on the padding of each shard, if there is one."""
        dataset, step = self._dataset, max(1, SLICE_TOKENS // self._dataset.capacity)
        for number in range(len(dataset.shards)):
            shard = dataset.shard(number)
            for first in range(0, len(shard), step):
                problem = token_problem(shard.rows(first, min(first + step, len(shard))), dataset.pad_id, first)
                if problem:
                    yield shard.folder, problem
                    break

    def slices(self) -> Iterator[StoredSlice]:
        """The documents of all rows, row after row."""
        dataset = self._dataset
        step = max(1, SLICE_TOKENS // dataset.capacity)
        for number in range(len(dataset.shards)):
            shard = dataset.shard(number)
            for first in range(0, len(shard), step):
                rows = shard.rows(first, min(first + step, len(shard)))
                inside = np.arange(dataset.capacity) < rows.row_lengths[:, None]
                opens = np.zeros(rows.ids.shape, dtype=np.bool_)
                opens[np.repeat(np.arange(len(rows)), np.diff(rows.start_offsets)), rows.start_values] = True
                starts = np.flatnonzero(opens[inside])
                yield StoredSlice(
                    numbers=rows.documents,
                    ids=rows.ids[inside],
                    offsets=np.append(starts, int(rows.row_lengths.sum())),
                    weights=None if rows.weights is None else rows.weights[inside],
                    kinds=None if rows.kinds is None else rows.kinds[inside],
                    sources=None,
                    trained=None,
                )
