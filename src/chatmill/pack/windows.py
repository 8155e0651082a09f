"""Which token spans of one over-long conversation are kept: whole-turn windows, the newest turns, or whole answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from chatmill.core.kinds import RoleCode
from chatmill.pack.turns import Exchange, Outline, Span, Step

Trains = Callable[[int, int], bool]
"""Whether a span of tokens holds one that is trained."""


@dataclass(frozen=True, slots=True)
class KeptSpan:
    """A span of the conversation that is in an episode."""

    start: int
    end: int
    injected: bool = False
    """A repetition of tokens that belong to another episode; never trained."""


@dataclass(slots=True)
class _Window:
    """A window while it is filled, without head and tail."""

    pieces: list[KeptSpan] = field(default_factory=list)
    used: int = 0
    head: bool = True
    tail: bool = True

    def add(self, start: int, end: int, injected: bool = False) -> None:
        if start < end:
            self.used += end - start
            self.pieces.append(KeptSpan(start, end, injected))


def windows(outline: Outline, capacity: int, trains: Trains) -> list[list[KeptSpan]]:
    """Episodes of at most `capacity` tokens that together train every assistant message once.

    Consecutive whole turns go into one window while they fit between head and tail. A turn that does not fit
    into a window of its own is split between its steps, and each further window opens with the turn's lead,
    injected. A step that does not fit after head and lead is squeezed (see `_squeezed`). Windows in which
    `trains(start, end)` is true for no span are left out; the first window left holds the head, the last the
    tail, the others inject them.
    """
    space = capacity - outline.head - (outline.length - outline.tail)
    opened: list[_Window] = []
    room = 0  # of the newest window
    for turn in outline.turns(capacity):
        start, asked = turn.lead
        is_split = turn.end - start > space
        spans = [(step.start, step.end) for step in turn.steps] if is_split else [(start, turn.end)]
        lead = turn.lead if is_split else (start, start)
        for number, span in enumerate(spans):
            size = span[1] - span[0]
            if size > room or (is_split and number == 0):
                if is_split and asked - start + size > space:
                    opened.append(_squeezed(turn, turn.steps[number], number > 0, outline, capacity))
                    room = 0
                    continue
                opened.append(_Window())
                opened[-1].add(*lead, injected=number > 0)
                room = space - opened[-1].used
            opened[-1].add(*span)
            room -= size
    useful = [w for w in opened if any(trains(p.start, p.end) for p in w.pieces if not p.injected)]
    return _closed(useful, outline)


def _squeezed(turn: Exchange, step: Step, injected: bool, outline: Outline, capacity: int) -> _Window:
    """Return a window for one step that does not fit whole: what matters most is kept first.

    In this order, each as far as there is room: the assistant's tokens (the last ones, so that the terminator
    stays), the tail and the head (whole or not at all), the lead (the last tokens of its last message after
    that message's header), the tool results (their first tokens).
    """
    window = _Window()
    left = capacity - min(step.answer - step.start, capacity)
    answer = max(step.start, step.answer - capacity)
    tail = outline.length - outline.tail
    window.tail = tail <= left
    left -= tail if window.tail else 0
    window.head = outline.head <= left
    left -= outline.head if window.head else 0
    for span in _last_of_lead(turn, left):
        window.add(*span, injected=injected)
    left -= window.used
    window.add(answer, step.answer)
    window.add(step.answer, min(step.end, step.answer + left))
    return window


def _last_of_lead(turn: Exchange, room: int) -> list[Span]:
    """Return the lead, or the header of its last message and that message's last tokens, or nothing."""
    start, end = turn.lead
    if end - start <= room:
        return [turn.lead]
    last = turn.asked[-1]
    left = room - (last.content - last.start)
    if left <= 0:
        return []
    if end - last.content <= left:
        return [(last.start, end)]
    return [(last.start, last.content), (end - left, end)]


def _closed(opened: list[_Window], outline: Outline) -> list[list[KeptSpan]]:
    """Put the pieces of each window between head and tail, original in one and injected in the others."""
    heads = [i for i, window in enumerate(opened) if window.head]
    tails = [i for i, window in enumerate(opened) if window.tail]
    episodes = []
    for number, window in enumerate(opened):
        whole = _Window()
        if window.head:
            whole.add(0, outline.head, injected=number != heads[0])
        for piece in window.pieces:
            whole.add(piece.start, piece.end, piece.injected)
        if window.tail:
            whole.add(outline.tail, outline.length, injected=number != tails[-1])
        episodes.append(whole.pieces)
    return episodes


def newest_turns(outline: Outline, capacity: int) -> list[KeptSpan]:
    """Return one episode of at most `capacity` tokens: head and newest turns, as the token-native format rules.

    1. While the rest is too long, the oldest pair (a user message and the step right after it) is dropped,
       whole; anything unpaired is dropped alone. The final step of an assistant stays, with the user message
       right before it and with all that follows.
    2. Still too long: what follows the final assistant message is removed, and the last `capacity` tokens are
       kept. Without an assistant message the last message plays its part.
    """
    tail = (outline.tail, outline.length)
    items = outline.steps(outline.length)
    if not items:
        return _last([(0, outline.head), tail], capacity)
    replies = [i for i, item in enumerate(items) if item.role is RoleCode.ASSISTANT]
    final = replies[-1] if replies else len(items) - 1
    pairs = {i for i in replies if i and items[i - 1].role is RoleCode.USER}
    protected = final - 1 if final in pairs else final
    kept = 0
    while kept < protected and outline.head + outline.length - items[kept].start > capacity:
        kept += 2 if kept + 1 in pairs else 1
    start = items[kept].start
    if outline.head + outline.length - start <= capacity:
        return _last([(0, outline.head), (start, outline.length)], capacity)
    end = items[final].answer if replies else items[final].end
    return _last([(0, outline.head), (start, end), tail], capacity)


def first_turns(outline: Outline, capacity: int, trains: Trains) -> list[KeptSpan]:
    """Return one episode of at most `capacity` tokens: all up to the end of a trained answer, or nothing."""
    steps = [step for step in outline.steps(outline.length) if step.is_reply]
    ends = [step.answer for step in steps if step.answer <= capacity and trains(step.start, step.answer)]
    return [KeptSpan(0, ends[-1])] if ends else []


def last_turns(outline: Outline, capacity: int, trains: Trains) -> list[KeptSpan]:
    """Return one episode of at most `capacity` tokens: head, task, and all from some answer on to the end, or nothing.

    The task is what comes before the first answer. An answer comes with what its own turn begins with.
    """
    turns = outline.turns(outline.length)
    task = turns[0].lead[1] if turns else outline.head
    before = [KeptSpan(0, task)] if task else []
    for number, turn in enumerate(turns):
        lead = [KeptSpan(*turn.lead)] if number and turn.lead[0] < turn.lead[1] else []
        for step in turn.steps:
            kept = [*before, *lead, KeptSpan(step.start, outline.length)]
            fits = sum(span.end - span.start for span in kept) <= capacity
            if fits and step.answer > step.start and trains(step.start, outline.length):
                return kept
    return []


def _last(spans: list[Span], room: int) -> list[KeptSpan]:
    """Return the last `room` tokens of the spans."""
    pieces: list[KeptSpan] = []
    for start, end in reversed(spans):
        start = max(start, end - room)
        room -= end - start
        if start < end:
            pieces.append(KeptSpan(start, end))
    return pieces[::-1]
