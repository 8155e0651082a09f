"""Plans of records in which nothing is new, in compiled code: turns, answers and stretches that are all known.

What is found slowly is what is kept here: how an answer is marked is known by what tells answers apart (`replay.h`),
and what becomes of a segment by its context (`writing.h`). A record that needs more is left to `DocumentWriter`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import RoleCode
from chatmill.core.native.replayer import FoundAnswers
from chatmill.core.native.writer import (
    ENDING,
    MAX_MARK,
    NEVER,
    NO_STOP,
    NOT_THERE,
    Asked,
    Described,
    Marked,
    Marks,
    Writer,
)
from chatmill.render.jinja.answers import Answers
from chatmill.render.jinja.labels import Mark
from chatmill.render.jinja.looks import Looks
from chatmill.render.jinja.options import Expand, TemplateOptions, Unproved
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.renderer import TemplateRunner
from chatmill.render.jinja.rules import Answer, probe, renderings_of
from chatmill.render.jinja.segments import Cursor
from chatmill.render.jinja.stops import StopTokens
from chatmill.render.jinja.tries import Output
from chatmill.render.jinja.turn import ROOT
from chatmill.render.jinja.turn_documents import Counts, Labels, end_at_begin, ends_in, marks_of, with_stop
from chatmill.render.stretch_table import Numbered
from chatmill.render.stretches import Stretches

NO_KEY = -1
"""In place of the number of a key."""
FEW = 64
"""Records that are not written here, after which others are tried only if most are written."""


class RecordPlan(NamedTuple):
    """Everything about the records that give the same replies to what the template asks."""

    sizes: tuple[int, ...]
    """How many stretches their documents have."""
    entries: NDArray[np.int64]
    """These stretches, with the messages that they count from."""
    counts: Counts


class _Voice(NamedTuple):
    """What an answer without marks is to a label."""

    header: str
    opening: str
    is_ended: bool
    """Whether the next segment begins with an end."""
    is_changed: bool
    """Whether it is trained, although later messages have changed it."""


class QuickPlans:
    """What is known of one template under the options of the recipe."""

    def __init__(
        self,
        renderer: TemplateRunner,
        labels: Labels,
        stretches: Stretches,
        stops: StopTokens,
        given: TemplateOptions,
        *,
        has_choice: bool,
    ) -> None:
        """Nothing is known; `renderer` is that of the options of the recipe.

        `has_choice`: other options are tried for a record with an answer that these cannot prove.
        """
        self._leaves_untrained = given.unproved is Unproved.UNTRAINED and not has_choice
        self._renderer, self._labels, self._stretches = renderer, labels, stretches
        self._stops, self._given = stops, given
        self._written = self._left = 0
        """Records that were written here, and those that were not although the template's turns are known."""
        self._writer = Writer(self._describe, self._move)
        self._marks: Numbered[tuple[Mark, ...] | _Voice] = Numbered(())

    @property
    def size(self) -> int:
        """How much is known."""
        return self._writer.size + len(self._marks)

    def plan(self, view: RecordView) -> RecordPlan | None:
        """Return the plan of a record; None where something is new, or is not written here."""
        renderer, given = self._renderer, self._given
        if self._left > FEW + self._written or view.options or view.is_of_harmony:
            return None
        view.check_arguments()
        roles, speaking = view.role_codes, view.trained
        probes = probe(view, speaking) if renderer.needs_next else None
        requests, rows = renderings_of(speaking, len(roles), probes, with_apart=renderer.needs_apart)
        replayed = renderer.known(view, requests, rows, Looks(renderer, view))
        if replayed is None and renderer.learn(view, requests):
            replayed = renderer.known(view, requests, rows, Looks(renderer, view))
        if replayed is None or replayed[1].hidden_in_whole != -1:
            return None
        asked_of = _Told(self, lambda: Answers(renderer, view.again(), self._stops, replayed), speaking, replayed[1])
        ways = {"has_whole": given.whole_document, "in_one": given.expand is Expand.NONE}
        written = self._writer.write(renderer.tries.replayer, replayed, roles, (asked_of.answer, asked_of.held), **ways)
        if (
            written is None
            or (view.has_tools and not written.shows_tools)
            or (written.untrained and not self._leaves_untrained)
        ):
            self._left += 1
            return None
        self._written += 1
        counts = Counts(len(rows) - written.untrained, written.changed, written.untrained, written.stops)
        return RecordPlan(written.sizes, written.entries, counts)

    def marked(self, answer: Answer[Cursor], first: int, outputs: list[Output], *, is_cut: bool) -> Marks | int:
        """Return the outputs of an answer, counted from `first`, and numbers of marks; NEVER: not written here."""
        outputs_of = outputs[answer.first + answer.begin.entry : answer.first + answer.end.entry + 1]
        if answer.reason or any(base == ROOT for _, base in outputs_of):
            return NEVER
        numbers: list[int] = []
        for at, marks in marks_of(answer, outputs, is_cut=is_cut).items():
            numbers += (at - first, self._marks.number(marks))
        return NEVER if len(self._marks) > MAX_MARK else tuple(numbers)

    def voice(self, header: str, opening: str) -> int:
        """Return the number of what an answer is where it has no marks; the next: before an end, changed, and both."""
        ways = ((False, False), (True, False), (False, True), (True, True))
        numbers = [self._marks.number(_Voice(header, opening, *way)) for way in ways]
        return 0 if len(self._marks) > MAX_MARK else numbers[0]

    def _describe(self, segment: int) -> Described:
        facts = self._renderer.segments.facts[segment]
        ends = end_at_begin(facts, self._stops) > 0, ends_in(facts, self._stops)
        return Described(facts.owners, facts.shows_tools, *ends)

    def _move(self, asked: Asked) -> tuple[int, int]:
        """Return the stretch that an output becomes, and what it leaves to the next, as `DocumentWriter` finds it."""
        if asked.segment < 0:
            return self._stretches.end(asked.state), asked.state
        facts, marked = self._renderer.segments.facts[asked.segment], self._marks[asked.mark]
        is_root = asked.base == ROOT
        packed = asked.context & 0xFFFF
        codes = {owner: RoleCode((packed >> 4 * place) & 15) for place, owner in enumerate(facts.owners)}
        role = RoleCode(packed >> 12)
        at = asked.base
        if is_root and not facts.owners:
            codes, at = {0: role}, max(asked.seen, 0)
        elif not is_root:
            codes.setdefault(0, role)
        marks: tuple[Mark, ...] = () if isinstance(marked, _Voice) else marked
        if asked.context & ENDING:
            marks = (Mark(-1, None, (0, 0), (0, end_at_begin(facts, self._stops))), *marks)
        unmarked = {owner for owner in facts.owners if codes[owner] is RoleCode.ASSISTANT}
        unmarked -= {mark.message for mark in marks}
        about: tuple[object, ...] = (), frozenset(), False
        if isinstance(marked, _Voice) and len(unmarked) == 1:
            header = (*unmarked, marked.header, marked.opening)
            about = (header,), frozenset(unmarked if marked.is_changed else ()), marked.is_ended
        elif unmarked or isinstance(marked, _Voice):
            return NEVER, 0
        label = self._labels.number(
            facts, (asked.segment, is_root, asked.seen == ROOT, tuple(codes.items()), marks, *about, ())
        )
        return self._stretches.step(self._labels, label, asked.state, at - asked.before)


class _Told:
    """What the slow way says of the answers of one record."""

    def __init__(
        self, plans: QuickPlans, answers: Callable[[], Answers], speaking: list[int], answers_found: FoundAnswers
    ) -> None:
        """`speaking` are the messages of the answers."""
        self._plans, self._make, self._speaking, self._found = plans, answers, speaking, answers_found

    @cached_property
    def _answers(self) -> Answers:
        return self._make()

    def answer(self, number: int) -> Marked | int | None:
        """Say what is known of an answer by its key; `AskedAnswer` of the writer."""
        index, first, answers = self._speaking[number], self._found.row(number).first, self._answers
        decided = answers.decided(index)
        if decided is None:
            return None
        answer, stands = decided
        if answer.reason:
            return NEVER
        outputs, stop = answers.trained(index), NO_STOP
        if answer.is_appended:
            answer, outputs = with_stop(answer, outputs, answers.renderer.segments)
            stop = outputs[-1][0]
        marks, cut = (self._plans.marked(answer, first, outputs, is_cut=is_cut) for is_cut in (False, True))
        if isinstance(marks, int) or isinstance(cut, int):
            return NEVER
        voice = self._plans.voice(*stands) if stands else 0
        return Marked(answer.first + answer.end.entry - first, marks, cut, voice, stop)

    def held(self, number: int, longer: int, key: tuple[int, int]) -> Marks | int | None:
        """Say where a longer rendering has an answer; `AskedHeld` of the writer."""
        index, first, answers = self._speaking[number], self._found.row(number).first, self._answers
        outputs = answers.whole() if longer < 0 else answers.trained(self._speaking[longer])
        answer = answers.decided_in_longer(index, outputs, is_near=key[0] != NO_KEY)
        if answer is None:
            return None
        if not answer.is_there:
            return NOT_THERE
        if answer.is_appended and outputs is answers.trained(index):
            answer, outputs = with_stop(answer, outputs, answers.renderer.segments)
        return self._plans.marked(answer, first, outputs, is_cut=False)
