"""Matches documents with the records they were made of: where the ids agree, what every token is becomes exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chatmill.auditor.differences import RecordIndex, differences
from chatmill.auditor.findings import Found
from chatmill.auditor.layout import Answers, Layout, TokenPlace, Wanted, places_of_kinds, ranges_of
from chatmill.auditor.literals import Literals
from chatmill.auditor.source import SourceRows
from chatmill.auditor.structure import VocabularyBytes
from chatmill.auditor.tokenized import TokenizedSet
from chatmill.core.tokens import offsets_of

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(slots=True, kw_only=True)
class SourceComparison:
    """What the source says about a set."""

    found: list[Found]
    equal: int = 0
    """Documents whose ids are those of a record."""
    documents: int = 0
    missing: int = 0
    """Records that no document shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pairs:
    """Documents and the rows whose ids they have."""

    documents: Ints
    rows: Ints
    shown: Bools
    """Rows of the source whose ids are those of some document."""


def compare(
    data: TokenizedSet, layout: Layout, source: SourceRows, literals: Literals, vocabulary: VocabularyBytes
) -> SourceComparison:
    """Match documents with records; `layout` becomes exact where the ids agree."""
    begins, ends = data.bounds
    pairs = _pair(data, source, literals)
    seen = np.zeros(source.count + 1, dtype=np.bool_)
    seen[source.records[pairs.shown]] = True
    rest = data.filled.copy()
    rest[pairs.documents] = False
    places: dict[str, list[tuple[int, int]]] = {}
    index = RecordIndex(source) if rest.any() else None
    for number in np.flatnonzero(rest).tolist():
        first, last = int(begins[number]), int(ends[number])
        assert index is not None
        records = index.records_in(data.ids[first:last])
        seen[records] = True
        rows = [index.row_of(record, data.ids[first:last]) for record in records]
        for code, start, end in differences(data.ids[first:last], rows, source, literals, vocabulary):
            places.setdefault(code, []).append((first + start, first + end))
    _take_over(layout, data, pairs, source)
    documents = int(data.filled.sum())
    found = [_found(code, listed, data, documents) for code, listed in places.items()]
    written = np.unique(source.records)
    return SourceComparison(
        found=found, equal=len(pairs.documents), documents=documents, missing=int((~seen[written]).sum())
    )


def _found(code: str, listed: Sequence[tuple[int, int]], data: TokenizedSet, documents: int) -> Found:
    pairs = np.array(listed, dtype=np.int64).reshape(-1, 2)
    count = len(np.unique(data.document_of(pairs[:, 0])))
    return Found(code, pairs[:, 0], pairs[:, 1], documents, counted=count)


def _pair(data: TokenizedSet, source: SourceRows, literals: Literals) -> _Pairs:
    """Documents that have the ids of a row, up to the last stop: what is behind it makes no other document."""
    theirs, (begins, ends) = data.ids.astype(np.int32), data.bounds
    until = _last_stops(theirs, begins, ends, literals)
    ours = _last_stops(source.ids, source.offsets[:-1], source.offsets[1:], literals)
    keys = _keys(source.ids, source.offsets[:-1], ours)
    by_ids: dict[bytes, int] = {}
    first = np.array([by_ids.setdefault(key, number) for number, key in enumerate(keys)], dtype=np.int64)
    row = np.array([by_ids.get(key, -1) for key in _keys(theirs, begins, until)], dtype=np.int64)
    row[~data.filled] = -1
    documents = np.flatnonzero(row >= 0)
    shown = np.zeros(len(source), dtype=np.bool_)
    shown[row[documents]] = True
    return _Pairs(documents=documents, rows=row[documents], shown=shown[first] if len(first) else shown)


def _last_stops(ids: NDArray[np.int32], begins: Ints, ends: Ints, literals: Literals) -> Ints:
    """One behind the last stop of each stretch; its end where it has none."""
    stops = np.append(-1, np.flatnonzero(np.isin(ids, list(literals.stops))))
    last = stops[np.searchsorted(stops, ends) - 1] + 1
    return np.where(last > begins, last, ends)


def _keys(ids: NDArray[np.int32], begins: Ints, ends: Ints) -> list[bytes]:
    flat = ids.astype(np.int32, copy=False).tobytes()
    return [flat[4 * a : 4 * b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]


# ---- exact layouts


def _take_over(layout: Layout, data: TokenizedSet, pairs: _Pairs, source: SourceRows) -> None:
    """Put what the source knows in the place of what the literals say."""
    begins, ends = data.bounds
    firsts, room = begins[pairs.documents], (ends - begins)[pairs.documents]
    own = np.diff(source.offsets)[pairs.rows]
    sizes = np.minimum(own, room)
    taken = ranges_of(source.offsets[:-1][pairs.rows], source.offsets[:-1][pairs.rows] + sizes)
    into = ranges_of(firsts, firsts + sizes)
    places = places_of_kinds(source.kinds[taken])
    per_token = np.repeat(np.arange(len(sizes)), sizes)
    messages = source.messages[taken].astype(np.int64)
    places[(places == TokenPlace.CHANGED) & source.unproved[pairs.rows][per_token]] = TokenPlace.UNKNOWN
    own_weight = source.token_weights[taken]
    places[(places == TokenPlace.CONTEXT) & (own_weight > 0)] = TokenPlace.UNKNOWN  # the record asks for it
    layout.places[into] = places
    layout.places[ranges_of(firsts + sizes, firsts + room)] = TokenPlace.BEHIND
    blocks = offsets_of(np.diff(source.message_offsets)[pairs.rows])[:-1]  # a row may be shown by several documents
    owners = np.where(messages >= 0, blocks[per_token] + messages, -1)
    new = _exact_answers(places, into, per_token, pairs.documents, owners, own_weight)
    is_taken = np.zeros(len(begins), dtype=np.bool_)
    is_taken[pairs.documents] = True
    old = layout.answers
    kept = old.keep(~is_taken[old.documents])
    layout.answers = kept.merged_with(new)
    layout.strange = layout.strange[~is_taken[data.document_of(layout.strange)]]


def _exact_answers(
    places: NDArray[np.uint8],
    into: Ints,
    document: Ints,
    numbers: Ints,
    owners: Ints,
    weights: NDArray[np.float32],
) -> Answers:
    """The answers of all matched documents.

    `document` counts those from 0, and `numbers` are theirs in the set. `owners` are messages, no two alike, and -1
    for tokens of none.
    """
    answered = np.zeros(int(owners.max(initial=0)) + 2, dtype=np.bool_)
    answered[owners[places == TokenPlace.ANSWER]] = True
    speaking = (places == TokenPlace.ANSWER) | (places == TokenPlace.STOP)
    speaking |= (places == TokenPlace.CHANGED) & ~answered[
        owners
    ]  # of an answer that is changed in part, the rest counts
    speaking &= owners >= 0
    speaker = np.concatenate(([-1], np.where(speaking, owners, -1), [-1]))
    edges = np.flatnonzero(speaker[1:] != speaker[:-1])
    begin = edges[:-1][speaking[edges[:-1]]] if len(edges) else edges
    end = edges[np.searchsorted(edges, begin, side="right")] if len(edges) else edges
    stops = np.append(np.flatnonzero(places == TokenPlace.STOP), len(places))
    stop = stops[np.searchsorted(stops, begin)]
    stop = np.where(stop < end, stop, -1)
    others = np.append(-1, np.flatnonzero(places != TokenPlace.PROMPT))
    prompt = others[np.searchsorted(others, begin) - 1] + 1
    prompt = np.maximum(prompt, np.searchsorted(document, document[begin]))  # not before its document
    changed = offsets_of(places == TokenPlace.CHANGED)
    last = np.where(stop >= 0, stop, end)
    return Answers(
        documents=numbers[document[begin]],
        prompts=into[prompt],
        starts=into[begin],
        ends=into[begin] + (last - begin),
        stops=np.where(stop >= 0, into[stop], -1) if len(into) else stop,
        merged=np.zeros(len(begin), dtype=np.bool_),
        changed=changed[end] > changed[begin],
        wanted=np.where(weights[begin] == 0, Wanted.NO, Wanted.YES).astype(np.int8),
    )
