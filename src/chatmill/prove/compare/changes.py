"""How one record changed: its runs of tokens as lines with - and +, and what is equal left out."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import common_length
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


def changed_lines(a: Documents | None, b: Documents | None) -> tuple[Line, ...]:
    """Return the difference between two single documents; None for a document that is not there."""
    sides = [side for side in (a, b) if side is not None]
    with_kinds = all(side.kinds is not None for side in sides)
    borders = [_borders(side, with_kinds) for side in sides]
    if len(sides) == 2 and np.array_equal(sides[0].ids, sides[1].ids):  # only kinds and weights differ: cut alike
        borders = [np.union1d(*borders)] * 2
    runs = [_runs(side, cuts, sign, with_kinds) for side, cuts, sign in zip(sides, borders, "-+", strict=False)]
    if a is None or b is None:
        return tuple(line._replace(sign="+" if a is None else "-") for line in runs[0])
    lines: list[Line] = []
    for line in _compared(*runs):
        if line.sign == " " and lines and lines[-1].sign == " ":
            line = line._replace(tokens=lines.pop().tokens + line.tokens)
        lines += [line] if line.tokens else []
    return tuple(lines)


def _borders(document: Documents, with_kinds: bool) -> NDArray[np.int64]:
    """Return where runs of one kind and weight begin, and the end."""
    columns = [document.full_weights, document.kinds] if with_kinds else [document.full_weights]
    changes = np.any([column[1:] != column[:-1] for column in columns if column is not None], axis=0)
    return np.concatenate([[0], np.flatnonzero(changes) + 1, [len(document.ids)]])


def _runs(document: Documents, borders: NDArray[np.int64], sign: str, with_kinds: bool) -> list[Line]:
    kinds = document.kinds if with_kinds else None
    weights = document.full_weights.astype(float)
    return [
        Line(sign, end - begin, document.ids[begin:end], None if kinds is None else int(kinds[begin]), weights[begin])
        for begin, end in pairwise(borders.tolist())
        if end > begin
    ]


def _compared(old: list[Line], new: list[Line]) -> Iterator[Line]:
    keys_old, keys_new = ([(line.ids.tobytes(), line.kind, line.weight) for line in side] for side in (old, new))
    for what, i1, i2, j1, j2 in SequenceMatcher(None, keys_old, keys_new, autojunk=False).get_opcodes():
        gone, come = old[i1:i2], new[j1:j2]
        if what == "equal":
            yield Line(" ", sum(line.tokens for line in gone))
        elif len(gone) == len(come) and all(_is_paired(*pair) for pair in zip(gone, come, strict=True)):
            for pair in zip(gone, come, strict=True):
                yield from _narrowed(*pair)
        else:
            yield from (*gone, *come)


def _is_paired(old: Line, new: Line) -> bool:
    return old.kind == new.kind or np.array_equal(old.ids, new.ids)


def _narrowed(old: Line, new: Line) -> Iterator[Line]:
    """Yield two runs, with a few of the tokens that they share at their ends if they differ in tokens alone."""
    if (old.kind, old.weight) != (new.kind, new.weight):
        yield from (old, new)
        return
    head = common_length(old.ids, new.ids)
    tail = min(common_length(old.ids[::-1], new.ids[::-1]), min(old.tokens, new.tokens) - head)
    head, tail = max(0, head - CONTEXT), max(0, tail - CONTEXT)
    yield Line(" ", head)
    for line in (old, new):
        ids = line.ids[head : line.tokens - tail]
        yield line._replace(tokens=len(ids), ids=ids)
    yield Line(" ", tail)
