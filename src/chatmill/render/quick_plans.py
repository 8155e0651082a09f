"""Plans of records in which nothing is new, in compiled code: turns, answers and stretches that are all known.

What is found slowly is what is kept here: how an answer is marked is known by what tells answers apart (`replay.h`),
and what becomes of a segment by its context (`writing.h`). A record that needs more is left to `SequenceWriter`.
"""

from __future__ import annotations

from typing import Any

from chatmill.core.kinds import RoleCode
from chatmill.core.native.replayer import FoundAnswers, Renderings
from chatmill.core.native.writer import MAX_MARK, NEVER, Asked, Described, Writer
from chatmill.render.jinja.answers import AnswerKey, Answers, renderings_of
from chatmill.render.jinja.found import Found
from chatmill.render.jinja.labels import Mark
from chatmill.render.jinja.options import Expand
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.renderer import Renderer
from chatmill.render.jinja.rules import probe
from chatmill.render.jinja.turn_run import ROOT
from chatmill.render.jinja.turn_sequences import Counts, Labels
from chatmill.render.model_template import ModelTemplate, WrittenRecord
from chatmill.render.record_plans import RecordPlan
from chatmill.render.stretches import Stretches

MAX_ANSWERS = 100_000
"""Answers that are told apart; beyond, they are looked for again."""
FEW = 64
"""Records with answers that are not written here, after which others are tried only if most are without."""
NEW = (-1,)


class QuickPlans:
    """What is known of one template under the options of the recipe."""

    def __init__(self, template: ModelTemplate, stretches: Stretches) -> None:
        """Nothing is known."""
        self._template, self._stretches = template, stretches
        given, rules = template.given, template.rules
        self._is_used = (
            *(given.expand in (Expand.NONE, Expand.TURNS), not given.last_turn_only),
            *(not rules.looks_back, not rules.depends_on_texts),
        )
        self._written = self._left = 0
        """Records that were written here, and those that never will be."""
        self._renderer: Renderer | None = None
        self._tries: Any = None

    def _begin(self, renderer: Renderer, labels: Labels) -> None:
        """Forget everything: segments have other numbers now."""
        self._renderer, self._tries, self._labels = renderer, renderer.tries, labels
        self._writer = Writer(self._describe, self._move)
        self._version = -1
        self._answers: dict[AnswerKey, tuple[int, ...] | None] = {}
        self._marks: list[tuple[Mark, ...]] = [()]
        self._mark_numbers: dict[tuple[Mark, ...], int] = {(): 0}

    def plan(self, view: RecordView) -> RecordPlan | None:
        """The plan of a record; None where something is new, or is not written here."""
        if self._renderer is None or not all(self._is_used) or self._left > FEW + self._written:
            return None
        if self._renderer.tries is not self._tries or view.options or view.is_of_harmony:
            return None
        plan = self._plan(view, self._renderer)
        self._written += plan is not None
        return plan

    def _plan(self, view: RecordView, renderer: Renderer) -> RecordPlan | None:
        classes = renderer.classes(view)
        if classes is None or classes.version != self._version or renderer.is_compared(view):
            return None
        view.check_arguments()
        roles, speaking = view.columns()
        probes = probe(view, speaking) if renderer.needs_next else None
        requests, rows = renderings_of(speaking, len(roles), probes)
        known = renderer.known(view, requests, rows, _new)
        if known is None or known[1].hidden_in_whole != -1:
            return None
        if not view.is_keyed:
            self._left += 1
            return None
        marks = self._all_marks(view, renderer, speaking, known)
        if marks is None:
            return None
        written = self._writer.write(roles, known[0].flat(len(requests) - 1), marks)
        if written is None or (view.has_tools and not written.shows_tools):
            return None
        return RecordPlan((len(written.entries),), written.entries, Counts(len(rows), 0, 0, 0))

    def _all_marks(
        self, view: RecordView, renderer: Renderer, speaking: list[int], known: tuple[Renderings, FoundAnswers]
    ) -> list[int] | None:
        """Return outputs of F and what is trained of them; None where an answer is not written here."""
        marks: list[int] = []
        answers: Answers | None = None
        for index, (first, same, hidden, key, more) in zip(speaking, known[1].rows, strict=True):
            if hidden != -1 or not key:
                return None
            of_answer = (key, more, max(same, 1) >= first)
            own = self._answers.get(of_answer, NEW)
            if own is NEW:
                answers = answers or Answers(renderer, view.again(), self._template.stops, known)
                answers.in_whole(index)
                self._keep(answers)
                own = self._answers.get(of_answer, NEW) if answers.view.is_keyed else NEW
            if own is None or own is NEW:
                self._left += own is None
                return None
            for number in range(0, len(own), 2):
                marks += (own[number] + first, own[number + 1])
        return marks

    def learn(self, written: WrittenRecord) -> None:
        """Keep the answers of a record that was written slowly."""
        answers = written.answers
        if not all(self._is_used) or written.tried or written.answers.view.options or answers.version < 0:
            return
        if self._renderer is not answers.renderer or self._tries is not answers.renderer.tries:
            self._begin(answers.renderer, written.labels)
        if answers.version != self._version or len(self._answers) > MAX_ANSWERS:
            self._answers, self._version = {}, answers.version
        self._keep(answers)

    def _keep(self, answers: Answers) -> None:
        if answers.version == self._version:
            for key, found, first in answers.settled(self._answers):
                self._answers[key] = None if found is None else self._marked(answers, found, first)

    def _marked(self, answers: Answers, found: Found, first: int) -> tuple[int, ...] | None:
        """Return an answer in F as outputs, counted from `first`, and marks; None where it is not written here."""
        outputs = answers.whole()
        own = outputs[found.first + found.begin.entry : found.first + found.end.entry + 1]
        if found.is_appended or not found.is_there or any(base == ROOT for _, base in own):
            return None
        bases = tuple(found.message - base for _, base in own)
        numbers: list[int] = []
        for entry, marks in self._labels.marks(found, bases, is_cut=False):
            number = self._mark_numbers.setdefault(marks, len(self._marks))
            if number == len(self._marks):
                self._marks.append(marks)
            if number > MAX_MARK:
                return None
            numbers += (found.first + entry - first, number)
        return tuple(numbers)

    def _describe(self, segment: int) -> Described:
        assert self._renderer is not None
        facts = self._renderer.segments.facts[segment]
        return Described(facts.owners, facts.shows_tools)

    def _move(self, asked: Asked) -> tuple[int, int]:
        """Return the stretch that an output becomes, and what it leaves to the next, as `SequenceWriter` finds it."""
        if asked.segment < 0:
            return self._stretches.end(asked.state), asked.state
        assert self._renderer is not None
        facts, marks = self._renderer.segments.facts[asked.segment], self._marks[asked.mark]
        is_root = asked.base == ROOT
        packed = asked.context & 0xFFFF
        codes = {owner: RoleCode((packed >> 4 * place) & 15) for place, owner in enumerate(facts.owners)}
        own = RoleCode(packed >> 12)
        at = asked.base
        if is_root and not facts.owners:
            codes, at = {0: own}, max(asked.seen, 0)
        elif not is_root:
            codes.setdefault(0, own)
        unmarked = {owner for owner in facts.owners if codes[owner] is RoleCode.ASSISTANT}
        if unmarked - {mark.message for mark in marks}:
            return NEVER, 0
        about: tuple[Any, ...] = (tuple(codes.items()), marks, (), frozenset(), False, ())
        label = self._labels.number(facts, (asked.segment, is_root, asked.seen == ROOT, *about))
        return self._stretches.step(self._labels, label, asked.state, at - asked.before)


def _new(_message: int, _outputs: Any) -> int:
    """Whether outputs show all of a message is not known yet: reply that to `Ask.SHOWN`."""
    return -1
