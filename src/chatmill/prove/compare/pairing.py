"""Which record of one build is which record of another: by record id, else by content.

Everything here is arrays with a few numbers per record, never tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Digests = NDArray[np.uint64]
"""N x 2: 16 bytes of a hash for each record."""


class Match(StrEnum):
    """How a record of A was found in B."""

    RECORD_ID = "record_id"
    """The same id; of several (windows, repeated records) the first with the first, the second with the second, ..."""
    CONTENT = "content"
    """The same token ids under another id, or where one of the two builds stores no ids of records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """What the N records of a build are known by, in the order of the build, one split after the other."""

    split: NDArray[np.int32]
    """Code of the split; the same name has the same code on both sides."""
    record: Digests
    """Hashes of the record ids; any value where `named` is False."""
    named: NDArray[np.bool_]
    """Whether the record has an id of its own: not none, and not just its place in a file."""
    content: Callable[[Ints], Digests]
    """Hashes of the token ids of some records; called only for those that are not found by their ids."""

    def __len__(self) -> int:
        return len(self.split)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """The partner of each record of A."""

    partner: Ints
    """Number of the record of B; -1 where there is none."""
    only_in_b: Ints
    matched: dict[Match, int]
    """How many records were found in which way."""


def pair_records(a: Keys, b: Keys) -> Pairs:
    """Find the partner of every record of A in B; each record of B is taken at most once."""
    pairing = _Pairing(a, b)
    if not pairing.take_all_in_order():
        for how in Match:
            for same_split in (True, False):
                pairing.match(how, same_split=same_split)
    return pairing.result()


class _Pairing:
    """Pairs found so far, and the records that are left."""

    def __init__(self, a: Keys, b: Keys) -> None:
        self._a, self._b = a, b
        self._partner: Ints = np.full(len(a), -1, dtype=np.int64)
        self._taken = np.zeros(len(b), dtype=np.bool_)
        self._matched = dict.fromkeys(Match, 0)

    def take_all_in_order(self) -> bool:
        """The usual case, without sorting: both builds have the same records in the same order."""
        a, b = self._a, self._b
        same = len(a) == len(b) and bool(a.named.all() and b.named.all())
        same = same and all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("split", "record"))
        if same:
            self._take(Match.RECORD_ID, np.arange(len(a)), np.arange(len(b)))
        return same

    def match(self, how: Match, *, same_split: bool) -> None:
        """Pair what is left and has the same hash, of the id where it has one, or of the tokens."""
        named = how is Match.RECORD_ID
        rest_a, rest_b = self._rest(named)
        if not len(rest_a) or not len(rest_b):
            return
        sides: list[list[NDArray[np.integer]]] = []
        for keys, rest in ((self._a, rest_a), (self._b, rest_b)):
            digests = keys.record[rest] if named else keys.content(rest)
            sides.append([digests[:, 0], digests[:, 1], *([keys.split[rest]] if same_split else [])])
        found_a, found_b = _equal(sides[0], sides[1])
        self._take(how, rest_a[found_a], rest_b[found_b])

    def _rest(self, named: bool) -> tuple[Ints, Ints]:
        left_a, left_b = self._partner < 0, ~self._taken
        if named:
            left_a, left_b = left_a & self._a.named, left_b & self._b.named
        return np.flatnonzero(left_a), np.flatnonzero(left_b)

    def _take(self, how: Match, numbers_a: Ints, numbers_b: Ints) -> None:
        self._partner[numbers_a] = numbers_b
        self._taken[numbers_b] = True
        self._matched[how] += len(numbers_a)

    def result(self) -> Pairs:
        """All pairs."""
        return Pairs(partner=self._partner, only_in_b=np.flatnonzero(~self._taken), matched=self._matched)


def _equal(a: Sequence[NDArray[np.integer]], b: Sequence[NDArray[np.integer]]) -> tuple[Ints, Ints]:
    """Positions of the entries that are equal in all columns: the n-th of a value in A with the n-th of it in B."""
    columns = [np.concatenate(pair) for pair in zip(a, b, strict=True)]
    order = np.lexsort(columns[::-1])
    opens = np.zeros(len(order), dtype=np.bool_)
    for column in columns:
        values = column[order]
        opens[1:] |= values[1:] != values[:-1]
    codes = np.empty(len(order), dtype=np.int64)
    codes[order] = np.cumsum(opens)
    codes_a, codes_b = codes[: len(a[0])], codes[len(a[0]) :]
    ranks_a, ranks_b = _ranks(codes_a), _ranks(codes_b)
    most = int(max(ranks_a.max(initial=0), ranks_b.max(initial=0))) + 1
    _, found_a, found_b = np.intersect1d(
        codes_a * most + ranks_a, codes_b * most + ranks_b, assume_unique=True, return_indices=True
    )
    return found_a, found_b


def _ranks(codes: Ints) -> Ints:
    """For each entry, how many equal ones are before it."""
    order = np.argsort(codes, kind="stable")
    opens = np.ones(len(order), dtype=np.bool_)
    opens[1:] = np.diff(codes[order]) != 0
    first = np.flatnonzero(opens)
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = np.arange(len(order)) - np.repeat(first, np.diff(np.append(first, len(order))))
    return ranks
