"""Compares documents with the records they were made of: each record is rendered, matched and compared by tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray

from chatmill.auditor.layout import Answers, Layout, Place, places_of
from chatmill.auditor.literals import Literals, ProbeRow, rows_of
from chatmill.auditor.masks import Found
from chatmill.auditor.tokenized import TokenizedSet
from chatmill.auditor.vocabulary import VocabularyBytes
from chatmill.core.conversation import Conversation
from chatmill.core.kinds import MARK, Part, RoleCode, part_of, role_of
from chatmill.render.bound import BoundTemplate
from chatmill.render.render import render

Ints = NDArray[np.int64]
BATCH = 1_000
"""Records that are rendered at once."""
GRAM = 8
"""Tokens of the pieces that records are recognised by."""
COMMON = 8
"""Pieces in more records than this are the template's, or a phrase of the data, and recognise nothing."""
LONGEST = 4_000
"""Tokens that differ in one document and are still compared one by one."""
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(slots=True, kw_only=True)
class SourceRows:
    """The rows that Chatmill makes of the records."""

    rows: list[ProbeRow] = field(default_factory=list)
    records: list[int] = field(default_factory=list)
    """The record of each row."""
    whole: dict[int, int] = field(default_factory=dict)
    """Record -> the row that shows the whole conversation."""
    unproved: set[int] = field(default_factory=set)
    """Records with answers whose mask cannot be proved: their answers are not judged."""
    refused: Counter[str] = field(default_factory=Counter)
    """Records that cannot be written, by reason."""
    count: int = 0


def render_source(conversations: Iterable[Conversation], bound: BoundTemplate) -> SourceRows:
    """Render all records."""
    made = SourceRows()
    stream = iter(conversations)
    while batch := list(islice(stream, BATCH)):
        rendered = render(batch, bound, collect_failures=True)
        for _, error in rendered.failed:
            made.refused[error.code] += 1
        for row, kept, untrained in zip(
            rows_of(rendered.tokens), rendered.kept.tolist(), rendered.untrained.tolist(), strict=True
        ):
            record = made.count + kept
            made.whole[record] = len(made.rows)  # the last row of a record is the whole conversation
            if untrained:
                made.unproved.add(record)
            made.rows.append(row)
            made.records.append(record)
        made.count += len(batch)
    return made


@dataclass(slots=True, kw_only=True)
class Comparison:
    """What the source says about a set."""

    found: list[Found]
    equal: int = 0
    """Documents whose ids are those of a record."""
    documents: int = 0
    missing: int = 0
    """Records that no document shows."""
    judged: NDArray[np.bool_]
    """Documents whose layout is exact."""


def compare(
    data: TokenizedSet, layout: Layout, source: SourceRows, literals: Literals, vocabulary: VocabularyBytes
) -> Comparison:
    """Match documents with records; `layout` becomes exact where the ids agree."""
    ends = _live_ends(data)
    begins = data.documents[:-1] + _padding_before(data, ends)
    by_ids = {_key(row.ids, literals): number for number, row in reversed(list(enumerate(source.rows)))}
    seen: set[int] = set()
    exact: list[tuple[int, int]] = []
    rest: list[int] = []
    for number, (first, last) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        if last <= first:
            continue
        row = by_ids.get(_key(data.ids[first:last], literals))
        if row is None:
            rest.append(number)
        else:
            exact.append((number, row))
            seen.add(source.records[row])
    places: dict[str, list[tuple[int, int]]] = {}
    if rest:
        index = _Index(source)
        for number in rest:
            first, last = int(begins[number]), int(ends[number])
            records = index.records_in(data.ids[first:last])
            seen |= set(records)
            for code, start, end in _differences(data.ids[first:last], records, source, literals, vocabulary):
                places.setdefault(code, []).append((first + start, first + end))
    _take_over(layout, data, exact, source, begins, ends)
    judged = np.zeros(len(begins), dtype=np.bool_)
    judged[[number for number, _ in exact]] = True
    documents = int((ends > begins).sum())
    found = [
        Found(code, *_columns(listed), len({_document(data, start) for start, _ in listed}), documents)
        for code, listed in places.items()
    ]
    return Comparison(
        found=found,
        equal=len(exact),
        documents=documents,
        missing=len(set(source.records) - seen - _same_as(source, {row for _, row in exact}, literals)),
        judged=judged,
    )


def _same_as(source: SourceRows, shown: set[int], literals: Literals) -> set[int]:
    """Records that have a row with the ids of a row that is shown."""
    keys = {_key(source.rows[row].ids, literals) for row in shown}
    return {source.records[n] for n, row in enumerate(source.rows) if _key(row.ids, literals) in keys}


def _columns(listed: Sequence[tuple[int, int]]) -> tuple[Ints, Ints]:
    pairs = np.array(listed, dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _document(data: TokenizedSet, place: int) -> int:
    return int(np.searchsorted(data.documents, place, side="right")) - 1


def _live_ends(data: TokenizedSet) -> Ints:
    """One behind the last token of each document that is no padding."""
    live = np.flatnonzero(~data.padding)
    at = np.searchsorted(live, data.documents[1:]) - 1
    last = np.where(at >= 0, live[np.maximum(at, 0)] if len(live) else -1, -1)
    ends: Ints = np.maximum(last + 1, data.documents[:-1])
    return ends


def _padding_before(data: TokenizedSet, ends: Ints) -> Ints:
    live = np.append(np.flatnonzero(~data.padding), len(data.ids))
    first = live[np.searchsorted(live, data.documents[:-1])]
    return np.where(ends > data.documents[:-1], first - data.documents[:-1], 0)


def _key(ids: Ints, literals: Literals) -> bytes:
    """The ids up to the last stop: what a template writes behind it makes no other document."""
    stops = np.flatnonzero(np.isin(ids, list(literals.stops)))
    return ids[: int(stops[-1]) + 1 if len(stops) else len(ids)].astype(np.int64).tobytes()


# ---- exact layouts


def _take_over(
    layout: Layout, data: TokenizedSet, exact: Sequence[tuple[int, int]], source: SourceRows, begins: Ints, ends: Ints
) -> None:
    """Put what the source knows in the place of what the literals say."""
    taken = np.zeros(len(begins), dtype=np.bool_)
    columns: list[list[int]] = []
    for number, row_number in exact:
        row, first, last = source.rows[row_number], int(begins[number]), int(ends[number])
        places = places_of(row)
        size = min(len(places), last - first)
        is_proved = source.records[row_number] not in source.unproved
        if not is_proved:
            places = np.where(places == Place.CHANGED, Place.UNKNOWN, places).astype(np.uint8)
        layout.places[first : first + size] = places[:size]
        layout.places[first + size : last] = Place.BEHIND
        taken[number] = True
        columns += _row_answers(row, places, first, first + size)
    known = np.searchsorted(data.documents, layout.answers.starts, side="right") - 1
    kept = layout.answers.keep(~taken[known] if len(known) else np.empty(0, dtype=np.bool_))
    new = np.array(columns, dtype=np.int64).reshape(-1, 5)
    order = np.argsort(np.concatenate([kept.starts, new[:, 1]]), kind="stable")
    layout.answers = Answers(
        prompts=np.concatenate([kept.prompts, new[:, 0]])[order],
        starts=np.concatenate([kept.starts, new[:, 1]])[order],
        ends=np.concatenate([kept.ends, new[:, 2]])[order],
        stops=np.concatenate([kept.stops, new[:, 3]])[order],
        merged=np.concatenate([kept.merged, np.zeros(len(new), dtype=np.bool_)])[order],
        changed=np.concatenate([kept.changed, new[:, 4] > 0])[order],
    )
    if len(layout.strange):
        document = np.searchsorted(data.documents, layout.strange, side="right") - 1
        layout.strange = layout.strange[~taken[document]]


def _row_answers(row: ProbeRow, places: NDArray[np.uint8], first: int, last: int) -> Iterator[list[int]]:
    """Prompt, start, end, stop and whether it is changed, of each answer of a row."""
    speaking = (places == Place.ANSWER) | (places == Place.STOP)
    numbers = np.where(speaking, row.messages, -1)
    answered = set(numbers.tolist())
    changed = (places == Place.CHANGED) & ~np.isin(row.messages, list(answered - {-1}))
    stops_of_changed = (places == Place.STOP) & ~np.isin(row.messages, row.messages[places == Place.ANSWER])
    numbers = np.where(
        changed | ((places == Place.CHANGED) & np.isin(row.messages, row.messages[stops_of_changed])),
        row.messages,
        numbers,
    )
    edges = np.flatnonzero(np.diff(numbers)) + 1
    bounds = [0, *edges.tolist(), len(numbers)]
    for start, end in pairwise(bounds):
        if numbers[start] < 0 or first + start >= last:
            continue
        stops = start + np.flatnonzero(places[start:end] == Place.STOP)
        stop = int(stops[0]) if len(stops) and first + int(stops[0]) < last else -1
        prompt = start
        while prompt > 0 and places[prompt - 1] == Place.PROMPT:
            prompt -= 1
        is_changed = int((places[start:end] == Place.CHANGED).any())
        yield [
            first + prompt,
            first + start,
            first + (stop if stop >= 0 else end),
            first + stop if stop >= 0 else -1,
            is_changed,
        ]


# ---- documents that differ


class _Index:
    """Finds the records that a document shows parts of, by short pieces of their tokens."""

    def __init__(self, source: SourceRows) -> None:
        self._sizes: dict[int, int] = {}
        hashes, owners = [], []
        for record, number in source.whole.items():
            grams = np.unique(_grams(source.rows[number].ids))
            hashes.append(grams)
            owners.append(np.full(len(grams), record, dtype=np.int64))
        joined = np.concatenate(hashes) if hashes else np.empty(0, dtype=np.uint64)
        owner = np.concatenate(owners) if owners else np.empty(0, dtype=np.int64)
        order = np.argsort(joined, kind="stable")
        self._hashes, self._owners = joined[order], owner[order]
        counts = np.searchsorted(self._hashes, self._hashes, "right") - np.searchsorted(self._hashes, self._hashes)
        rare = counts <= COMMON
        self._hashes, self._owners = self._hashes[rare], self._owners[rare]
        for record, count in zip(*np.unique(self._owners, return_counts=True), strict=True):
            self._sizes[int(record)] = int(count)

    def records_in(self, ids: Ints) -> list[int]:
        """The record of a document; several where most of each is in it."""
        grams = np.unique(_grams(ids))
        first, last = np.searchsorted(self._hashes, grams), np.searchsorted(self._hashes, grams, "right")
        from chatmill.core.tokens import ranges

        votes = Counter(self._owners[ranges(first, last - first)].tolist())
        if not votes:
            return []
        whole = [record for record, count in votes.items() if count >= 0.7 * self._sizes[record] and count > 3]
        if len(whole) > 1 and sum(self._sizes[record] for record in whole) < 1.3 * len(grams):
            return sorted(whole)
        best = max(votes.items(), key=lambda item: (item[1], -item[0]))
        return [best[0]]


def _grams(ids: Ints) -> NDArray[np.uint64]:
    """A number for each piece of GRAM tokens; the whole where it is shorter."""
    values = ids.astype(np.uint64) + np.uint64(1)
    size = min(GRAM, len(values))
    sums = np.zeros(len(values) - size + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for step in range(size):
            sums = (sums ^ (sums >> np.uint64(29))) * MULTIPLIER + values[step : len(values) - size + 1 + step]
    return sums


def _differences(
    ids: Ints, records: Sequence[int], source: SourceRows, literals: Literals, vocabulary: VocabularyBytes
) -> Iterator[tuple[str, int, int]]:
    """Code, first and last + 1 token of each difference of a document."""
    if not records:
        yield "no_record", 0, len(ids)
        return
    if len(records) > 1:
        yield "unbounded", 0, len(ids)
        return
    row = source.rows[source.whole[records[0]]]
    head = _common(row.ids, ids)
    tail = min(_common(row.ids[::-1], ids[::-1]), min(len(row.ids), len(ids)) - head)
    if head == len(ids):  # a beginning of ours: cut, whatever its last tokens look like
        tail = 0
    ours, theirs = row.ids[head : len(row.ids) - tail], ids[head : len(ids) - tail]
    judge = _Judge(row, ids, literals, vocabulary)
    if max(len(ours), len(theirs)) > LONGEST or judge.same_text(head, len(ours), head, len(theirs)):
        steps = [("replace", 0, len(ours), 0, len(theirs))]
    else:
        matcher = SequenceMatcher(None, ours.tolist(), theirs.tolist(), autojunk=False)
        steps = [step for step in matcher.get_opcodes() if step[0] != "equal"]
    for _, i1, i2, j1, j2 in steps:
        code = judge.name(head + i1, head + i2, head + j1, head + j2)
        if code:
            yield code, head + j1, max(head + j2, head + j1 + 1)


def _common(one: Ints, other: Ints) -> int:
    size = min(len(one), len(other))
    different = np.flatnonzero(one[:size] != other[:size])
    return int(different[0]) if len(different) else size


class _Judge:
    """Names differences between a row of ours and a document."""

    def __init__(self, row: ProbeRow, ids: Ints, literals: Literals, vocabulary: VocabularyBytes) -> None:
        self._row, self._ids, self._literals, self._vocabulary = row, ids, literals, vocabulary

    def same_text(self, i: int, n: int, j: int, m: int) -> bool:
        """Whether two stretches spell the same."""
        if not n or not m:
            return False
        return self._spelled(self._row.ids[i : i + n]) == self._spelled(self._ids[j : j + m])

    def _spelled(self, ids: Ints) -> bytes:
        return self._vocabulary.spelled(ids)

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
        places = places_of(self._row)[i1:i2]
        return bool((places == Place.PROMPT).any() and ((places == Place.ANSWER) | (places == Place.CHANGED)).any())

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
