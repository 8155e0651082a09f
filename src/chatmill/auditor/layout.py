"""What every token of a set is, found by the template's literals, and tested on the template's own renderings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.auditor.literals import UNUSUAL, Literals, Opening, learn
from chatmill.auditor.thresholds import MOST_AFTER_STOP
from chatmill.core.kinds import REPEATED, Part, RoleCode, parts_of, roles_of
from chatmill.core.tokens import offsets_of, ranges
from chatmill.core.trainer_columns import TrainerRows, read_columns
from chatmill.render.model_template import ModelTemplate

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Codes = NDArray[np.uint8]


class TokenPlace(IntEnum):
    """What a token is, as far as training is concerned."""

    UNKNOWN = 0
    CONTEXT = 1
    """Of a message that is not the assistant's."""
    PROMPT = 2
    """Opens an answer: the model is given it."""
    ANSWER = 3
    STOP = 4
    AFTER_STOP = 5
    """Written after the stop."""
    BEGIN = 6
    """Begins the document."""
    CHANGED = 7
    """An answer as later messages have changed it; known only from a source."""


class Wanted(IntEnum):
    """Whether a record wants an answer trained."""

    UNKNOWN = -1
    """There is no source, or the document differs from its record."""
    NO = 0
    """It has a weight of 0, or `train: false`."""
    YES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSpans:
    """All answers of a set, in order."""

    documents: Ints
    """The document of each: an empty one at its end begins where the next document does."""
    prompts: Ints
    """Where the prompt's own ids begin."""
    starts: Ints
    ends: Ints
    """One after the last token before the stop."""
    stops: Ints
    """Places of the stops; -1 for an answer without one."""
    merged: Bools
    """The first token holds the end of the prompt too."""
    changed: Bools
    """Later messages have changed it; known only from a source."""
    wanted: NDArray[np.int8]
    """Whether the record wants it trained, as `Wanted`."""

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def behind(self) -> Ints:
        """One after the stop of each, or after its last token."""
        return np.where(self.stops >= 0, self.stops + 1, self.ends)

    def keep(self, chosen: Bools) -> AnswerSpans:
        """Select answers."""
        return AnswerSpans(**{field.name: getattr(self, field.name)[chosen] for field in dataclasses.fields(self)})

    def merged_with(self, other: AnswerSpans) -> AnswerSpans:
        """Merge two sets of answers, in order."""
        order = np.argsort(np.concatenate([self.starts, other.starts]), kind="stable")
        names = [field.name for field in dataclasses.fields(self)]
        return AnswerSpans(
            **{name: np.concatenate([getattr(self, name), getattr(other, name)])[order] for name in names}
        )


@dataclass(slots=True, kw_only=True)
class DocumentLayout:
    """What every token is."""

    places: Codes
    answers: AnswerSpans
    unexpected: Ints
    """Special tokens where the template writes none."""
    openings: Ints
    """Where messages open."""
    opening_roles: Ints
    doubtful: int = 0
    """Special tokens that a text may have spelled; only a source shows it."""


def find_literals(bound: ModelTemplate) -> Literals:
    """Learn the literals of a template; they are unusable unless they explain its own renderings of all probes."""
    literals = learn(bound)
    if literals.unusable:
        return literals
    probes = literals.probes
    row = np.repeat(np.arange(len(probes)), np.diff(probes.offsets))
    is_unusual = np.isin(probes.records, [number for number, answers in UNUSUAL.items() if answers])[row]
    wrong = _wrong_places(literals)
    if wrong.any() and is_unusual[wrong].all():
        literals = dataclasses.replace(literals, asked_only=True)
        wrong = _wrong_places(literals)
    if wrong.any():
        token = bound.tokenizer.decode(probes.ids[wrong][:1])
        why = f"ids alone do not tell turns apart under this template (at {token!r} in a probe)"
        return dataclasses.replace(literals, openings=(), unusable=why)
    unexpected = find_layout(set_of_probes(literals), literals).unexpected
    odd = probes.ids[unexpected[~probes.doubtful[row[unexpected]]]]
    return dataclasses.replace(literals, odd=frozenset(odd.tolist()))


def set_of_probes(literals: Literals) -> TrainerRows:
    """Turn the rendered probes into a set of rows."""
    return read_columns({"input_ids": (literals.probes.ids, literals.probes.offsets)})


def _wrong_places(literals: Literals) -> Bools:
    """Find the tokens of proved probes that the literals place wrongly."""
    probes = literals.probes
    layout = find_layout(set_of_probes(literals), literals)
    actual, expected = _rough(layout.places), _rough(places_of_kinds(probes.kinds))
    # a stop that opens the next message (GLM) ends the answer only where that is trained
    repeated = np.append(False, probes.kinds[:-1] & REPEATED > 0)[layout.openings]
    opens = layout.openings[repeated & (actual[layout.openings] == TokenPlace.STOP)]
    expected[opens[expected[opens] == TokenPlace.CONTEXT]] = TokenPlace.STOP
    proved = np.repeat(~probes.doubtful, np.diff(probes.offsets))
    wrong: Bools = (actual != expected) & (actual != TokenPlace.UNKNOWN) & proved
    return wrong


def _rough(places: Codes) -> Codes:
    """Collapse places that masks treat alike."""
    rough = places.copy()
    rough[(places == TokenPlace.BEGIN) | (places == TokenPlace.AFTER_STOP)] = TokenPlace.CONTEXT
    rough[places == TokenPlace.CHANGED] = TokenPlace.ANSWER
    return rough


def places_of_kinds(kinds: Codes) -> Codes:
    """Map kinds to places."""
    roles, parts = roles_of(kinds), parts_of(kinds)
    cases = [
        (roles == RoleCode.NONE) & (parts == Part.DOCUMENT),
        roles == RoleCode.NONE,
        roles != RoleCode.ASSISTANT,
        parts == Part.HEADER,
        parts == Part.SEPARATOR,
        parts == Part.TERMINATOR,
        kinds & REPEATED > 0,
    ]
    places = ("BEGIN", "UNKNOWN", "CONTEXT", "PROMPT", "AFTER_STOP", "STOP", "CHANGED")
    return np.select(cases, [TokenPlace[name].value for name in places], TokenPlace.ANSWER.value).astype(np.uint8)


# ---- finding


class _Events(NamedTuple):
    """Openings found in a set, in order."""

    starts: Ints
    ends: Ints
    borrowed: Ints
    roles: Ints
    merged: Bools


def find_layout(data: TrainerRows, literals: Literals) -> DocumentLayout:
    """Find what every token is; tokens before the first opening of a document are unknown, or its beginning."""
    ids, documents, padding = data.ids, data.documents, data.padding
    events = _find_events(data, literals)
    stops = np.flatnonzero(np.isin(ids, list(literals.stops)) & ~padding)
    places = np.zeros(len(ids), dtype=np.uint8)
    document = data.document_of(events.starts)
    first, last = np.diff(document, prepend=-1) != 0, np.diff(document, append=-1) != 0
    limits = np.where(last, documents[document + 1], np.roll(events.starts, -1))
    opened = np.searchsorted(events.starts + events.borrowed, np.arange(len(ids)), side="right") - 1
    inside = np.flatnonzero(opened >= 0)
    inside = inside[inside < limits[opened[inside]]]
    assistant = events.roles == RoleCode.ASSISTANT
    places[inside] = np.where(assistant[opened[inside]], TokenPlace.ANSWER, TokenPlace.CONTEXT)
    answers, spelled = _answers(events, assistant, document, limits, last, stops, ids, literals)
    places[ranges_of(answers.prompts, answers.starts)] = TokenPlace.PROMPT
    numbers = np.flatnonzero(assistant)
    with_stop = answers.stops >= 0
    after, ends = answers.stops[with_stop] + 1, limits[numbers][with_stop]
    special = np.append(np.flatnonzero(np.isin(ids, list(literals.specials - literals.stops))), len(ids))
    places[ranges_of(after, ends)] = TokenPlace.CONTEXT
    places[ranges_of(after, np.minimum(ends, special[np.searchsorted(special, after)]))] = TokenPlace.AFTER_STOP
    places[answers.stops[with_stop]] = TokenPlace.STOP
    if literals.ends_by_next:  # a stop that ends an answer whose beginning is cut looks like an opening
        cut = events.starts[first]
        places[cut[np.isin(ids[cut], list(literals.stops))]] = TokenPlace.UNKNOWN
    if literals.asked_only:
        answers = _drop_unasked(answers, places, events, assistant, first, limits)
    borrowed = np.flatnonzero(events.borrowed > 0)
    before = ranges_of(events.starts[borrowed], (events.starts + events.borrowed)[borrowed])
    places[before[places[before] == TokenPlace.UNKNOWN]] = TokenPlace.CONTEXT
    if literals.bos is not None:
        begins = data.bounds[0][data.filled]
        places[begins[ids[begins] == literals.bos]] = TokenPlace.BEGIN
    places[padding] = TokenPlace.UNKNOWN
    unexpected = np.union1d(spelled, _unexpected(data, events, literals))
    unexpected = np.union1d(unexpected, _closed_twice(events, limits, stops, literals))
    odd = np.isin(ids[unexpected], list(literals.odd))
    return DocumentLayout(
        places=places,
        answers=answers,
        unexpected=unexpected[~odd],
        openings=events.starts,
        opening_roles=events.roles,
        doubtful=int(odd.sum()),
    )


def _closed_twice(events: _Events, limits: Ints, stops: Ints, literals: Literals) -> Ints:
    """Stop tokens in messages of others beyond those that the template writes there; all but the last are text."""
    first, last = np.searchsorted(stops, events.ends), np.searchsorted(stops, limits)
    allowed = np.array([literals.closers.get(role, 0) for role in range(8)], dtype=np.int64)
    allowed[RoleCode.ASSISTANT] = np.iinfo(np.int64).max  # answers are looked at elsewhere
    surplus = np.maximum(last - first - allowed[events.roles], 0)
    surplus[allowed[events.roles] == 0] = 0  # stops of the next message's header, or of a document's end
    return stops[ranges_of(first, first + surplus)]


def _answers(
    events: _Events,
    assistant: Bools,
    document: Ints,
    limits: Ints,
    last: Bools,
    stops: Ints,
    ids: Ints,
    literals: Literals,
) -> tuple[AnswerSpans, Ints]:
    """Find all answers, and stops inside them that must be text."""
    starts, bound = events.ends[assistant], limits[assistant]
    # a stop may be the first id of the next opening (GLM), but not one that opens another document
    shared = ~last[assistant] & np.isin(ids[np.minimum(bound, len(ids) - 1)], list(literals.stops))
    at = np.searchsorted(stops, starts)
    stop = np.append(stops, len(ids))[at]
    has = (stop < bound) | (shared & (stop == bound))
    # a stop that the text of the same answer follows, up to another stop, was spelled by the text
    count = np.searchsorted(stops, bound) - at
    final = np.append(stops, len(ids))[at + np.maximum(count - 1, 0)]
    special = offsets_of(np.isin(ids, list(literals.specials)))
    plain = final - stop - (special[np.minimum(final, len(ids))] - special[np.minimum(stop, len(ids))])
    spelled = has & (count > 1) & (plain > MOST_AFTER_STOP)
    inner = stops[ranges_of(at[spelled], at[spelled] + count[spelled] - 1)]
    stop = np.where(spelled, final, stop)
    answers = AnswerSpans(
        documents=document[assistant],
        prompts=(events.starts + events.borrowed)[assistant],
        starts=starts,
        ends=np.where(has, stop, bound),
        stops=np.where(has, stop, -1),
        merged=events.merged[assistant],
        changed=np.zeros(len(starts), dtype=np.bool_),
        wanted=np.full(len(starts), Wanted.UNKNOWN, dtype=np.int8),
    )
    return answers, inner


def _drop_unasked(
    answers: AnswerSpans, places: Codes, events: _Events, assistant: Bools, first: Bools, limits: Ints
) -> AnswerSpans:
    """Leave out answers that follow no message, or another answer: nothing is known of them."""
    after = np.roll(assistant, 1) & ~first
    unasked = np.flatnonzero((first | after) & assistant)
    before = np.where(after[unasked], unasked - 1, unasked)  # the answer before may not have ended there
    places[ranges_of(events.starts[before], limits[unasked])] = TokenPlace.UNKNOWN
    return answers.keep(~np.isin(np.flatnonzero(assistant), [*unasked, *before]))


def ranges_of(starts: Ints, ends: Ints) -> Ints:
    """List all places from starts to ends."""
    return ranges(starts, np.maximum(ends - starts, 0))


def _find_events(data: TrainerRows, literals: Literals) -> _Events:
    """Find openings by their solid ids; the longest wins if several begin at the same place.

    An opening does not continue in the next document; one that the end of its document cuts is whole.
    """
    ids, ends_of = data.ids, data.bounds[1]
    used = np.zeros(len(ids) + 1, dtype=np.bool_)
    none = np.empty(0, dtype=np.int64)
    events = [_Events(none, none, none, none, none.astype(np.bool_))]
    by_solid: dict[tuple[int, ...], list[Opening]] = {}
    for opening in literals.openings:
        by_solid.setdefault(opening.ids[: opening.solid], []).append(opening)
    for solid, openings in by_solid.items():
        places = find_pattern(ids, solid)
        limit = ends_of[data.document_of(places)]
        fits = ~used[places] & (places + len(solid) <= limit)
        places, limit = places[fits], limit[fits]
        used[places] = True
        ends = places + len(solid)
        merged = np.ones(len(places), dtype=np.bool_)
        for opening in sorted(openings, key=lambda opening: len(opening.ids)):
            whole = _goes_on(ids, places, opening.ids, limit)
            ends[whole] = np.minimum(places + len(opening.ids), limit)[whole]
            merged[whole] = False
        borrowed, roles = (np.full_like(places, value) for value in (openings[0].borrowed, openings[0].role))
        events.append(_Events(places, ends, borrowed, roles, merged))
    columns = [np.concatenate(column) for column in zip(*events, strict=True)]
    order = np.argsort(columns[0])
    return _Events(*(column[order] for column in columns))


def find_pattern(ids: Ints, pattern: tuple[int, ...]) -> Ints:
    """Find where a sequence of ids begins."""
    places = np.flatnonzero(ids[: len(ids) - len(pattern) + 1] == pattern[0]) if len(ids) >= len(pattern) else ids[:0]
    return places[_goes_on(ids, places, pattern, np.full(len(places), len(ids)))]


def _goes_on(ids: Ints, places: Ints, pattern: tuple[int, ...], limit: Ints) -> Bools:
    """Mark the places where a sequence of ids follows, up to a limit for each."""
    fits = np.ones(len(places), dtype=np.bool_)
    for step, wanted in enumerate(pattern):
        at = places + step
        fits &= (ids[np.minimum(at, len(ids) - 1)] == wanted) | (at >= limit)
    return fits


def _unexpected(data: TrainerRows, events: _Events, literals: Literals) -> Ints:
    """Find special ids that the template never writes, and starts of openings that no opening continues."""
    ids, padding = data.ids, data.padding
    special = np.isin(ids, list(literals.specials)) & ~padding
    unexpected = special & ~np.isin(ids, list(literals.written))
    openers = {opening.ids[0] for opening in literals.openings} - literals.stops
    openers -= {i for opening in literals.openings for i in opening.ids[1:]}
    inside = np.zeros(len(ids), dtype=np.bool_)
    inside[events.starts] = True
    begun = np.flatnonzero(np.isin(ids, list(openers)) & ~inside & ~padding)
    size = max((opening.solid for opening in literals.openings), default=0)
    ends = data.documents[data.document_of(begun) + 1]
    unexpected[begun[begun + size <= ends]] = True  # at the end of a document an opening may be cut
    return np.flatnonzero(unexpected)
