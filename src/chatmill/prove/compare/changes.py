"""How one record changed: its runs of tokens as lines with - and +, and what is equal left out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.matching import Stretch, unequal
from chatmill.store.split import Documents

CONTEXT = 8
"""Equal tokens that are shown on both sides of a change inside a run."""


class Line(NamedTuple):
    """Tokens of one kind and one weight that are gone or new, or a stretch that is equal and left out."""

    sign: str
    """`-` in A only, `+` in B only, a blank for tokens that are equal in both."""
    tokens: int
    ids: NDArray[np.uint32] = np.empty(0, dtype=np.uint32)
    """The tokens to show; none for an equal stretch."""
    kind: int | None = None
    """None for an equal stretch, and if one of the datasets stores no kinds."""
    weight: float = 0.0


class _Side:
    """One document, and where its runs of one kind and weight begin, with the end."""

    def __init__(self, document: Documents | None, with_kinds: bool) -> None:
        none = np.empty(0, dtype=np.uint8)
        self.ids = none.astype(np.uint32) if document is None else document.ids
        self.weights = none if document is None else document.full_weights
        self.kinds = document.kinds if document is not None and with_kinds else None
        columns = [self.weights] if self.kinds is None else [self.weights, self.kinds]
        changes = np.any([column[1:] != column[:-1] for column in columns], axis=0)
        self.borders = np.concatenate([[0], np.flatnonzero(changes) + 1, [len(self.ids)]])

    def run(self, first: int, last: int) -> tuple[int, int]:
        """Where the run of the first token of a stretch begins, and where that of its last one ends."""
        if first == last:
            return 0, len(self.ids)
        begin = self.borders[np.searchsorted(self.borders, first, side="right") - 1]
        return int(begin), int(self.borders[np.searchsorted(self.borders, last)])

    def lines(self, sign: str, first: int, last: int, borders: NDArray[np.int64]) -> list[Line]:
        """The runs of a stretch, cut at other `borders` too."""
        cuts = np.union1d(self.borders, borders)
        inside = cuts[(cuts > first) & (cuts < last)].tolist()
        return [
            Line(sign, end - begin, self.ids[begin:end], self._kind(begin), float(self.weights[begin]))
            for begin, end in pairwise([first, *inside, last])
            if end > begin
        ]

    def _kind(self, place: int) -> int | None:
        return None if self.kinds is None else int(self.kinds[place])


def changed_lines(a: Documents | None, b: Documents | None) -> tuple[Line, ...]:
    """The difference between two single documents; None for a document that is not there."""
    with_kinds = all(side is None or side.kinds is not None for side in (a, b))
    old, new = _Side(a, with_kinds), _Side(b, with_kinds)
    lines: list[Line] = []
    at = 0
    for i1, i2, j1, j2 in _widened(old, new, list(_stretches(old, new))):
        lines += [Line(" ", i1 - at)] if i1 > at else []
        same = np.array_equal(old.ids[i1:i2], new.ids[j1:j2])  # only kinds and weights differ: cut alike
        none = np.empty(0, dtype=np.int64)
        gone = old.lines("-", i1, i2, new.borders - j1 + i1 if same else none)
        come = new.lines("+", j1, j2, old.borders - i1 + j1 if same else none)
        is_paired = [change.kind for change in gone] == [change.kind for change in come] or same
        lines += [line for pair in zip(gone, come, strict=True) for line in pair] if is_paired else [*gone, *come]
        at = i2
    return (*lines, *([Line(" ", len(old.ids) - at)] if len(old.ids) > at else []))


def _stretches(old: _Side, new: _Side) -> Iterator[Stretch]:
    """What differs: stretches of other ids, and, between them, of the same ids with other kinds or weights."""
    i = j = 0
    end = (len(old.ids), len(old.ids), len(new.ids), len(new.ids))
    for stretch in [*unequal(old.ids, new.ids), end]:
        size = stretch[0] - i
        differ = old.weights[i : i + size] != new.weights[j : j + size]
        if old.kinds is not None and new.kinds is not None:
            differ = differ | (old.kinds[i : i + size] != new.kinds[j : j + size])
        edges = np.flatnonzero(np.diff(np.concatenate(([False], differ, [False]))))
        for first, last in edges.reshape(-1, 2).tolist():
            yield i + first, i + last, j + first, j + last
        if stretch is not end:
            yield stretch
        i, j = stretch[1], stretch[3]


def _widened(old: _Side, new: _Side, stretches: list[Stretch]) -> list[Stretch]:
    """Stretches with the equal tokens around them that are in the same runs; those that touch become one."""
    widened: list[Stretch] = []
    for number, (i1, i2, j1, j2) in enumerate(stretches):
        last = widened[-1] if widened else (0, 0, 0, 0)
        following = stretches[number + 1][0] if number + 1 < len(stretches) else len(old.ids)
        (begin_old, end_old), (begin_new, end_new) = old.run(i1, i2), new.run(j1, j2)
        before = min(CONTEXT, i1 - last[1], i1 - begin_old, j1 - begin_new)
        after = min(CONTEXT, following - i2, end_old - i2, end_new - j2)
        if widened and i1 - before == last[1]:
            widened[-1] = (last[0], i2 + after, last[2], j2 + after)
        else:
            widened.append((i1 - before, i2 + after, j1 - before, j2 + after))
    return widened
