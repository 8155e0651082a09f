"""How one record changed: its runs of tokens as lines with - and +, and what is equal left out."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import common_length
from chatmill.store.split import Documents

CONTEXT = 8
"""Equal tokens that are shown on both sides of a change inside a run."""
MOST_RUNS = 400
"""Longer lists of changed runs are not aligned: all old ones are shown, then all new ones."""

Ids = NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A run of tokens (one kind, one weight) that is gone or new, or a stretch that is equal and left out."""

    sign: str
    """`-` in A only, `+` in B only, a blank for tokens that are equal in both."""
    tokens: int
    """Tokens of the run, or of the equal stretch."""
    kind: int | None = None
    """None for an equal stretch, and where one of the builds stores no kinds."""
    weight: float = 0.0
    ids: Ids
    """The tokens to show; none for an equal stretch."""
    before: int = 0
    after: int = 0
    """Tokens of the run before and behind `ids` that are equal in both and left out."""


@dataclass(frozen=True, slots=True)
class _TokenRun:
    kind: int | None
    weight: float
    ids: Ids

    @property
    def key(self) -> tuple[int | None, float, bytes]:
        return self.kind, self.weight, self.ids.tobytes()


def changed_lines(a: Documents | None, b: Documents | None) -> tuple[Line, ...]:
    """The difference between two single documents; None for a document that is not there."""
    kinds = all(side is None or side.kinds is not None for side in (a, b))
    if a is not None and b is not None and np.array_equal(a.ids, b.ids):
        borders = np.union1d(_borders(a, kinds), _borders(b, kinds))
        return tuple(_relabelled(_runs(a, borders, kinds), _runs(b, borders, kinds)))
    old, new = ([] if side is None else _runs(side, _borders(side, kinds), kinds) for side in (a, b))
    keys_old, keys_new = [run.key for run in old], [run.key for run in new]
    head = _same_beginning(keys_old, keys_new)
    tail = _same_beginning(keys_old[head:][::-1], keys_new[head:][::-1])
    lines = list(_equal_line(old[:head]))
    lines += _middle(old[head : len(old) - tail], new[head : len(new) - tail])
    lines += _equal_line(old[len(old) - tail :])
    return tuple(lines)


def _borders(document: Documents, kinds: bool) -> NDArray[np.int64]:
    """Where runs of one weight and, if they count, one kind begin; and the end."""
    weights = document.full_weights
    changes = weights[1:] != weights[:-1]
    if kinds and document.kinds is not None:
        changes = changes | (document.kinds[1:] != document.kinds[:-1])
    return np.concatenate([[0], np.flatnonzero(changes) + 1, [len(document.ids)]])


def _runs(document: Documents, borders: NDArray[np.int64], kinds: bool) -> list[_TokenRun]:
    codes, weights = document.kinds if kinds else None, document.full_weights
    return [
        _TokenRun(
            None if codes is None else int(codes[first]),
            float(weights[first]),
            document.ids[first:last],
        )
        for first, last in itertools.pairwise(borders.tolist())
        if last > first
    ]


def _relabelled(old: Sequence[_TokenRun], new: Sequence[_TokenRun]) -> Iterator[Line]:
    """The same ids cut at the same places: only kinds and weights differ."""
    for equal, pairs in itertools.groupby(zip(old, new, strict=True), key=lambda pair: pair[0].key == pair[1].key):
        if equal:
            yield from _equal_line([one for one, _ in pairs])
            continue
        for one, other in pairs:
            yield _line("-", one, 0, 0)
            yield _line("+", other, 0, 0)


def _same_beginning(a: Sequence[Any], b: Sequence[Any]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


def _equal_line(runs: Sequence[_TokenRun]) -> Iterator[Line]:
    tokens = sum(len(run.ids) for run in runs)
    if tokens:
        yield Line(sign=" ", tokens=tokens, ids=np.empty(0, dtype=np.uint32))


def _middle(old: Sequence[_TokenRun], new: Sequence[_TokenRun]) -> Iterator[Line]:
    if max(len(old), len(new)) > MOST_RUNS:
        yield from _replaced(old, new)
        return
    matcher = difflib.SequenceMatcher(None, [r.key for r in old], [r.key for r in new], autojunk=False)
    for what, a0, a1, b0, b1 in matcher.get_opcodes():
        yield from _equal_line(old[a0:a1]) if what == "equal" else _replaced(old[a0:a1], new[b0:b1])


def _replaced(old: Sequence[_TokenRun], new: Sequence[_TokenRun]) -> Iterator[Line]:
    """Old runs against new ones: one by one at both ends while their kinds fit, the rest old ones first."""
    kinds_old, kinds_new = [run.kind for run in old], [run.kind for run in new]
    head = _same_beginning(kinds_old, kinds_new)
    tail = _same_beginning(kinds_old[head:][::-1], kinds_new[head:][::-1])
    for one, other in zip(old[:head], new[:head], strict=True):
        yield from _replaced_run(one, other)
    yield from (_line("-", run, 0, 0) for run in old[head : len(old) - tail])
    yield from (_line("+", run, 0, 0) for run in new[head : len(new) - tail])
    for one, other in zip(old[len(old) - tail :], new[len(new) - tail :], strict=True):
        yield from _replaced_run(one, other)


def _replaced_run(old: _TokenRun, new: _TokenRun) -> Iterator[Line]:
    """Two runs of one kind; where the weight is the same, the equal tokens at both ends are left out."""
    if old.key == new.key:
        yield from _equal_line([old])
        return
    before = after = 0
    if old.weight == new.weight:
        before = common_length(old.ids, new.ids)
        after = common_length(old.ids[before:][::-1], new.ids[before:][::-1])
    yield _line("-", old, max(0, before - CONTEXT), max(0, after - CONTEXT))
    yield _line("+", new, max(0, before - CONTEXT), max(0, after - CONTEXT))


def _line(sign: str, run: _TokenRun, before: int, after: int) -> Line:
    shown = run.ids[before : len(run.ids) - after]
    return Line(sign=sign, tokens=len(run.ids), kind=run.kind, weight=run.weight, ids=shown, before=before, after=after)
