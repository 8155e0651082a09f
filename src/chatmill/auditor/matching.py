"""Compare documents with the records they were made of: if the ids agree, the layout becomes exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.auditor.findings import RawFinding
from chatmill.auditor.layout import AnswerSpans, DocumentLayout, TokenPlace, Wanted, places_of_kinds, ranges_of
from chatmill.auditor.literals import Literals
from chatmill.auditor.source import SourceRow, SourceRows
from chatmill.auditor.structure import VocabularyBytes
from chatmill.auditor.thresholds import COMMON, FEW_PIECES, WHOLE_RECORD
from chatmill.core.kinds import MARK, Part, RoleCode, parts_of, roles_of
from chatmill.core.matching import Stretch, grams, partners, unequal
from chatmill.core.tokens import common_length, offsets_of, ranges
from chatmill.core.trainer_columns import TrainerRows

Ints = NDArray[np.int64]
CLOSING = (Part.TERMINATOR, Part.SEPARATOR)


def compare(
    data: TrainerRows, layout: DocumentLayout, source: SourceRows, literals: Literals, vocabulary: VocabularyBytes
) -> tuple[list[RawFinding], dict[str, Any]]:
    """Match documents with records; `layout` becomes exact where the ids agree. Return findings, and counts of all."""
    begins, ends = data.bounds
    ours = _keys(source.ids, source.offsets[:-1], source.offsets[1:], literals)
    row = partners(_keys(data.ids.astype(np.int32), begins, ends, literals), ours, once=False)
    row[~data.filled] = -1
    equal = np.flatnonzero(row >= 0)
    seen = np.zeros(source.count + 1, dtype=np.bool_)
    seen[source.records[np.isin(partners(ours, ours, once=False), row)]] = True
    rest = np.flatnonzero(data.filled & (row < 0))
    index = RecordIndex(source) if len(rest) else None
    places: dict[str, list[tuple[int, int]]] = {}
    for first, last in zip(begins[rest].tolist(), ends[rest].tolist(), strict=True):
        assert index is not None
        ids = data.ids[first:last]
        records = index.records_in(ids)
        seen[records] = True
        for code, start, end in _differences(ids, records, index, literals, vocabulary):
            places.setdefault(code, []).append((first + start, first + end))
    _take_over(layout, data, source, equal, row[equal])
    documents = int(data.filled.sum())
    findings = []
    for code, listed in places.items():
        pairs = np.array(listed, dtype=np.int64)
        count = len(np.unique(data.document_of(pairs[:, 0])))
        findings.append(RawFinding(code, pairs[:, 0], pairs[:, 1], documents, counted=count))
    return findings, {
        "records": source.count,
        "documents": documents,
        "equal": len(equal),
        "missing": int((~seen[np.unique(source.records)]).sum()),
        "refused": dict(source.refused),
        "unproved": len(np.unique(source.records[source.unproved])),
    }


def _keys(ids: NDArray[np.int32], begins: Ints, ends: Ints, literals: Literals) -> list[bytes]:
    """Cut stretches of ids after their last stop, if they have one: what follows it does not count."""
    stops = np.append(-1, np.flatnonzero(np.isin(ids, list(literals.stops))))
    last = stops[np.searchsorted(stops, ends) - 1] + 1
    flat = ids.tobytes()
    until = np.where(last > begins, last, ends)
    return [flat[4 * a : 4 * b] for a, b in zip(begins.tolist(), until.tolist(), strict=True)]


class RecordIndex:
    """Finds the records that a document shows parts of, by short pieces of their tokens."""

    def __init__(self, source: SourceRows) -> None:
        """Takes the row of each record that shows all of it, which is its last one."""
        self.source = source
        last = np.flatnonzero(np.append(source.records[1:] != source.records[:-1], True)[: len(source)])
        self._rows = dict(zip(source.records[last].tolist(), last.tolist(), strict=True))
        pieces = [np.unique(grams(source.row(row).ids)) for row in last.tolist()]
        owners = np.repeat(source.records[last], [len(hashes) for hashes in pieces])
        joined = np.concatenate([np.empty(0, dtype=np.uint64), *pieces])
        order = np.argsort(joined, kind="stable")
        joined, owners = joined[order], owners[order]
        counts = np.searchsorted(joined, joined, "right") - np.searchsorted(joined, joined)
        rare = counts <= COMMON
        self._hashes, self._owners, self._alone = joined[rare], owners[rare], counts[rare] == 1
        self._sizes = np.bincount(self._owners[self._alone], minlength=source.count + 1)
        self._beginnings: dict[bytes, list[int]] = {}

    def row_of(self, record: int, ids: Ints) -> SourceRow:
        """Find the row of a record with the longest common prefix; a record may have a row for each turn."""
        first, last = int(np.searchsorted(self.source.records, record)), self._rows[record]
        rows = map(self.source.row, range(last, first - 1, -1))
        return max(rows, key=lambda row: common_length(row.ids, ids))

    def records_in(self, ids: Ints) -> list[int]:
        """Find the record of a document; several if it holds most of the pieces that only they have."""
        pieces = np.unique(grams(ids))
        first, last = np.searchsorted(self._hashes, pieces), np.searchsorted(self._hashes, pieces, "right")
        at = ranges(first, last - first)
        votes = Counter(self._owners[at].tolist())
        if not votes:
            return self._beginning_with(ids)
        unique = Counter(self._owners[at[self._alone[at]]].tolist())
        whole = [record for record, n in unique.items() if n >= WHOLE_RECORD * self._sizes[record] and n > FEW_PIECES]
        if len(whole) > 1 and len(apart := self._apart(whole, ids)) > 1:
            return sorted(apart)
        return [max(votes, key=lambda record: (votes[record], -record))]

    def _apart(self, records: Sequence[int], ids: Ints) -> list[int]:
        """Keep records whose pieces a document holds separately: pieces that two records share count once."""
        left = Counter(grams(ids).tolist())
        apart = []
        rows = {record: self.source.row(self._rows[record]).ids for record in records}
        for record in sorted(records, key=lambda record: -len(rows[record])):
            wanted = Counter(grams(rows[record]).tolist())
            if (wanted & left).total() >= WHOLE_RECORD * wanted.total():
                left -= wanted
                apart.append(record)
        return apart

    def _beginning_with(self, ids: Ints) -> list[int]:
        """Find a record that begins with the whole document, which is too short for pieces."""
        key = ids.tobytes()
        if key not in self._beginnings:
            source = self.source
            rows = np.flatnonzero(np.diff(source.offsets) >= len(ids))
            for step, token in enumerate(ids.tolist()):
                rows = rows[source.ids[source.offsets[rows] + step] == token]
            self._beginnings[key] = source.records[rows[:1]].tolist()
        return self._beginnings[key]


def _differences(
    ids: Ints, records: Sequence[int], index: RecordIndex, literals: Literals, vocabulary: VocabularyBytes
) -> Iterator[tuple[str, int, int]]:
    """Code, first and last + 1 token of each difference of a document from the records it seems to be made of."""
    if len(records) != 1:
        yield "unbounded" if records else "record_differs", 0, len(ids)
        return
    row = index.row_of(records[0], ids)
    stretches = list(unequal(row.ids, ids))
    whole = (stretches[0][0], stretches[-1][1], stretches[0][2], stretches[-1][3])
    for stretch in [whole] if _same_text(row, ids, whole, vocabulary) else stretches:
        code = _name(row, ids, stretch, literals, vocabulary)
        if code:
            yield code, stretch[2], max(stretch[3], stretch[2] + 1)


def _same_text(row: SourceRow, ids: Ints, stretch: Stretch, vocabulary: VocabularyBytes) -> bool:
    i1, i2, j1, j2 = stretch
    return i1 < i2 and j1 < j2 and vocabulary.joined_bytes(row.ids[i1:i2])[0] == vocabulary.joined_bytes(ids[j1:j2])[0]


def _name(row: SourceRow, ids: Ints, stretch: Stretch, literals: Literals, vocabulary: VocabularyBytes) -> str:
    """Name the code of a difference; empty if it is a matter of the mask."""
    i1, i2, j1, j2 = stretch
    ours, theirs = row.ids[i1:i2].tolist(), ids[j1:j2].tolist()
    parts, roles = parts_of(row.kinds[i1:i2]), roles_of(row.kinds[i1:i2])
    if _same_text(row, ids, stretch, vocabulary):
        if (set(theirs) & literals.specials) - set(ours):
            return "special_from_text"
        return "other_ids"
    if literals.bos is not None and ours + theirs == [literals.bos] and (ours or j1 <= 1):
        return "bos_wrong"
    is_end = j2 == len(ids) and i2 == len(row.ids)
    if not theirs and (np.isin(parts, CLOSING) & (roles == RoleCode.ASSISTANT)).all():
        return "stop_missing" if (parts == Part.TERMINATOR).any() else "" if is_end else "template_differs"
    if is_end and not theirs:
        return "truncated"
    if is_end and not ours and set(theirs) <= literals.specials:
        return ""  # an eos after the stop
    if is_end:
        return "template_differs" if np.isin(parts, CLOSING).all() else "record_differs"
    if ours:
        return "template_differs" if _is_written(row, slice(i1, i2)).all() else "record_differs"
    before, after = slice(max(0, i1 - 1), max(0, i1 - 1) + 1), min(i1, len(row.ids) - 1)
    if i1 and parts_of(row.kinds[before])[0] == Part.TERMINATOR and set(theirs) <= literals.stops:
        return ""  # another stop after the stop
    inside = row.messages[before][0] == row.messages[after] and row.kinds[before][0] == row.kinds[after]
    return "record_differs" if inside and not _is_written(row, before).any() else "template_differs"


def _is_written(row: SourceRow, at: slice) -> NDArray[np.bool_]:
    """Mark the tokens that the template writes."""
    kinds = row.kinds[at]
    written: NDArray[np.bool_] = np.isin(parts_of(kinds), (Part.HEADER, *CLOSING, Part.DOCUMENT))
    return written | (row.messages[at] < 0) | (kinds & MARK > 0)


# ---- exact layouts


def _take_over(layout: DocumentLayout, data: TrainerRows, source: SourceRows, documents: Ints, rows: Ints) -> None:
    """Replace the layout of `documents` with what the source says about `rows`, which have the same ids."""
    begins, ends = data.bounds
    firsts, room = begins[documents], (ends - begins)[documents]
    sizes = np.minimum(np.diff(source.offsets)[rows], room)
    origin, into = ranges(source.offsets[:-1][rows], sizes), ranges(firsts, sizes)
    places = places_of_kinds(source.kinds[origin])
    per_token = np.repeat(np.arange(len(sizes)), sizes)
    places[(places == TokenPlace.CHANGED) & source.unproved[rows][per_token]] = TokenPlace.UNKNOWN
    weights = source.token_weights[origin]
    places[(places == TokenPlace.CONTEXT) & (weights > 0)] = TokenPlace.UNKNOWN  # the record asks for it
    layout.places[into] = places
    layout.places[ranges_of(firsts + sizes, firsts + room)] = TokenPlace.AFTER_STOP
    messages = source.messages[origin].astype(np.int64)
    blocks = offsets_of(np.diff(source.tokens.message_offsets)[rows])[:-1]  # several documents may show a row
    owners = np.where(messages >= 0, blocks[per_token] + messages, -1)
    new = _exact_answers(places, into, per_token, documents, owners, weights)
    layout.answers = layout.answers.keep(~np.isin(layout.answers.documents, documents)).merged_with(new)
    layout.unexpected = layout.unexpected[~np.isin(data.document_of(layout.unexpected), documents)]


def _exact_answers(
    places: NDArray[np.uint8],
    into: Ints,
    document: Ints,
    numbers: Ints,
    owners: Ints,
    weights: NDArray[np.float32],
) -> AnswerSpans:
    """Find the answers of all matched documents.

    `document` counts those from 0, and `numbers` are theirs in the set. `owners` are messages, no two alike, and -1
    for tokens of none.
    """
    answered = np.zeros(int(owners.max(initial=0)) + 2, dtype=np.bool_)
    answered[owners[places == TokenPlace.ANSWER]] = True
    speaking = (places == TokenPlace.ANSWER) | (places == TokenPlace.STOP)
    speaking |= (places == TokenPlace.CHANGED) & ~answered[owners]  # of one that is changed in part, the rest counts
    speaking &= owners >= 0
    speaker = np.concatenate(([-1], np.where(speaking, owners, -1), [-1]))
    edges = np.flatnonzero(speaker[1:] != speaker[:-1])
    begin = edges[:-1][speaking[edges[:-1]]]
    end = edges[np.searchsorted(edges, begin, side="right")]
    stops = np.append(np.flatnonzero(places == TokenPlace.STOP), len(places))
    stop = stops[np.searchsorted(stops, begin)]
    others = np.append(-1, np.flatnonzero(places != TokenPlace.PROMPT))
    prompt = others[np.searchsorted(others, begin) - 1] + 1
    prompt = np.maximum(prompt, np.searchsorted(document, document[begin]))  # not before its document
    changed = offsets_of(places == TokenPlace.CHANGED)
    last = np.minimum(stop, end)
    return AnswerSpans(
        documents=numbers[document[begin]],
        prompts=into[prompt],
        starts=into[begin],
        ends=into[begin] + (last - begin),
        stops=np.where(stop < end, into[begin] + (stop - begin), -1),
        merged=np.zeros(len(begin), dtype=np.bool_),
        changed=changed[end] > changed[begin],
        wanted=np.where(weights[begin] == 0, Wanted.NO, Wanted.YES).astype(np.int8),
    )
