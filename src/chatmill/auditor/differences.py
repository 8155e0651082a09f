"""Names what differs between a document and the record it was made of."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

import numpy as np
from numpy.typing import NDArray

from chatmill.auditor.layout import TokenPlace, places_of_kinds
from chatmill.auditor.literals import Literals
from chatmill.auditor.source import SourceRow, SourceRows
from chatmill.auditor.structure import VocabularyBytes
from chatmill.auditor.thresholds import COMMON, FEW_PIECES, GRAM, LONGEST_DIFF, WHOLE_RECORD
from chatmill.core.kinds import MARK, Part, RoleCode, part_of, role_of
from chatmill.core.tokens import common_length, ranges

Ints = NDArray[np.int64]
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class RecordIndex:
    """Finds the records that a document shows parts of, by short pieces of their tokens."""

    def __init__(self, source: SourceRows) -> None:
        """Takes the row of each record that shows all of it."""
        self._source = source
        records, rows = source.whole()
        self._rows: dict[int, int] = dict(zip(records.tolist(), rows.tolist(), strict=True))
        hashes, owners = [np.empty(0, dtype=np.uint64)], [np.empty(0, dtype=np.int64)]
        for record, number in self._rows.items():
            grams = np.unique(_grams(source.row(number).ids))
            hashes.append(grams)
            owners.append(np.full(len(grams), record, dtype=np.int64))
        joined, owner = np.concatenate(hashes), np.concatenate(owners)
        order = np.argsort(joined, kind="stable")
        joined, owner = joined[order], owner[order]
        counts = np.searchsorted(joined, joined, "right") - np.searchsorted(joined, joined)
        rare = counts <= COMMON
        self._hashes, self._owners, self._alone = joined[rare], owner[rare], counts[rare] == 1
        self._sizes = np.bincount(self._owners[self._alone], minlength=source.count + 1)
        self._beginnings: dict[bytes, list[int]] = {}

    def row_of(self, record: int, ids: Ints) -> int:
        """The row of a record that a document agrees with the longest, where turns have sequences of their own."""
        last = self._rows[record]
        first = int(np.searchsorted(self._source.records, record))
        return max(range(last, first - 1, -1), key=lambda number: common_length(self._source.row(number).ids, ids))

    def records_in(self, ids: Ints) -> list[int]:
        """The record of a document; several where most of what only they have is in it."""
        grams = np.unique(_grams(ids))
        first, last = np.searchsorted(self._hashes, grams), np.searchsorted(self._hashes, grams, "right")
        at = ranges(first, last - first)
        votes = Counter(self._owners[at].tolist())
        if not votes:
            return self._beginning_with(ids)
        own = Counter(self._owners[at[self._alone[at]]].tolist())
        whole = [
            record
            for record, count in own.items()
            if count >= WHOLE_RECORD * self._sizes[record] and count > FEW_PIECES
        ]
        if len(whole) > 1 and len(apart := self._apart(whole, ids)) > 1:
            return sorted(apart)
        best = max(votes.items(), key=lambda item: (item[1], -item[0]))
        return [best[0]]

    def _apart(self, records: Sequence[int], ids: Ints) -> list[int]:
        """Records whose pieces a document has each on its own: one that begins like another is not there twice."""
        left = Counter(_grams(ids).tolist())
        found = []
        for record in sorted(records, key=lambda one: -len(self._source.row(self._rows[one]).ids)):
            wanted = Counter(_grams(self._source.row(self._rows[record]).ids).tolist())
            if (wanted & left).total() >= WHOLE_RECORD * wanted.total():
                left -= wanted
                found.append(record)
        return found

    def _beginning_with(self, ids: Ints) -> list[int]:
        """A record that begins with all of a document, which is too short to know it otherwise."""
        key = ids.tobytes()
        if key not in self._beginnings:
            source = self._source
            starts = source.offsets[:-1]
            rows = np.flatnonzero(np.diff(source.offsets) >= len(ids))
            for step, one in enumerate(ids.tolist()):
                rows = rows[source.ids[starts[rows] + step] == one]
            self._beginnings[key] = source.records[rows[:1]].tolist()
        return self._beginnings[key]


def _grams(ids: Ints) -> NDArray[np.uint64]:
    """A number for each piece of GRAM tokens; the whole where it is shorter."""
    values = ids.astype(np.uint64) + np.uint64(1)
    size = min(GRAM, len(values))
    sums = np.zeros(len(values) - size + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for step in range(size):
            sums = (sums ^ (sums >> np.uint64(29))) * MULTIPLIER + values[step : len(values) - size + 1 + step]
    return sums


def differences(
    ids: Ints, rows: Sequence[int], source: SourceRows, literals: Literals, vocabulary: VocabularyBytes
) -> Iterator[tuple[str, int, int]]:
    """Code, first and last + 1 token of each difference of a document from the rows it seems to be made of."""
    if not rows:
        yield "no_record", 0, len(ids)
        return
    if len(rows) > 1:
        yield "unbounded", 0, len(ids)
        return
    row = source.row(rows[0])
    judge = _Judge(row, ids, literals, vocabulary)
    for i1, i2, j1, j2 in _unequal(row.ids, ids, judge):
        code = judge.name(i1, i2, j1, j2)
        if code:
            yield code, j1, max(j2, j1 + 1)


def _unequal(ours: Ints, theirs: Ints, judge: _Judge) -> Iterator[tuple[int, int, int, int]]:
    """Stretches that differ, in both rows: between pieces that both have once, token by token."""
    head = common_length(ours, theirs)
    tail = min(common_length(ours[::-1], theirs[::-1]), min(len(ours), len(theirs)) - head)
    if head == len(theirs):  # a beginning of ours: cut, whatever its last tokens look like
        tail = 0
    end_ours, end_theirs = len(ours) - tail, len(theirs) - tail
    if judge.same_text(head, end_ours - head, head, end_theirs - head):
        yield head, end_ours, head, end_theirs
        return
    i = j = head
    for at_ours, at_theirs in [*_anchors(ours, theirs, head, end_ours, end_theirs), (end_ours, end_theirs)]:
        if at_ours < i or at_theirs < j:  # inside the stretch that was equal
            continue
        yield from _between(ours, theirs, (i, at_ours, j, at_theirs))
        size = common_length(ours[at_ours:end_ours], theirs[at_theirs:end_theirs])
        i, j = at_ours + size, at_theirs + size


def _between(ours: Ints, theirs: Ints, gap: tuple[int, int, int, int]) -> Iterator[tuple[int, int, int, int]]:
    """What differs in a gap between equal pieces."""
    i1, i2, j1, j2 = gap
    if i1 == i2 and j1 == j2:
        return
    if i1 == i2 or j1 == j2 or max(i2 - i1, j2 - j1) > LONGEST_DIFF:
        yield gap
        return
    matcher = SequenceMatcher(None, ours[i1:i2].tolist(), theirs[j1:j2].tolist(), autojunk=False)
    for kind, a1, a2, b1, b2 in matcher.get_opcodes():
        if kind != "equal":
            yield i1 + a1, i1 + a2, j1 + b1, j1 + b2


def _anchors(ours: Ints, theirs: Ints, head: int, end_ours: int, end_theirs: int) -> list[tuple[int, int]]:
    """Anchors of a patience diff: pieces that both rows have exactly once, in the longest order that both share."""
    if min(end_ours, end_theirs) - head < GRAM:
        return []
    mine, first = _once(_grams(ours[head:end_ours]))
    its, second = _once(_grams(theirs[head:end_theirs]))
    _, at_mine, at_its = np.intersect1d(mine, its, assume_unique=True, return_indices=True)
    pairs = sorted(zip((first[at_mine] + head).tolist(), (second[at_its] + head).tolist(), strict=True))
    return _increasing(pairs)


def _once(grams: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], Ints]:
    """Pieces that are there once, and where."""
    values, first, counts = np.unique(grams, return_index=True, return_counts=True)
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


class _Judge:
    """Names differences between a row of ours and a document."""

    def __init__(self, row: SourceRow, ids: Ints, literals: Literals, vocabulary: VocabularyBytes) -> None:
        self._row, self._ids, self._literals, self._vocabulary = row, ids, literals, vocabulary

    def same_text(self, i: int, n: int, j: int, m: int) -> bool:
        """Whether two stretches spell the same."""
        if not n or not m:
            return False
        return self._spelled(self._row.ids[i : i + n]) == self._spelled(self._ids[j : j + m])

    def _spelled(self, ids: Ints) -> bytes:
        return self._vocabulary.joined(ids)[0]

    def name(self, i1: int, i2: int, j1: int, j2: int) -> str:
        """The code of one difference; empty where it is none."""
        ours, theirs = self._row.ids[i1:i2], self._ids[j1:j2]
        kinds = self._row.kinds[i1:i2].tolist()
        bos = self._literals.bos
        if self.same_text(i1, i2 - i1, j1, j2 - j1):
            special = set(theirs.tolist()) & self._literals.specials
            if special - set(ours.tolist()):
                return "special_from_text"
            return "merged_at_border" if self._crosses_prompt(i1, i2) else "other_ids"
        if not len(theirs) and bos is not None and ours.tolist() == [bos]:
            return "bos_missing"
        if not len(ours) and bos is not None and theirs.tolist() == [bos] and j1 <= 1:
            return "bos_twice"
        if j2 == len(self._ids) and i2 == len(self._row.ids):
            return self._at_end(kinds, theirs)
        stop = [role_of(k) is RoleCode.ASSISTANT and part_of(k) in (Part.TERMINATOR, Part.SEPARATOR) for k in kinds]
        if kinds and all(stop) and not len(theirs):
            return "stop_missing" if any(part_of(k) is Part.TERMINATOR for k in kinds) else "template_differs"
        written = [self._is_written(k, m) for k, m in zip(kinds, self._row.messages[i1:i2].tolist(), strict=True)]
        if kinds:
            return "template_differs" if all(written) else "text_differs"
        if (
            i1
            and part_of(int(self._row.kinds[i1 - 1])) is Part.TERMINATOR
            and set(theirs.tolist()) <= self._literals.stops
        ):
            return ""  # another stop behind the stop: a matter of the mask
        before, after = max(0, i1 - 1), min(i1, len(self._row.ids) - 1)
        inside = (
            self._row.messages[before] == self._row.messages[after]
            and self._row.kinds[before] == self._row.kinds[after]
        )
        return (
            "text_differs"
            if inside and not self._is_written(int(self._row.kinds[before]), int(self._row.messages[before]))
            else "template_differs"
        )

    def _is_written(self, kind: int, message: int) -> bool:
        """Whether a token is the template's."""
        return (
            message < 0
            or bool(kind & MARK)
            or part_of(kind) in (Part.HEADER, Part.TERMINATOR, Part.SEPARATOR, Part.DOCUMENT)
        )

    def _crosses_prompt(self, i1: int, i2: int) -> bool:
        """Whether a stretch of ours has the end of a prompt and the beginning of its answer."""
        places = places_of_kinds(self._row.kinds[i1:i2])
        return bool(
            (places == TokenPlace.PROMPT).any()
            and ((places == TokenPlace.ANSWER) | (places == TokenPlace.CHANGED)).any()
        )

    def _at_end(self, kinds: list[int], theirs: Ints) -> str:
        """A difference at the end: cut, a stop that is missing, or something behind the stop."""
        parts = {part_of(kind) for kind in kinds if role_of(kind) is RoleCode.ASSISTANT}
        if not len(theirs):
            if parts <= {Part.SEPARATOR} and all(role_of(kind) is RoleCode.ASSISTANT for kind in kinds):
                return ""
            if parts <= {Part.TERMINATOR, Part.SEPARATOR} and all(role_of(k) is RoleCode.ASSISTANT for k in kinds):
                return "stop_missing"
            return "truncated"
        if not kinds and not (set(theirs.tolist()) - self._literals.specials):
            return ""  # an eos behind the stop: a matter of the mask
        if all(part_of(kind) in (Part.SEPARATOR, Part.TERMINATOR) for kind in kinds):
            return "template_differs"
        return "text_differs"
