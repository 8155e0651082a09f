"""Slow and obvious twins of what compiled code does, with the same results and the same errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from chatmill.core.conversations import Conversations
from chatmill.core.kinds import REPEATED
from chatmill.core.native.document_layout import NOBODY, ItemTable, Layout, Origin, Sharing, shown_columns
from chatmill.core.native.gather import Pieces
from chatmill.core.native.trees import AGAIN, COPY, GrownTrees, RowColumns
from chatmill.core.tokens import ranges
from chatmill.render.jinja.paths import count_common

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Made = TypeVar("Made")
ScalarT = TypeVar("ScalarT", bound=np.generic)
OUTSIDE = "outside"

OF_CALLS = (Origin.CALL_NAME, Origin.CALL_ARGUMENTS, Origin.CALL_ID)


def in_each_way(work: Callable[[], Made]) -> tuple[Made, Made]:
    """What some work makes with compiled code, and with these twins in its place: all lines read one by one."""
    fast = work()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chatmill.read.columns.scanner_names", lambda shape: ())
        patch.setattr("chatmill.render.jinja.renderer.Replay", lambda *given: None)
        patch.setattr("chatmill.render.fill.share", shared_by_python)
        patch.setattr("chatmill.render.fill.lay_out", laid_out_by_numpy)
        patch.setattr("chatmill.render.fill.joined_pieces", pieces_by_numpy)
        patch.setattr("chatmill.tokenizer.tokenizer.token_points", points_by_numpy)
        for room in ("render.fill", "core.texts"):
            patch.setattr(f"chatmill.{room}.gathered", gathered_by_numpy)
        for room in ("render.record_keys", "read.columns"):
            patch.setattr(f"chatmill.{room}.distinct", distinct_by_python)
        for room in ("render.fill", "render.record_keys"):
            patch.setattr(f"chatmill.{room}.positions_of", positions_by_python)
        return fast, work()


def distinct_by_python(data: NDArray[np.uint8], starts: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """What `distinct` gives, slower."""
    numbers: dict[bytes, int] = {}
    which = np.empty(len(starts), dtype=np.int64)
    firsts: list[int] = []
    for place, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        if start < 0 or length < 0 or start + length > len(data):
            raise IndexError(OUTSIDE)
        text = data[start : start + length].tobytes()
        if text not in numbers:
            numbers[text] = len(firsts)
            firsts.append(place)
        which[place] = numbers[text]
    return which, np.array(firsts, dtype=np.int64)


def positions_by_python(mark: bytes, data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """What `positions_of` gives, slower."""
    raw, found = data.tobytes(), []
    at = raw.find(mark)
    while at >= 0:
        found.append(at)
        at = raw.find(mark, at + len(mark))
    return np.array(found, dtype=np.int64)


def gathered_by_numpy(
    buffers: Sequence[NDArray[ScalarT]], which: Ints, starts: Ints, lengths: Ints
) -> NDArray[ScalarT]:
    """What `gathered` gives, slower."""
    starts, lengths = starts.astype(np.int64), lengths.astype(np.int64)
    sizes = np.array([len(buffer) for buffer in buffers], dtype=np.int64)
    if len(starts) and (which.min() < 0 or starts.min() < 0 or lengths.min() < 0):
        raise IndexError(OUTSIDE)
    if (lengths > sizes[which] - starts).any():
        raise IndexError(OUTSIDE)
    pool = buffers[0] if len(buffers) == 1 else np.concatenate(list(buffers))
    at = np.concatenate([[0], np.cumsum(sizes)])[which] + starts
    total = int(lengths.sum())
    ends = np.cumsum(lengths)
    copied: NDArray[ScalarT] = pool[np.arange(total) + np.repeat(at - (ends - lengths), lengths)]
    return copied


def points_by_numpy(
    ids: NDArray[np.int32],
    sizes: NDArray[np.int32],
    offsets: Ints,
    which: Ints,
    bytes_: Ints,
) -> Ints:
    """What `token_points` gives, slower."""
    passed = np.zeros(len(ids) + 1, dtype=np.int64)
    np.cumsum(sizes[ids], out=passed[1:])
    wanted = passed[offsets[which]] + bytes_
    return np.clip(np.searchsorted(passed, wanted, side="left"), offsets[which], offsets[which + 1])


def pieces_by_numpy(
    buffers: Sequence[Bytes], which: Bytes, starts: Ints, lengths: Ints, opens: NDArray[np.bool_]
) -> Pieces:
    """What `joined_pieces` gives, slower."""
    data = gathered_by_numpy(buffers, which, starts, lengths)
    begins = np.concatenate([[0], np.cumsum(lengths)])
    firsts = np.flatnonzero(np.append(True, opens[1:])[: len(opens)])
    piece_of = np.repeat(np.arange(len(firsts)), np.diff(np.append(firsts, len(opens))))
    piece_begins = begins[np.append(firsts, len(opens))]
    sizes = np.diff(piece_begins)
    numbers, chosen = distinct_by_python(data, piece_begins[:-1], sizes)
    kept = gathered_by_numpy([data], np.zeros(len(chosen), dtype=np.uint8), piece_begins[chosen], sizes[chosen])
    offsets = np.concatenate([[0], np.cumsum(sizes[chosen])])
    high = np.concatenate([[0], np.cumsum(kept > 127)])
    return Pieces(
        data=kept,
        offsets=offsets,
        not_ascii=high[offsets[1:]] > high[offsets[:-1]],
        numbers=numbers[piece_of],
        before=begins[:-1] - piece_begins[piece_of],
    )


def shared_by_python(table: ItemTable, stretches: Ints, bases: Ints, firsts: Ints, conversations: Ints) -> Sharing:
    """What `share` gives, slower."""
    last: list[tuple[int, int]] = []  # items of the row before, and the messages that they count from
    path: list[tuple[int, int]] = []  # their runs and the rows of these
    kinds: list[int] = []  # of all runs
    skips: list[int] = []
    parents: list[int] = []
    until: list[int] = []
    others: list[tuple[int, int, int]] = []
    begins = table.items["is_ids"] | table.items["opens"]

    def forms(items: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(int(table.items["form"][line]), base) for line, base in items]

    for row, conversation in enumerate(conversations.tolist()):
        own = range(int(firsts[row]), int(firsts[row + 1]))
        sizes = [int(table.firsts[stretches[s] + 1] - table.firsts[stretches[s]]) for s in own]
        items = [
            (int(table.firsts[stretches[s]]) + k, int(bases[s]))
            for s, n in zip(own, sizes, strict=True)
            for k in range(n)
        ]
        if row == 0 or conversation != conversations[row - 1]:
            last, path = [], []
        same = count_common(forms(last), forms(items))
        while same and not all(begins[one[same][0]] for one in (last, items) if same < len(one)):
            same -= 1
        parents.append(path[same - 1][1] if same else -1)
        until.append(path[same - 1][0] + 1 if same else 0)
        for size in sizes:
            skips.append(min(size, max(0, same - sum(sizes[: len(skips) - own.start]))))
        for (run, _), (line, _) in zip(path[:same], items, strict=False):
            if table.items["kind"][line] != kinds[run]:
                others.append((row, run, int(table.items["kind"][line])))
        path = path[:same]
        for line, _ in items[same:]:
            path.append((len(kinds), row))
            kinds.append(int(table.items["kind"][line]))
        last = items
    found = [np.array(column, dtype=np.int64) for column in (skips, parents, until)]
    return Sharing(found[0], found[1], found[2], np.array(others, dtype=np.int64).reshape(-1, 3))


def laid_out_by_numpy(
    table: ItemTable, stretches: Ints, conversations: Ints, bases: Ints, skips: Ints, batch: Conversations
) -> Layout:
    """What `lay_out` gives, slower."""
    buffers, columns = shown_columns(table, batch)
    if len(stretches) and not (stretches.min() >= 0 and conversations.min() >= 0 and conversations.max() < len(batch)):
        raise IndexError(OUTSIDE)
    counts = table.firsts[stretches + 1] - table.firsts[stretches] - skips
    at = ranges(table.firsts[stretches] + skips, counts)
    laid = table.items[at]
    is_text = ~laid["is_ids"]
    items = np.flatnonzero(is_text)
    all_bases = np.repeat(bases, counts)
    lines, owners, bases = at[items], np.repeat(conversations, counts)[items], all_bases[items]
    texts = laid[items]
    origins, starts, sizes = (texts[name].copy() for name in ("origin", "start", "size"))
    places = batch.offsets[owners] + texts["message"] + bases
    which = np.zeros(len(items), dtype=np.uint8)
    for origin, (column, buffer) in columns.items():
        mine = np.flatnonzero(origins == origin)
        places_of = _inside(places[mine], batch.offsets, owners[mine])
        if origin in OF_CALLS:
            calls = batch.messages.call_offsets
            places_of = _inside(calls[places_of] + texts["call"][mine], calls, places_of)
        starts[mine], sizes[mine], which[mine] = column.starts[places_of], column.lengths[places_of], buffer
    others = np.flatnonzero((origins >= Origin.TOOL) | (texts["operations"] > 0))
    whole = np.zeros((len(batch.messages), 2), dtype=np.bool_)
    for column, origin in enumerate((Origin.CONTENT, Origin.REASONING)):
        whole[places[(origins == origin) & (texts["operations"] == 0)], column] = True
    return Layout(
        starts=np.where(is_text, 0, laid["start"]),
        sizes=np.where(is_text, 0, laid["size"]),
        kinds=laid["kind"],
        owners=np.where(laid["owner"] == NOBODY, -1, laid["owner"] + all_bases).astype(np.int32),
        is_text=is_text,
        text_items=items,
        buffers=buffers,
        which=which,
        text_starts=starts,
        text_sizes=sizes,
        opens=texts["opens"],
        others=others,
        lines=lines[others],
        conversations=owners[others],
        bases=bases[others],
        whole=whole,
    )


def _inside(places: Ints, offsets: Ints, owners: Ints) -> Ints:
    """Places that must be among those of their owners."""
    if (places < offsets[owners]).any() or (places >= offsets[owners + 1]).any():
        raise IndexError(OUTSIDE)
    return places


@dataclass(slots=True)
class _Node:
    """A stretch of tokens that the same rows share."""

    owner: int
    start: int
    end: int
    parent: _Node | None
    children: list[_Node]


class _Planting:
    """The rows of one group, put into a tree one after the other."""

    def __init__(self, rows: RowColumns) -> None:
        self._rows = rows
        self.root = _Node(-1, 0, 0, None, [])

    def _shared(self, one: int, other: int, depth: int, end: int) -> int:
        """How far two rows agree from a depth on, up to `end`."""
        rows, length = self._rows, end - depth
        a, b = int(rows.offsets[one]) + depth, int(rows.offsets[other]) + depth
        differ = rows.ids[a : a + length] != rows.ids[b : b + length]
        differ |= ((rows.kinds[a : a + length] ^ rows.kinds[b : b + length]) & ~np.uint8(REPEATED)) != 0
        later = (rows.later[a : a + length] | rows.later[b : b + length]) != 0
        differ |= later & (rows.weights[a : a + length] > 0) & (rows.weights[b : b + length] > 0)
        return depth + int(np.argmax(differ)) if differ.any() else end

    def _merge(self, into: int, other: int, start: int, end: int) -> None:
        rows = self._rows
        a, b = (slice(int(rows.offsets[row]) + start, int(rows.offsets[row]) + end) for row in (into, other))
        rows.kinds[a] &= rows.kinds[b] | ~np.uint8(REPEATED)
        rows.kept[a] |= rows.kept[b]
        rows.later[a] |= rows.later[b]
        np.maximum(rows.weights[a], rows.weights[b], out=rows.weights[a])

    def add(self, row: int) -> None:
        """Put a row into the tree."""
        length, at, depth = int(self._rows.offsets[row + 1] - self._rows.offsets[row]), self.root, 0
        while depth < length:
            for node in at.children:
                stop = self._shared(node.owner, row, depth, min(node.end, length))
                if stop > depth:
                    break
            else:
                at.children.append(_Node(row, depth, length, at, []))
                return
            self._merge(node.owner, row, depth, stop)
            depth = stop
            if depth < min(node.end, length):
                rest = _Node(node.owner, depth, node.end, node, node.children)
                for child in rest.children:
                    child.parent = rest
                node.end, node.children = depth, [rest]
            at = node


def trees_by_python(rows: RowColumns, groups: Ints, capacity: int) -> GrownTrees:
    """What `grow_trees` gives, slower; of rows that have all their tokens."""
    slices: list[tuple[int, int, int]] = []
    branches: list[tuple[int, int]] = []
    trees: list[list[int]] = []  # tokens, branches and group

    def write(node: _Node, start: int, end: int, what: int) -> None:
        slices.append((int(rows.offsets[node.owner]) + start, end - start, what))

    for group, (begin, end) in enumerate(zip(groups[:-1].tolist(), groups[1:].tolist(), strict=True)):
        planting = _Planting(rows)
        for row in range(begin, end):
            planting.add(row)
        waiting = planting.root.children[::-1]  # first nodes of branches, the next one last
        while waiting:
            fresh = waiting.pop()
            chain = [fresh]
            while chain[-1].children:
                waiting += chain[-1].children[:0:-1]
                chain.append(chain[-1].children[0])
            depth, more = fresh.start, chain[-1].end - fresh.start
            above = fresh.parent
            assert above is not None
            if depth == 0 or trees[-1][0] + 1 + more > capacity:
                trees.append([depth, 0, group])
                path = []
                while above is not None and above.end:
                    path.append(above)
                    above = above.parent
                for node in reversed(path):
                    write(node, node.start, node.end, AGAIN)
            else:
                branches.append((trees[-1][0], depth - 1))
                write(above, depth - 1, depth, COPY)
                trees[-1][0] += 1
                trees[-1][1] += 1
            for node in chain:
                write(node, node.start, node.end, 0)
            trees[-1][0] += more
    facts = np.array(trees, dtype=np.int64).reshape(-1, 3).T
    places = np.array(branches, dtype=np.int64).reshape(-1, 2).T
    return GrownTrees(*np.array(slices, dtype=np.int64).reshape(-1, 3).T, *places, *facts)


def ends_by_python(
    lengths: Ints, branches: Ints, starts: Ints, depths: Ints
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """What `tree_ends` gives, slower."""
    positions, ends = np.empty((2, int(lengths.sum())), dtype=np.int32)
    path = np.empty(int(lengths.max(initial=0)) + 1, dtype=np.int32)
    at = branch = 0
    for length, count in zip(lengths.tolist(), branches.tolist(), strict=True):
        begin = depth = 0
        for number in range(count + 1):
            end = length if number == count else int(starts[branch + number])
            if end < begin or end > length or (end == begin and count):
                raise IndexError(OUTSIDE)
            reached, index = depth + end - begin, np.arange(begin, end, dtype=np.int32)
            positions[at + begin : at + end] = np.arange(depth, reached)
            path[depth:reached] = index
            depth = 0 if number == count else int(depths[branch + number])
            if depth < 0 or (depth >= reached and number < count):
                raise IndexError(OUTSIDE)
            ends[at + path[depth:reached]] = end
            begin = end
        at, branch = at + length, branch + count
    return positions, ends
