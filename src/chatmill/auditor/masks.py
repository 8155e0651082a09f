"""Checks of what is trained, by columns: no loop over tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from chatmill.auditor.findings import RawFinding
from chatmill.auditor.layout import AnswerSpans, DocumentLayout, TokenPlace, Wanted
from chatmill.auditor.thresholds import ENDING, FARTHEST_SHIFT, MOST_FULL, THINK_CLOSE
from chatmill.core.tokens import offsets_of, segment_sums
from chatmill.core.trainer_columns import TrainerRows

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
EARLIER, LAST, REASONING = "earlier answers", "last answers", "without their reasoning"
"""What is left untrained, perhaps on purpose."""


def check_masks(
    data: TrainerRows, layout: DocumentLayout, trained: Bools, think_ends: Sequence[int]
) -> Iterator[RawFinding]:
    """Find tokens that are trained and should not be, and the reverse; `think_ends` are tokens that end reasoning."""
    documents = data.documents
    live = ~data.padding
    sizes = segment_sums(live, documents)
    targets = segment_sums(trained & live, documents)
    asking = (layout.places == TokenPlace.CONTEXT) | (layout.places == TokenPlace.PROMPT)
    first = np.minimum(data.bounds[0], len(trained) - 1)  # never a target, whatever the mask says
    has_context = segment_sums(asking, documents) - asking[first] > 0
    full = (targets >= sizes - ~trained[first]) & (sizes > 1)
    if full.mean() <= MOST_FULL:  # where turns are not known, some documents may be ends of long answers
        full &= has_context
    else:
        full &= has_context | (segment_sums(layout.places != TokenPlace.UNKNOWN, documents) == 0)
    nothing = (targets == 0) & (sizes > 0)
    empty = nothing & ~_unwanted_documents(data, layout.answers)
    total = int((sizes > 0).sum())
    yield _documents("mask_full", data, full, total)
    yield _documents("mask_empty", data, empty, total)
    bad = trained & data.padding
    starts, ends = stretches(bad)
    yield RawFinding("padding_trained", starts, ends, int(data.padding.sum()), counted=int(bad.sum()))
    judged = ~(full | nothing)
    yield from _answers(data, layout, trained & live, judged, think_ends)


def _unwanted_documents(data: TrainerRows, answers: AnswerSpans) -> Bools:
    """Mark documents whose records want no answer trained."""
    count = len(data.documents) - 1
    unwanted = np.bincount(answers.documents[answers.wanted == Wanted.NO], minlength=count)
    result: Bools = (unwanted > 0) & (unwanted == np.bincount(answers.documents, minlength=count))
    return result


def _documents(code: str, data: TrainerRows, chosen: Bools, total: int) -> RawFinding:
    return RawFinding(code, data.documents[:-1][chosen], data.documents[1:][chosen], total)


def _answers(
    data: TrainerRows, layout: DocumentLayout, trained: Bools, judged: Bools, think_ends: Sequence[int]
) -> Iterator[RawFinding]:
    answers, places = layout.answers, layout.places
    answers = answers.keep(judged[answers.documents])
    count = len(answers)
    before = offsets_of(trained)
    inside = before[answers.ends] - before[answers.starts]
    length = answers.ends - answers.starts
    has_stop = answers.stops >= 0
    stop_trained = np.where(has_stop, trained[answers.stops], False)
    shifts = _shifts(trained, answers, data.documents)
    shifted = shifts != 0
    yield _of_answers("mask_shifted", answers, shifted, count, _most("by", shifts[shifted]))
    prompt = (before[answers.starts] - before[answers.prompts] > 0) & ~shifted
    yield RawFinding("prompt_trained", answers.prompts[prompt], answers.starts[prompt], count)
    used = (inside > 0) | stop_trained
    empty_answer = length == 0
    untrained = ~used & ~shifted & (has_stop | ~empty_answer)
    yield from _untrained(data, answers, untrained, used & ~shifted, count)
    unwanted = answers.wanted == Wanted.NO
    yield _of_answers("unwanted_trained", answers, used & unwanted, count)
    used &= ~unwanted
    changed = answers.changed & used
    yield _of_answers("changed_trained", answers, changed, count)
    # where no stop says where an answer ends, it ends with its last target
    targets = np.append(-1, np.flatnonzero(trained))
    until = targets[np.searchsorted(targets, answers.ends) - 1] + 1
    length = np.where(has_stop, length, np.maximum(until - answers.starts, 0))
    partly = used & (inside < length) & ~shifted & ~answers.changed
    policy = partly & _without_reasoning(answers, trained, data.ids, think_ends)
    yield _of_answers("some_untrained", answers, policy, count)._replace(what=REASONING)
    yield _of_answers("answer_partly_trained", answers, partly & ~policy, count)
    untrained_stops = answers.stops[used & has_stop & ~stop_trained & ~shifted]
    yield RawFinding("stop_untrained", untrained_stops, untrained_stops + 1, count)
    yield from _after_stop(data, layout, answers, trained, shifted)
    yield from _context(data, places, trained, judged, answers, shifted)


def _without_reasoning(answers: AnswerSpans, trained: Bools, ids: Ints, think_ends: Sequence[int]) -> Bools:
    """Mark answers that are trained after the end of their reasoning, completely, and not before it."""
    closing = np.append(np.flatnonzero(np.isin(ids, think_ends)), len(ids))
    place = closing[np.searchsorted(closing, answers.starts)]
    here = place < answers.ends
    before = offsets_of(trained)
    at = np.minimum(place, len(ids) - 1) + 1
    none_before = before[at] == before[answers.starts]
    first = np.append(np.flatnonzero(trained), len(ids))[np.searchsorted(np.flatnonzero(trained), at)]
    all_after = before[answers.ends] - before[np.minimum(first, len(ids))] == answers.ends - first
    result: Bools = here & none_before & all_after & (first - at <= THINK_CLOSE)
    return result


def _shifts(trained: Bools, answers: AnswerSpans, documents: Ints) -> Ints:
    """Measure how far the mask of each answer is shifted; 0 if it is not, or if the fault is another one."""
    starts, ends = stretches(trained)
    end_of = np.full(len(trained) + 1, -1, dtype=np.int64)
    end_of[starts] = ends
    exact = end_of[answers.starts] == answers.behind
    end_of[answers.starts[exact]] = -1  # what covers an answer exactly is not the shifted mask of another
    shifts = np.zeros(len(answers), dtype=np.int64)
    first, last = documents[answers.documents], documents[answers.documents + 1]
    distances = sorted(range(-FARTHEST_SHIFT, FARTHEST_SHIFT + 1), key=abs)
    for is_cut in (False, True):  # at the end of a document, a mask that is as late as others are is cut
        for by in (by for by in distances if not is_cut or (by > 0 and (shifts == by).any())):
            at, until = answers.starts + by, answers.behind + by
            fits = (at < last) & (until > last) if is_cut else (at >= first) & (until <= last)
            fits &= (shifts == 0) & (end_of[np.clip(at, 0, len(trained))] == np.minimum(until, last))
            shifts[fits] = by
    return shifts


def _most(word: str, values: Ints) -> str:
    counts = Counter(values.tolist()).most_common(3)
    return ", ".join(f"{count:,} {word} {value:+d}" for value, count in counts)


def _untrained(
    data: TrainerRows, answers: AnswerSpans, untrained: Bools, trained: Bools, count: int
) -> Iterator[RawFinding]:
    """Find answers that are trained nowhere in the set.

    Answers before a trained one may be context on purpose: where a conversation has a row for each turn, or only last
    answers are trained. They are a note. With a row for each turn, answers that end alike count as one. Whether another
    answer was left out on purpose only its record says.
    """
    document = answers.documents
    firsts = np.maximum(answers.starts, answers.ends - ENDING)
    endings = [data.ids[a:b].tobytes() for a, b in zip(firsts.tolist(), answers.ends.tolist(), strict=True)]
    elsewhere = {ending for ending, is_trained in zip(endings, trained.tolist(), strict=True) if is_trained}
    untrained = untrained & ~answers.changed & np.array([ending not in elsewhere for ending in endings], dtype=np.bool_)
    untrained &= answers.wanted != Wanted.NO
    final = np.full(len(data.documents), -1, dtype=np.int64)
    np.maximum.at(final, document[trained], np.flatnonzero(trained))
    earlier = untrained & (np.arange(count) < final[document])
    yield _of_answers("some_untrained", answers, earlier, count)._replace(what=EARLIER)
    final_ones = untrained & ~earlier
    wanted = answers.wanted == Wanted.YES
    yield _of_answers("answer_untrained", answers, final_ones & wanted, count)
    yield _of_answers("some_untrained", answers, final_ones & ~wanted, count)._replace(what=LAST)


def _after_stop(
    data: TrainerRows, layout: DocumentLayout, answers: AnswerSpans, trained: Bools, shifted: Bools
) -> Iterator[RawFinding]:
    """Find targets after the stop: another stop, or other text."""
    stops = answers.stops[(answers.stops >= 0) & ~shifted]
    next_to = stops + 1
    room = next_to < len(data.ids)
    next_to = next_to[room]
    after = (layout.places[next_to] == TokenPlace.AFTER_STOP) & trained[next_to] & ~data.padding[next_to]
    again = after & np.isin(data.ids[next_to], data.ids[stops] if len(stops) else stops)
    yield RawFinding("stop_twice", next_to[again], next_to[again] + 1, len(answers))
    rest = after & ~again
    starts, ends = stretches(trained & (layout.places == TokenPlace.AFTER_STOP))
    at = np.searchsorted(starts, next_to[rest])
    yield RawFinding("after_stop_trained", next_to[rest], ends[at] if rest.any() else next_to[rest], len(answers))


def _context(
    data: TrainerRows, places: NDArray[np.uint8], trained: Bools, judged: Bools, answers: AnswerSpans, shifted: Bools
) -> Iterator[RawFinding]:
    trained = trained & np.repeat(judged, np.diff(data.documents))
    bad = trained & (places == TokenPlace.CONTEXT)
    late = answers.keep(shifted)
    for by in range(1, FARTHEST_SHIFT + 1):  # what a shifted mask covers is part of that finding
        for edge in (late.behind - 1 + by, late.prompts - by):
            inside = edge[(edge >= 0) & (edge < len(bad))]
            bad[inside] = False
    starts, ends = stretches(bad)
    total = int((places == TokenPlace.CONTEXT).sum())
    yield RawFinding("context_trained", starts, ends, total, counted=int(bad.sum()))
    begin = trained & (places == TokenPlace.BEGIN)
    starts, ends = stretches(begin)
    yield RawFinding("bos_wrong", starts, ends, len(data.documents) - 1, what="trained")


def _of_answers(code: str, answers: AnswerSpans, chosen: Bools, count: int, detail: str = "") -> RawFinding:
    return RawFinding(code, answers.starts[chosen], answers.behind[chosen], count, detail)


def stretches(mask: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the start and end of each stretch of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return edges[::2], edges[1::2]
