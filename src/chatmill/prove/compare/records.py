"""Which record of one dataset is which record of another: by record id, else by content."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.checksums import INPUT_HASH
from chatmill.core.matching import partners
from chatmill.core.tokens import offsets_of
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.split import Documents, Split, StoredDataset, even_ranges
from chatmill.store.tree_rows import RowsOfTrees

Ints = NDArray[np.int64]


class Records:
    """The records of all splits of a dataset under one numbering: those of the first split, then those of the next."""

    def __init__(self, dataset: StoredDataset) -> None:
        self.dataset = dataset
        self._names = np.array(list(dataset.splits))
        self.splits: list[Split] = [
            RowsOfTrees(split) if split.has_trees else split for split in dataset.splits.values()
        ]
        """Trees are compared by their rows."""
        self._firsts = offsets_of(np.array([len(split) for split in self.splits], dtype=np.int64))
        self.lengths = np.concatenate([np.empty(0, dtype=np.int64), *(split.lengths for split in self.splits)])

    def __len__(self) -> int:
        return len(self.lengths)

    def split_names(self, numbers: Ints) -> NDArray[np.str_]:
        """Return the split of each record."""
        return self._names[np.searchsorted(self._firsts, numbers, side="right") - 1]

    def place(self, number: int) -> tuple[str, int]:
        """Split, and number in it."""
        split = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return str(self._names[split]), number - int(self._firsts[split])

    def _by_split(self, numbers: Ints) -> Iterator[tuple[Split, Ints, Ints]]:
        """Neighbours of one split: it, their numbers there, and here."""
        splits = np.searchsorted(self._firsts, numbers, side="right") - 1
        for part in np.split(np.arange(len(numbers)), np.flatnonzero(np.diff(splits)) + 1):
            if len(part):
                split = int(splits[part[0]])
                yield self.splits[split], numbers[part] - self._firsts[split], numbers[part]

    def gather(self, numbers: Ints) -> Documents:
        """Return some records; kinds only if all of their splits have them."""
        parts = [split.gather(numbers_there) for split, numbers_there, _ in self._by_split(numbers)]
        if len(parts) == 1:
            return parts[0]
        kinds = [part.kinds for part in parts if part.kinds is not None]
        return Documents(
            ids=np.concatenate([np.empty(0, dtype=np.uint32), *(part.ids for part in parts)]),
            offsets=offsets_of(self.lengths[numbers]),
            weights=np.concatenate([np.empty(0, dtype=np.uint8), *(part.full_weights for part in parts)]),
            kinds=np.concatenate(kinds) if kinds and len(kinds) == len(parts) else None,
        )

    def batches(self, numbers: Ints) -> Iterator[Ints]:
        """Yield some numbers in their order, about a million tokens of one split at a time."""
        for _, _, part in self._by_split(numbers):
            yield from (part[first:last] for first, last in even_ranges(self.lengths[part]))

    def shards(self) -> tuple[list[str], Ints]:
        """Return what the shards hold, by the digests of their files, and the first record of each.

        Empty for a shard whose files nobody has compared with their digests: those of remote datasets are compared
        when they are fetched, and others may have changed.
        """
        contents: list[str] = []
        firsts: list[Ints] = []
        for split, first in zip(self.splits, self._firsts.tolist(), strict=False):
            if isinstance(split, EpisodeDataset):
                contents += split.contents()
                firsts.append(split.episode_offsets[:-1] + first)
            else:
                contents.append("")
                firsts.append(np.array([first]))
        return contents, np.concatenate(firsts)

    def record_ids(self, numbers: Ints) -> list[str | None]:
        """Return the id of each record; None if none is stored."""
        names: list[str | None] = []
        for split, numbers_there, _ in self._by_split(numbers):
            names += split.facts("record_id", numbers_there) or [None] * len(numbers_there)
        return names

    def ids(self, unsure: tuple[str, ...]) -> list[bytes]:
        """Hashes of the record ids; empty for a record without one, and for ids that begin with one of `unsure`."""
        digests: list[bytes] = []
        for numbers in self.batches(np.arange(len(self), dtype=np.int64)):
            names = self.record_ids(numbers)
            digests += [_digest(name.encode()) if name and not name.startswith(unsure) else b"" for name in names]
        return digests

    def contents(self, numbers: Ints) -> list[bytes]:
        """Hashes of the token ids of some records."""
        digests: list[bytes] = []
        for part in self.batches(numbers):
            documents = self.gather(part)
            digests += [_digest(ids.tobytes()) for ids in np.split(documents.ids, documents.offsets[1:-1])]
        return digests


def _digest(value: bytes) -> bytes:
    return hashlib.blake2b(value, digest_size=16).digest()


class Match(StrEnum):
    """How a record of A was found in B."""

    RECORD_ID = "record_id"
    """The same id; of several (windows, repeated records) the first with the first, the second with the second, ..."""
    CONTENT = "content"
    """The same token ids under another id, or if one of the two datasets stores no ids of records."""


def in_equal_shards(a: Records, b: Records, numbers_a: Ints, numbers_b: Ints) -> NDArray[np.bool_]:
    """Return which pairs of records are the same one of two shards with the same digests: their tokens are equal."""
    contents_a, firsts_a = a.shards()
    contents_b, firsts_b = b.shards()
    codes = {content: code for code, content in enumerate(dict.fromkeys(filter(None, contents_a)))}
    kinds_a = np.array([codes.get(content, -1) for content in contents_a])
    kinds_b = np.array([codes.get(content, -2) for content in contents_b])
    shards_a = np.searchsorted(firsts_a, numbers_a, side="right") - 1
    shards_b = np.searchsorted(firsts_b, numbers_b, side="right") - 1
    same_place = numbers_a - firsts_a[shards_a] == numbers_b - firsts_b[shards_b]
    equal: NDArray[np.bool_] = (kinds_a[shards_a] == kinds_b[shards_b]) & same_place
    return equal


class Pairs(NamedTuple):
    """The partner of each record of A."""

    partner: Ints
    """Number of the record of B; -1 for none."""
    only_in_b: Ints
    matched: dict[Match, int]
    """How many records were found in which way."""


def pairs_of(a: Records, b: Records) -> Pairs:
    """Pair two datasets; places in a file (`file:line`) are ids if both read the same bytes from it."""
    files_a, files_b = (_inputs(side.dataset.about) for side in (a, b))
    ids = [
        side.ids(tuple(f"{path}:" for path, _ in files))
        for side, files in ((a, files_a - files_b), (b, files_b - files_a))
    ]
    return pair_records(ids[0], ids[1], a.contents, b.contents)


def pair_records(
    ids_a: Sequence[bytes],
    ids_b: Sequence[bytes],
    contents_a: Callable[[Ints], list[bytes]],
    contents_b: Callable[[Ints], list[bytes]],
) -> Pairs:
    """Find the partner of every record of A in B, by id and then by content; each record of B is taken at most once."""
    named_a, named_b = (np.flatnonzero([bool(digest) for digest in ids]) for ids in (ids_a, ids_b))
    partner = np.full(len(ids_a), -1, dtype=np.int64)
    is_paired = np.zeros(len(ids_b), dtype=np.bool_)

    def pair(numbers_a: Ints, keys_a: list[bytes], numbers_b: Ints, keys_b: list[bytes]) -> int:
        matches = partners(keys_a, keys_b, once=True)
        partner[numbers_a[matches >= 0]] = numbers_b[matches[matches >= 0]]
        is_paired[numbers_b[matches[matches >= 0]]] = True
        return int((matches >= 0).sum())

    by_id = pair(named_a, [ids_a[n] for n in named_a.tolist()], named_b, [ids_b[n] for n in named_b.tolist()])
    rest_a, rest_b = np.flatnonzero(partner < 0), np.flatnonzero(~is_paired)
    is_both = len(rest_a) and len(rest_b)
    by_content = pair(rest_a, contents_a(rest_a), rest_b, contents_b(rest_b)) if is_both else 0
    return Pairs(partner, np.flatnonzero(~is_paired), {Match.RECORD_ID: by_id, Match.CONTENT: by_content})


def _inputs(about: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Return names and hashes of the inputs; exports of older versions name another hash."""
    return {(file["path"], file.get(INPUT_HASH) or file["xxh128"]) for file in about.get("inputs", ())}
