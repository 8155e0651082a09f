"""The algorithms of the planner: exact fits over intervals of equal bins, and the lower bound."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of, ranges

Lengths = NDArray[np.int32]
Ints = NDArray[np.int64]

CHUNK = 1 << 20
"""Documents whose positions are computed at a time: bounds the temporary arrays of a large plan."""


def decreasing(lengths: Lengths, capacity: int, *, best: bool) -> tuple[Ints, Ints]:
    """(order, bin_offsets) of best-fit or first-fit decreasing; Python loops over distinct lengths only."""
    if not len(lengths):
        return np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
    values, counts = _histogram(lengths, capacity)
    moves = _moves(values[::-1].tolist(), counts[::-1].tolist(), capacity, best=best)
    # NumPy sorts 16-bit keys by radix, in linear time.
    key = (capacity - lengths).astype(np.uint16 if capacity <= 1 << 16 else np.int32, copy=False)
    return _carry_out(moves, np.argsort(key, kind="stable"))


def _histogram(lengths: Lengths, capacity: int) -> tuple[Ints, Ints]:
    """Distinct lengths, ascending, and how many documents have each."""
    if capacity > 4 * len(lengths) + 65536:  # a table of all lengths would be larger than the lengths
        values, counts = np.unique(lengths, return_counts=True)
        return values.astype(np.int64), counts.astype(np.int64)
    table = np.bincount(lengths)
    present = np.flatnonzero(table)
    return present, table[present].astype(np.int64, copy=False)


def _moves(lengths: list[int], counts: list[int], capacity: int, *, best: bool) -> Ints:
    """Place `counts[i]` documents of each length, longest first; rows of (first bin, bins, placed, each).

    A row says: the next `bins * each` documents go into the bins `first .. first + bins`, `each` into every
    one, after the `placed` documents that each of them has already.

    Bins that were opened for equal documents are neighbours, and stay alike until the documents of some
    length run out between them. So the state is a set of intervals of bins with one room. A bin just chosen
    for a document stays the first choice for the next equal one while it has room (it has least room of all,
    or is the earliest): therefore a whole interval takes `room // length` documents a bin in one step, and is
    left with less room than `length`. `ready` holds every interval with enough room, in order of choice, and
    `waiting` the others. A step at least halves an interval's room and a length adds at most four intervals,
    so the number of steps is bounded by distinct lengths x log2(capacity), whatever the number of documents.
    """
    ready: list[tuple[int, int, int, int, int]] = []  # choice, first bin, bins, room, placed
    waiting: list[tuple[int, int, int, int]] = []  # -room, first bin, bins, placed
    moves: list[tuple[int, int, int, int]] = []
    opened = 0

    def keep(first: int, bins: int, room: int, placed: int) -> None:
        if room >= length:
            heappush(ready, (room if best else 0, first, bins, room, placed))
        elif room >= lengths[-1]:
            heappush(waiting, (-room, first, bins, placed))

    for length, left in zip(lengths, counts, strict=True):
        while waiting and -waiting[0][0] >= length:
            negative, first, bins, placed = heappop(waiting)
            keep(first, bins, -negative, placed)
        while left:
            if ready:
                _, first, bins, room, placed = heappop(ready)
            else:
                first, bins, room, placed = opened, -(-left // (capacity // length)), capacity, 0
                opened += bins
            each = room // length
            full = min(bins, left // each)
            left -= full * each
            if full:
                moves.append((first, full, placed, each))
                keep(first, full, room - each * length, placed + each)
            if full < bins and left:
                moves.append((first + full, 1, placed, left))
                keep(first + full, 1, room - left * length, placed + left)
                left, full = 0, full + 1
            if full < bins:
                keep(first + full, bins - full, room, placed)
    return np.array(moves, dtype=np.int64)


def _carry_out(moves: Ints, documents: Ints) -> tuple[Ints, Ints]:
    """(order, bin_offsets) when `documents` are placed, in their order, as the moves say."""
    first, bins, placed, each = moves.T
    change = np.zeros(int((first + bins).max()) + 1, dtype=np.int64)
    np.add.at(change, first, each)
    np.subtract.at(change, first + bins, each)
    bin_offsets = offsets_of(np.cumsum(change[:-1]))
    order = np.empty(len(documents), dtype=np.int64)
    done = 0
    cuts = np.searchsorted(offsets_of(bins * each), np.arange(0, len(documents), CHUNK))
    for a, b in pairwise([*cuts.tolist(), len(moves)]):
        which = ranges(first[a:b], bins[a:b])
        number = np.repeat(each[a:b], bins[a:b])
        places = ranges(bin_offsets[which] + np.repeat(placed[a:b], bins[a:b]), number)
        order[places] = documents[done : done + len(places)]
        done += len(places)
    return order, bin_offsets


def greedy(lengths: Lengths, capacity: int) -> tuple[Ints, Ints]:
    """(order, bin_offsets) of input order, a new bin when a document does not fit; Python loops over bins."""
    total = offsets_of(lengths)
    starts = []
    at, count = 0, len(lengths)
    # `following[i]`: the first document that does not fit into a bin that starts with document i
    following = np.searchsorted(total, total[:-1] + capacity, side="right") - 1
    item = following.item
    while at < count:
        starts.append(at)
        at = item(at)
    return np.arange(count, dtype=np.int64), np.array([*starts, count], dtype=np.int64)


def lower_bound(lengths: Lengths, capacity: int) -> int:
    """Bins that any packing of whole documents needs: the Martello-Toth bound L2, from the histogram.

    For each `least` up to half the capacity: documents over half the capacity need a bin each; those of
    `least` up to half fill what the bins of documents no longer than `capacity - least` leave free, and then
    further bins.
    """
    if not len(lengths):
        return 0
    values, counts = _histogram(lengths, capacity)
    number, tokens = offsets_of(counts), offsets_of(values * counts)
    half = int(np.searchsorted(values, capacity // 2, side="right"))
    big = int(number[-1] - number[half])
    least = values[:half]
    if not half:
        return big
    up_to = np.searchsorted(values, capacity - least, side="right")
    shared = number[up_to] - number[half]
    free = shared * capacity - (tokens[up_to] - tokens[half])
    small = tokens[half] - tokens[:half]
    return big + int(np.maximum(0, -((free - small) // capacity)).max())
