"""A dataset on disk as documents with numbers, whatever its layout: episodes as they are, packed rows taken apart."""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of
from chatmill.errors import FormatError, UnknownNameError
from chatmill.store.block_manifest import MANIFEST as BLOCKS_MANIFEST
from chatmill.store.blocks import BlockDataset
from chatmill.store.episode_layout import SPLITS, is_episode_split
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.receipts import MANIFEST, read_export, read_manifest

Ints = NDArray[np.int64]

WORK = ".build"
"""Where a build keeps its unfinished work."""
BATCH_TOKENS = 1 << 20
"""Tokens that are read at a time; bounds memory."""


class Layout(StrEnum):
    """How a split lies on disk."""

    EPISODES = "episodes"
    """One conversation (or window of one) per episode."""
    BLOCKS = "blocks"
    """Rows of a fixed size that hold several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Some documents as flat columns; document `i` is `ids[offsets[i]:offsets[i + 1]]`."""

    ids: NDArray[np.uint32]
    offsets: Ints
    weights: NDArray[Any] | None
    """Token-aligned, uint8 or float32; None where the dataset stores none: every token is a target."""
    kinds: NDArray[np.uint8] | None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def full_weights(self) -> NDArray[Any]:
        """The weights; 1 everywhere where none are stored."""
        return np.ones(len(self.ids), dtype=np.uint8) if self.weights is None else self.weights

    @property
    def trained(self) -> NDArray[np.bool_]:
        """Which tokens are targets."""
        return self.full_weights > 0


class DocumentSet(ABC):
    """The documents of one split, numbered from 0 in the order of the build; read in any order."""

    layout: Layout
    lengths: Ints
    """Tokens of every document."""
    has_weights: bool
    has_kinds: bool
    shards: int
    fingerprint: str

    def __len__(self) -> int:
        return len(self.lengths)

    def stored_numbers(self, numbers: Ints) -> Ints:
        """The numbers under which packed rows know these documents; the same, except where some were dropped."""
        return numbers

    @abstractmethod
    def locate(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Shard and first token, in the flat columns of that shard, of some documents."""

    @abstractmethod
    def shard_columns(self, shard: int) -> tuple[NDArray[Any], NDArray[Any] | None, NDArray[Any] | None]:
        """Ids, weights and kinds of a whole shard, flat (views of its files)."""

    def facts(self, name: str, numbers: Ints) -> list[Any] | None:
        """The record ids, source names or turns of some documents; None where the dataset does not store them."""
        return None

    def gather(self, numbers: Ints, lengths: Ints | None = None) -> Documents:
        """Some documents in the order asked for, or only the first `lengths` tokens of each.

        Neighbours on disk are read in one piece, so a walk in the order of the files costs no loop over documents.
        """
        taken = self.lengths[numbers] if lengths is None else lengths
        shards, starts = self.locate(numbers)
        ends = starts + taken
        breaks = np.flatnonzero((shards[1:] != shards[:-1]) | (starts[1:] != ends[:-1])) + 1
        firsts = np.append(0, breaks)[: len(numbers)]
        lasts = np.append(breaks, len(numbers))[: len(numbers)] - 1
        opened = {shard: self.shard_columns(shard) for shard in np.unique(shards).tolist()}
        pieces: list[list[NDArray[Any]]] = [[], [], []]
        for shard, start, end in zip(
            shards[firsts].tolist(), starts[firsts].tolist(), ends[lasts].tolist(), strict=True
        ):
            for column, values in zip(pieces, opened[shard], strict=True):
                if values is not None:
                    column.append(values[start:end])
        ids, weights, kinds = pieces
        return Documents(
            ids=_joined(ids, np.uint32),
            offsets=offsets_of(taken),
            weights=_joined(weights, np.uint8) if self.has_weights else None,
            kinds=_joined(kinds, np.uint8) if self.has_kinds else None,
        )

    def batches(self) -> Iterator[Ints]:
        """All numbers in order, in groups of about `BATCH_TOKENS` tokens."""
        numbers = np.arange(len(self), dtype=np.int64)
        return (numbers[first:last] for first, last in even_ranges(self.lengths))


def _joined(pieces: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    if not pieces:
        return np.empty(0, dtype=dtype)
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def even_ranges(tokens: Ints) -> Iterator[tuple[int, int]]:
    """Ranges of consecutive items that hold about `BATCH_TOKENS` tokens each; a longer item is alone."""
    ends = np.cumsum(tokens)
    first = 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + BATCH_TOKENS, side="right")))
        yield first, last
        first = last


class EpisodeDocuments(DocumentSet):
    """Episodes: each is one document."""

    layout = Layout.EPISODES

    def __init__(self, dataset: EpisodeDataset) -> None:
        self._dataset = dataset
        self.lengths = dataset.lengths
        self.has_weights = dataset.has_masks
        self.has_kinds = "kinds" in dataset.columns
        self.shards = len(dataset.shards)
        self.fingerprint = dataset.fingerprint

    def locate(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Shard and first token of some episodes."""
        shards, starts, _ = self._dataset.locate(numbers)
        return shards, starts

    def shard_columns(self, shard: int) -> tuple[NDArray[Any], NDArray[Any] | None, NDArray[Any] | None]:
        """The files of a shard."""
        files = self._dataset.shard(shard)
        return (
            files.token_ids,
            files.mask if self.has_weights else None,
            files.column("kinds") if self.has_kinds else None,
        )

    def facts(self, name: str, numbers: Ints) -> list[Any] | None:
        """Record ids (`record_id`), source names (`source`) or assistant turns (`turns`) of some episodes."""
        if name not in self._dataset.columns:
            return None
        shards = np.searchsorted(self._dataset.episode_offsets, numbers, side="right") - 1
        rows = numbers - self._dataset.episode_offsets[shards]
        breaks = (np.flatnonzero(np.diff(shards)) + 1).tolist()
        values: list[Any] = []
        for first, last in itertools.pairwise([0, *breaks, len(numbers)] if len(numbers) else []):
            shard = self._dataset.shard(int(shards[first]))
            mine = rows[first:last]
            if name == "record_id":
                values += [shard.text(name, row) for row in mine.tolist()]
            else:
                values += shard.column(name)[mine].tolist()
        return [self._dataset.source_names[code] for code in values] if name == "source" else values


class BlockDocuments(DocumentSet):
    """Packed rows: the documents they hold, by their stored numbers. 36 bytes of memory for each.

    Pieces of one document that stand there under one number count as documents of their own, in row order.
    """

    layout = Layout.BLOCKS

    def __init__(self, dataset: BlockDataset) -> None:
        self._dataset = dataset
        self.capacity, self.pad_id = dataset.capacity, dataset.pad_id
        self.has_weights = dataset.weights_dtype is not None
        self.has_kinds = dataset.has_kinds
        self.shards = len(dataset.shards)
        self.fingerprint = dataset.fingerprint
        shards = [_stored_documents(dataset, number) for number in range(len(dataset.shards))]
        stored, starts, lengths, counts = (np.concatenate(parts) for parts in zip(*shards, strict=True))
        self.order: Ints = np.argsort(stored, kind="stable")
        """For each document, by number, its place among all documents in row order."""
        self.row_documents: Ints = offsets_of(counts)
        """One more than there are rows: where the documents of each row begin in row order."""
        self._stored: Ints = stored[self.order]
        self.repeated: int = int(np.count_nonzero(np.diff(self._stored) == 0))
        """Pieces that stand there under the number of another one."""
        self.lengths = lengths[self.order]
        self._starts = starts[self.order]
        per_shard = np.array([len(part[0]) for part in shards], dtype=np.int64)
        self._shards = np.repeat(np.arange(len(shards), dtype=np.int32), per_shard)[self.order]

    def stored_numbers(self, numbers: Ints) -> Ints:
        """The numbers in the files."""
        return self._stored[numbers]

    def locate(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Shard and first token of some documents."""
        return self._shards[numbers].astype(np.int64), self._starts[numbers]

    def shard_columns(self, shard: int) -> tuple[NDArray[Any], NDArray[Any] | None, NDArray[Any] | None]:
        """The rows of a shard as one flat column, padding included."""
        files = self._dataset.shard(shard)
        columns = (files.ids, files.weights, files.kinds)
        ids, weights, kinds = (None if column is None else column.reshape(-1) for column in columns)
        assert ids is not None
        return ids, weights, kinds


def _stored_documents(dataset: BlockDataset, number: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Number, first token and length of each document of a shard, and the documents of each row."""
    shard = dataset.shard(number)
    counts = np.diff(shard.starts_offsets).astype(np.int64)
    row = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    starts = shard.starts.astype(np.int64)
    ends = np.empty_like(starts)
    ends[:-1] = starts[1:]
    ends[shard.starts_offsets[1:] - 1] = shard.row_lengths
    return shard.documents.astype(np.int64), row * dataset.capacity + starts, ends - starts, counts


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFolder:
    """What stands in the folder of a dataset, before any split is opened."""

    directory: Path
    splits: dict[str, Layout]
    """The splits, train and val first."""
    about: dict[str, Any]
    """The build's manifest; for an export what it says about its source; empty where there is neither."""
    fingerprint: str | None
    """That of the build; None where there is no manifest of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDataset:
    """A folder with one or more splits, and what is known about how it was made."""

    directory: Path
    about: dict[str, Any]
    """The build's manifest; for an export what it says about its source; empty where there is neither."""
    fingerprint: str
    """That of the build where there is a manifest; else a hash over the splits."""
    splits: dict[str, DocumentSet]


def open_dataset(directory: str | Path, splits: Sequence[str] | None = None) -> StoredDataset:
    """Open a finished build, an export of episodes or blocks, or a plain folder of such splits.

    `splits` chooses some; by default all that are there are opened.
    """
    found = find_splits(directory, splits)
    opened = {name: _open_split(found.directory, name, layout) for name, layout in found.splits.items()}
    return StoredDataset(
        directory=found.directory,
        about=found.about,
        fingerprint=found.fingerprint or _fingerprint(opened),
        splits=opened,
    )


def find_splits(directory: str | Path, splits: Sequence[str] | None = None) -> DatasetFolder:
    """Look into a dataset folder and read its manifest, without opening its splits; `splits` chooses some."""
    folder = Path(directory)
    if not folder.is_dir():
        raise FormatError(f"{folder}: no such folder; give the folder of a dataset, which holds a split such as train/")
    manifest = read_manifest(folder)
    if manifest is None and split_layout(folder):
        raise FormatError(f"{folder}: this is one split of a dataset; give the folder above it")
    if manifest is None and (folder / WORK).is_dir():
        raise FormatError(f"{folder}: an unfinished build ({MANIFEST} is missing): go on with chatmill build --resume")
    there = _split_names(folder) if manifest is None else sorted(manifest["splits"], key=_split_order)
    if not there:
        raise FormatError(_why_nothing(folder))
    for name in splits or ():
        if name not in there:
            raise UnknownNameError("split", name, there)
    return DatasetFolder(
        directory=folder,
        splits={name: split_layout(folder / name) or Layout.EPISODES for name in there if not splits or name in splits},
        about=manifest if manifest is not None else _about_export(folder),
        fingerprint=None if manifest is None else manifest["fingerprint"],
    )


def split_layout(folder: Path) -> Layout | None:
    """How the split in a folder lies on disk; None where the folder is no split."""
    if (folder / BLOCKS_MANIFEST).is_file():
        return Layout.BLOCKS
    return Layout.EPISODES if folder.is_dir() and is_episode_split(folder) else None


def _split_order(name: str) -> tuple[int, str]:
    return (SPLITS.index(name) if name in SPLITS else len(SPLITS)), name


def _split_names(folder: Path) -> list[str]:
    found = [path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return sorted((name for name in found if split_layout(folder / name)), key=_split_order)


def _why_nothing(folder: Path) -> str:
    there = sorted(path.name for path in folder.iterdir())[:10]
    return (
        f"{folder}: holds no split of episodes or blocks (found: {', '.join(there) or 'nothing'}); give the folder "
        "that chatmill build wrote"
    )


def _open_split(folder: Path, split: str, layout: Layout) -> DocumentSet:
    if layout is Layout.BLOCKS:
        return BlockDocuments(BlockDataset(folder, split))
    return EpisodeDocuments(EpisodeDataset(folder, split))


def _about_export(folder: Path) -> dict[str, Any]:
    export = read_export(folder)
    return {} if export is None else dict(export["source"]["about"])


def _fingerprint(splits: dict[str, DocumentSet]) -> str:
    text = "\n".join(f"{name} {documents.fingerprint}" for name, documents in splits.items())
    return hashlib.sha256(text.encode()).hexdigest()
