"""A dataset on disk as documents with numbers: the episodes of its splits."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of
from chatmill.errors import FormatError, UnknownNameError
from chatmill.store.episode_layout import SPLITS, is_episode_split
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.pack_plan import PACK, PackPlan, read_pack_plan
from chatmill.store.receipts import KD_SCHEMA, MANIFEST, manifest_kind, read_export, read_manifest

Ints = NDArray[np.int64]

WORK = ".build"
"""Where a build keeps its unfinished work."""
BATCH_TOKENS = 1 << 20
"""Tokens that are read at a time; bounds memory."""


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


class DocumentSet:
    """The episodes of one split, numbered from 0 in the order of the build; read in any order."""

    def __init__(self, dataset: EpisodeDataset) -> None:
        self.dataset = dataset
        self.lengths: Ints = dataset.lengths
        """Tokens of every episode."""
        self.has_weights = dataset.has_masks
        self.has_kinds = "kinds" in dataset.columns
        self.shards = len(dataset.shards)
        self.fingerprint = dataset.fingerprint

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def plan(self) -> PackPlan | None:
        """Which episodes share a row; None where the split is not packed. Read and checked when first asked for."""
        return read_pack_plan(self.dataset.folder, self.lengths)

    def shard_columns(self, shard: int) -> tuple[NDArray[Any], NDArray[Any] | None, NDArray[Any] | None]:
        """Ids, weights and kinds of a whole shard, flat (views of its files)."""
        files = self.dataset.shard(shard)
        return (
            files.token_ids,
            files.mask if self.has_weights else None,
            files.column("kinds") if self.has_kinds else None,
        )

    def facts(self, name: str, numbers: Ints) -> list[Any] | None:
        """Record ids (`record_id`), source names (`source`) or assistant turns (`turns`) of some episodes.

        None where the dataset does not store them.
        """
        if name not in self.dataset.columns:
            return None
        shards = np.searchsorted(self.dataset.episode_offsets, numbers, side="right") - 1
        rows = numbers - self.dataset.episode_offsets[shards]
        breaks = (np.flatnonzero(np.diff(shards)) + 1).tolist()
        values: list[Any] = []
        for first, last in itertools.pairwise([0, *breaks, len(numbers)] if len(numbers) else []):
            shard = self.dataset.shard(int(shards[first]))
            mine = rows[first:last]
            if name == "record_id":
                values += [shard.text(name, row) for row in mine.tolist()]
            else:
                values += shard.column(name)[mine].tolist()
        return [self.dataset.source_names[code] for code in values] if name == "source" else values

    def gather(self, numbers: Ints, lengths: Ints | None = None) -> Documents:
        """Some documents in the order asked for, or only the first `lengths` tokens of each.

        Neighbours on disk are read in one piece, so a walk in the order of the files costs no loop over documents.
        """
        taken = self.lengths[numbers] if lengths is None else lengths
        shards, starts = self._locate(numbers)
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

    def _locate(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Shard and first token of some episodes."""
        shards, starts, _ = self.dataset.locate(numbers)
        return shards, starts

    def batches(self) -> Iterator[Ints]:
        """All numbers in order, in groups of about `BATCH_TOKENS` tokens."""
        numbers = np.arange(len(self), dtype=np.int64)
        return (numbers[first:last] for first, last in even_ranges(self.lengths))


def _joined(pieces: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    if not pieces:
        return np.empty(0, dtype=dtype)
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def even_ranges(tokens: Ints, most: int | None = None) -> Iterator[tuple[int, int]]:
    """Ranges of consecutive items of up to `most` tokens each (default: `BATCH_TOKENS`); a longer item is alone."""
    most = BATCH_TOKENS if most is None else most
    ends = np.cumsum(tokens)
    first = 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + most, side="right")))
        yield first, last
        first = last


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFolder:
    """What stands in the folder of a dataset, before any split is opened."""

    directory: Path
    splits: tuple[str, ...]
    """Train and val first."""
    about: dict[str, Any]
    """The build's manifest; for an export what it says about its source; empty where there is neither."""
    fingerprint: str | None
    """That of the build; None where there is no manifest of one."""

    @property
    def packed(self) -> bool:
        """Whether all splits have a pack plan."""
        return all((self.directory / split / PACK).is_dir() for split in self.splits)


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
    """Open a finished build, an export of episodes, a distillation dataset, or a plain folder of splits of episodes.

    `splits` chooses some; by default all that are there are opened.
    """
    if manifest_kind(Path(directory)) == KD_SCHEMA:
        from chatmill.store.kd_documents import open_kd_dataset

        return open_kd_dataset(Path(directory), splits)
    found = find_splits(directory, splits)
    opened = {name: DocumentSet(EpisodeDataset(found.directory, name)) for name in found.splits}
    return StoredDataset(
        directory=found.directory,
        about=found.about,
        fingerprint=found.fingerprint or fingerprint_of(opened),
        splits=opened,
    )


def find_splits(directory: str | Path, splits: Sequence[str] | None = None) -> DatasetFolder:
    """Look into a dataset folder and read its manifest, without opening its splits; `splits` chooses some."""
    folder = Path(directory)
    if not folder.is_dir():
        raise FormatError(f"{folder}: no such folder; give the folder of a dataset, which holds a split such as train/")
    manifest = read_manifest(folder)
    if manifest is None and is_episode_split(folder):
        raise FormatError(f"{folder}: this is one split of a dataset; give the folder above it")
    if manifest is None and (folder / WORK).is_dir():
        raise FormatError(
            f"{folder}: an unfinished build ({MANIFEST} is missing): continue with chatmill build --resume"
        )
    there = _split_names(folder) if manifest is None else sorted(manifest["splits"], key=_split_order)
    if not there:
        raise FormatError(_why_nothing(folder))
    for name in splits or ():
        if name not in there:
            raise UnknownNameError("split", name, there)
    return DatasetFolder(
        directory=folder,
        splits=tuple(name for name in there if not splits or name in splits),
        about=manifest if manifest is not None else _about_export(folder),
        fingerprint=None if manifest is None else manifest["fingerprint"],
    )


def _split_order(name: str) -> tuple[int, str]:
    return (SPLITS.index(name) if name in SPLITS else len(SPLITS)), name


def _split_names(folder: Path) -> list[str]:
    found = [path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return sorted((name for name in found if is_episode_split(folder / name)), key=_split_order)


def _why_nothing(folder: Path) -> str:
    there = sorted(path.name for path in folder.iterdir())[:10]
    return (
        f"{folder}: holds no split of episodes (found: {', '.join(there) or 'nothing'}); give the folder "
        "that chatmill build wrote"
    )


def _about_export(folder: Path) -> dict[str, Any]:
    export = read_export(folder)
    return {} if export is None else dict(export["source"]["about"])


def fingerprint_of(splits: dict[str, DocumentSet]) -> str:
    """A hash over the splits of a dataset that no manifest names."""
    text = "\n".join(f"{name} {documents.fingerprint}" for name, documents in splits.items())
    return hashlib.sha256(text.encode()).hexdigest()
