"""One side of a comparison: all splits of a dataset under one numbering, and what its records are known by."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of
from chatmill.prove.compare.pairing import Digests, Keys
from chatmill.store.documents import StoredDataset
from chatmill.store.split import Documents, Split, even_ranges
from chatmill.store.tree_rows import RowsOfTrees

Ints = NDArray[np.int64]


class Side:
    """All splits of a dataset under one numbering: the records of the first split, then those of the next."""

    def __init__(self, dataset: StoredDataset) -> None:
        self.dataset = dataset
        self.names = list(dataset.splits)
        self.sets: list[Split] = [RowsOfTrees(one) if one.has_trees else one for one in dataset.splits.values()]
        """Trees are compared by their rows."""
        self.firsts = offsets_of(np.array([len(documents) for documents in self.sets], dtype=np.int64))

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def split_of(self, numbers: Ints) -> Ints:
        """Which split each record is in."""
        return np.searchsorted(self.firsts, numbers, side="right") - 1

    def place(self, number: int) -> tuple[str, int]:
        """Split and number in it."""
        split = int(self.split_of(np.array([number]))[0])
        return self.names[split], number - int(self.firsts[split])

    def _parts(self, numbers: Ints) -> Iterator[tuple[int, Ints]]:
        """Consecutive numbers of one split, counted in that split."""
        splits = self.split_of(numbers)
        for part in np.split(np.arange(len(numbers)), np.flatnonzero(np.diff(splits)) + 1):
            if len(part):
                split = int(splits[part[0]])
                yield split, numbers[part] - self.firsts[split]

    def gather(self, numbers: Ints) -> Documents:
        """Records of any splits; weights and kinds only where all of these splits have them."""
        parts = [self.sets[split].gather(part) for split, part in self._parts(numbers)]
        if len(parts) == 1:
            return parts[0]
        return Documents(
            ids=np.concatenate([np.empty(0, dtype=np.uint32), *(part.ids for part in parts)]),
            offsets=offsets_of(np.concatenate([np.empty(0, np.int64), *(np.diff(part.offsets) for part in parts)])),
            weights=_all([part.full_weights for part in parts]),
            kinds=_all([part.kinds for part in parts]),
        )

    def facts(self, name: str, numbers: Ints) -> list[Any]:
        """A fact of each record; None where it is not stored."""
        found: list[Any] = []
        for split, part in self._parts(numbers):
            found += self.sets[split].facts(name, part) or [None] * len(part)
        return found

    def batches(self) -> Iterator[Ints]:
        """All numbers in order, about a million tokens at a time."""
        for first, documents in zip(self.firsts.tolist(), self.sets, strict=False):
            yield from (first + numbers for numbers in documents.batches())

    def batches_of(self, numbers: Ints) -> Iterator[Ints]:
        """Some numbers in their order, about a million tokens at a time."""
        lengths = [self.sets[split].lengths[part] for split, part in self._parts(numbers)]
        tokens = np.concatenate([np.empty(0, dtype=np.int64), *lengths])
        return (numbers[first:last] for first, last in even_ranges(tokens))


def _all(columns: Sequence[NDArray[Any] | None]) -> NDArray[Any] | None:
    there = [column for column in columns if column is not None]
    return np.concatenate(there) if there and len(there) == len(columns) else None


def common_keys(a: Side, b: Side) -> tuple[Keys, Keys]:
    """What the records of both sides are known by, with common codes of splits."""
    splits = {name: code for code, name in enumerate(dict.fromkeys([*a.names, *b.names]))}
    unsure_a, unsure_b = _unsure_places(a.dataset.about, b.dataset.about)
    return _keys_of(a, splits, unsure_a), _keys_of(b, splits, unsure_b)


def _unsure_places(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Beginnings of record ids that are mere places (`file:line`) in files that are not the same in both builds."""
    files_a, files_b = ({(f["path"], f["xxh128"]) for f in about.get("inputs", ())} for about in (a, b))
    return tuple(f"{p}:" for p, _ in files_a - files_b), tuple(f"{p}:" for p, _ in files_b - files_a)


def _keys_of(side: Side, splits: Mapping[str, int], unsure: tuple[str, ...]) -> Keys:
    count = len(side)
    record = np.zeros((count, 2), dtype=np.uint64)
    named = np.zeros(count, dtype=np.bool_)
    for numbers in side.batches():
        chosen = slice(int(numbers[0]), int(numbers[-1]) + 1)
        ids = [text or "" for text in side.facts("record_id", numbers)]
        record[chosen] = _digests(text.encode() for text in ids)
        named[chosen] = [bool(text) and not text.startswith(unsure) for text in ids]

    def content(numbers: Ints) -> Digests:
        out = np.empty((len(numbers), 2), dtype=np.uint64)
        done = 0
        for part in side.batches_of(numbers):
            some = side.gather(part)
            borders = zip(some.offsets[:-1].tolist(), some.offsets[1:].tolist(), strict=True)
            out[done : done + len(part)] = _digests(some.ids[start:stop].tobytes() for start, stop in borders)
            done += len(part)
        return out

    codes = np.array([splits[name] for name in side.names], dtype=np.int32)
    split = np.repeat(codes, np.diff(side.firsts))
    return Keys(split=split, record=record, named=named, content=content)


def _digests(values: Iterator[bytes]) -> Digests:
    joined = b"".join(hashlib.blake2b(value, digest_size=16).digest() for value in values)
    return np.frombuffer(joined, dtype="<u8").reshape(-1, 2)
