"""A dataset and its splits, however they are stored: documents with numbers, read in any order as flat columns."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of
from chatmill.core.trees import Branches
from chatmill.errors import UnknownNameError
from chatmill.pack.plan import Plan

Ints = NDArray[np.int64]

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
    logprobs: NDArray[np.float32] | None = None
    """Of the tokens that a model sampled, NaN for the others; None where the dataset stores none."""

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


class TokenColumns(NamedTuple):
    """What is stored of tokens, flat; None where it is not stored."""

    ids: NDArray[Any]
    weights: NDArray[Any] | None = None
    kinds: NDArray[Any] | None = None
    logprobs: NDArray[Any] | None = None


class Split(ABC):
    """The documents of one split, numbered from 0 in the order of the build."""

    shards: Sequence[Any]
    """What it is stored in, in order; each has `spans(rows)`: start and length of documents, in its tokens."""
    episode_offsets: Ints
    """The first document of each shard, and the number of all documents."""
    has_masks: bool
    has_kinds: bool
    has_logprobs: bool = False
    has_sides: bool = False
    """Whether documents are answers that people compared, rejected ones among them."""
    has_trees: bool = False
    """Whether its documents are trees: branches, and not one text, follow each other."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    @abstractmethod
    def lengths(self) -> Ints:
        """Tokens of every document."""

    @property
    def plan(self) -> Plan | None:
        """Which documents share a row; None where the split is not packed."""
        return None

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Differs where the documents do."""

    @abstractmethod
    def shard_columns(self, shard: int) -> TokenColumns:
        """Return the columns of a whole shard that have a value per token."""

    @abstractmethod
    def facts(self, name: str, numbers: Ints) -> list[Any] | None:
        """Record ids (`record_id`), source names (`source`) or assistant turns (`turns`) of some documents.

        None where the dataset does not store them.
        """

    @property
    def has_pictures(self) -> bool:
        """Whether a document has pictures."""
        return False

    def branches(self, numbers: Ints) -> Branches:
        """Return the branches of some documents."""
        return Branches.none(len(numbers))

    def release(self) -> None:
        """Unmap the files; they are mapped again when they are needed."""
        for shard in self.shards:
            shard.files.release()

    def by_shard(self, numbers: Ints) -> Iterator[tuple[int, Ints, Ints]]:
        """Some documents shard by shard: the number of the shard, their rows in it, and their places in `numbers`."""
        shards = np.searchsorted(self.episode_offsets, numbers, side="right") - 1
        for shard in np.unique(shards).tolist():
            places = np.flatnonzero(shards == shard)
            yield shard, numbers[places] - self.episode_offsets[shard], places

    def locate(self, numbers: Ints) -> tuple[Ints, Ints, Ints]:
        """Shard number, start and length (in tokens) of some documents."""
        found = np.empty((3, len(numbers)), dtype=np.int64)
        for shard, rows, places in self.by_shard(numbers):
            found[0, places] = shard
            found[1:, places] = self.shards[shard].spans(rows)
        shards, starts, lengths = found
        return shards, starts, lengths

    def gather(self, numbers: Ints, lengths: Ints | None = None) -> Documents:
        """Return some documents in the order asked for, or only the first `lengths` tokens of each.

        Neighbours on disk are read in one piece, so a walk in the order of the files costs no loop over documents.
        """
        shards, starts, whole = self.locate(numbers)
        kept = whole if lengths is None else lengths
        ends = starts + kept
        breaks = np.flatnonzero((shards[1:] != shards[:-1]) | (starts[1:] != ends[:-1])) + 1
        firsts = np.append(0, breaks)[: len(numbers)]
        lasts = np.append(breaks, len(numbers))[: len(numbers)] - 1
        opened = {shard: self.shard_columns(shard) for shard in np.unique(shards).tolist()}
        pieces: list[list[NDArray[Any]]] = [[] for _ in TokenColumns._fields]
        for shard, start, end in zip(
            shards[firsts].tolist(), starts[firsts].tolist(), ends[lasts].tolist(), strict=True
        ):
            for column, values in zip(pieces, opened[shard], strict=True):
                if values is not None:
                    column.append(values[start:end])
        ids, weights, kinds, logprobs = pieces
        return Documents(
            ids=_joined(ids, np.uint32),
            offsets=offsets_of(kept),
            weights=_joined(weights, np.uint8) if self.has_masks else None,
            kinds=_joined(kinds, np.uint8) if self.has_kinds else None,
            logprobs=_joined(logprobs, np.float32) if self.has_logprobs else None,
        )

    def batches(self) -> Iterator[Ints]:
        """Return all numbers in order, in groups of about `BATCH_TOKENS` tokens."""
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


@dataclass(frozen=True, kw_only=True)
class StoredDataset:
    """A folder with one or more splits, and what is known about how it was made."""

    directory: Path
    about: dict[str, Any]
    """The build's manifest; for an export what it says about its source; empty if there is neither."""
    of_build: str | None
    """The fingerprint of the build; None if there is no manifest of one."""
    splits: Mapping[str, Split]
    """Train and val first."""

    @cached_property
    def fingerprint(self) -> str:
        """That of the build if there is a manifest; else a hash over the splits."""
        if self.of_build is not None:
            return self.of_build
        text = "\n".join(f"{name} {documents.fingerprint}" for name, documents in self.splits.items())
        return hashlib.sha256(text.encode()).hexdigest()


def chosen_splits(there: Collection[str], splits: Sequence[str] | None, hint: str = "") -> list[str]:
    """Those that are asked for, in the order of the dataset (default: all); one that is not there is an error."""
    for name in splits or ():
        if name not in there:
            raise UnknownNameError("split", name, list(there), hint)
    return [name for name in there if not splits or name in splits]
