"""Which documents of two sets are the same, and which tokens of two documents differ."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import common_length

Ints = NDArray[np.int64]
Stretch = tuple[int, int, int, int]
"""First and last + 1 token in one document, and in the other."""
GRAM = 8
"""Tokens of the pieces by which documents are recognised."""
LONGEST_DIFF = 4_000
"""Tokens between two equal pieces that are still compared one by one; the time grows with the square."""
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def partners(a: Sequence[bytes], b: Sequence[bytes], *, once: bool) -> Ints:
    """Match each key of A with the first equal key of B, by number; -1 for none.

    With `once` a key of B matches once: the n-th occurrence in A with the n-th in B.
    """
    first: dict[bytes, int] = {}
    following = [-1] * len(b)
    for number in range(len(b) - 1, -1, -1):
        following[number] = first.get(b[number], -1)
        first[b[number]] = number
    matches = np.full(len(a), -1, dtype=np.int64)
    for number, key in enumerate(a):
        matches[number] = partner = first.get(key, -1)
        if once and partner >= 0:
            first[key] = following[partner]
    return matches


def grams(ids: NDArray[np.integer]) -> NDArray[np.uint64]:
    """Return a number for each piece of GRAM tokens; for the whole if it is shorter."""
    values = ids.astype(np.uint64) + np.uint64(1)
    size = min(GRAM, len(values))
    sums = np.zeros(len(values) - size + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for step in range(size):
            sums = (sums ^ (sums >> np.uint64(29))) * MULTIPLIER + values[step : len(values) - size + 1 + step]
    return sums


def unequal(a: NDArray[np.integer], b: NDArray[np.integer]) -> Iterator[Stretch]:
    """Stretches that differ, in order: a patience diff by pieces that both have once, token by token between them."""
    head = common_length(a, b)
    tail = min(common_length(a[::-1], b[::-1]), min(len(a), len(b)) - head)
    end_a, end_b = len(a) - tail, len(b) - tail
    i = j = head
    for next_a, next_b in [*_anchors(a[:end_a], b[:end_b], head), (end_a, end_b)]:
        if next_a < i or next_b < j:  # inside the stretch that was equal
            continue
        yield from _between(a, b, (i, next_a, j, next_b))
        size = common_length(a[next_a:end_a], b[next_b:end_b])
        i, j = next_a + size, next_b + size


def _between(a: NDArray[np.integer], b: NDArray[np.integer], gap: Stretch) -> Iterator[Stretch]:
    """Yield what differs in a gap between equal pieces."""
    i1, i2, j1, j2 = gap
    if i1 == i2 or j1 == j2 or max(i2 - i1, j2 - j1) > LONGEST_DIFF:
        if i1 < i2 or j1 < j2:
            yield gap
        return
    matcher = SequenceMatcher(None, a[i1:i2].tolist(), b[j1:j2].tolist(), autojunk=False)
    for kind, a1, a2, b1, b2 in matcher.get_opcodes():
        if kind != "equal":
            yield i1 + a1, i1 + a2, j1 + b1, j1 + b2


def _anchors(a: NDArray[np.integer], b: NDArray[np.integer], head: int) -> list[tuple[int, int]]:
    """Pieces after `head` that both have exactly once, in the longest order that both share."""
    (mine, first), (its, second) = (_once(grams(ids[head:])) for ids in (a, b))
    _, at_mine, at_its = np.intersect1d(mine, its, assume_unique=True, return_indices=True)
    pairs = sorted(zip((first[at_mine] + head).tolist(), (second[at_its] + head).tolist(), strict=True))
    return _increasing(pairs)


def _once(pieces: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], Ints]:
    """Pieces that are there once, and where."""
    values, first, counts = np.unique(pieces, return_index=True, return_counts=True)
    return values[counts == 1], first[counts == 1]


def _increasing(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Longest increasing subsequence of the second elements."""
    tails: list[int] = []
    ends: list[int] = []
    before = [-1] * len(pairs)
    for number, (_, second) in enumerate(pairs):
        at = bisect_left(tails, second)
        before[number] = ends[at - 1] if at else -1
        tails[at : at + 1] = [second]
        ends[at : at + 1] = [number]
    chosen = []
    number = ends[-1] if ends else -1
    while number >= 0:
        chosen.append(pairs[number])
        number = before[number]
    return chosen[::-1]
