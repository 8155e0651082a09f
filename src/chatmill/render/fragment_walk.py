"""Walks over the fragments of a document: what each becomes after those before it.

What a fragment becomes is its *step*: a label (the kinds and messages of its characters) and token slots. It depends on
what is trained of the fragment, whose texts it has, and what the fragment before it leaves. All of this is the context
of a step, and a step is made once for each context.

Documents of one conversation begin alike. What they begin with is walked once, as long as nothing of it is trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import RoleCode
from chatmill.render.fragment_slots import NO_SLOTS, FragmentSlots
from chatmill.render.jinja.answers import PLAIN, Answers
from chatmill.render.jinja.label_table import LabelTable
from chatmill.render.jinja.labels import Mark, Said
from chatmill.render.jinja.paths import Path
from chatmill.render.jinja.rules import Answer
from chatmill.render.jinja.segments import Cursor, Segments
from chatmill.render.jinja.stops import StopTokens
from chatmill.render.jinja.tries import Output, SegmentFacts
from chatmill.render.jinja.turn import ROOT
from chatmill.render.stretch_table import Numbered

NO_LABEL = -1
"""In place of a label: the step ends a document."""
_ASSISTANT = int(RoleCode.ASSISTANT)
_ROLE = 15
_IS_CHANGED = 16
_NUMBER = 5
"""A voice is a message's role, whether it is changed, and above these bits a number of `StepTable.voices`."""
_NOBODY: frozenset[int] = frozenset()


class Voice(NamedTuple):
    """What labels depend on of an assistant's message, and of its answer where this is not trained."""

    said: Said
    header: str | None = None
    """What comes before the answer in its own fragment; None where the template opens it nowhere."""
    opening: str = ""
    """Its generation prompt."""
    is_unmarked: bool = False
    """Whether nothing of the answer is trained in this fragment."""


class WalkState(NamedTuple):
    """Where a walk is: what the fragments so far leave to the next one."""

    carry: int = 0
    """What the tokenizer still has to join."""
    before: int = 0
    """The message that the last fragment counts from."""
    seen: int = ROOT
    """The last message that had a text, or whose iteration it was."""


class StepTable:
    """The steps of one template: what its fragments became in all contexts so far."""

    def __init__(
        self, segments: Segments, labels: LabelTable, slots: FragmentSlots, stops: StopTokens, *, by_texts: bool
    ) -> None:
        """`by_texts`: slots depend on the texts of a record, and steps have none."""
        self.segments = segments
        self.labels = labels
        self.slots = slots
        self._stops = stops
        self._by_texts = by_texts
        self.known: dict[tuple[Any, ...], tuple[int, int]] = {}
        """A step and the carry after it, by their context."""
        self.labels_of_steps: list[int] = []
        self._slots_of_steps: list[int] = []
        self._slots_array: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._marks: Numbered[tuple[Mark, ...]] = Numbered(())
        self._marked: list[frozenset[int]] = [_NOBODY]
        """The messages of each of these."""
        self._marks_of: dict[Any, tuple[tuple[int, int], ...]] = {}
        self.voices: Numbered[Voice] = Numbered(Voice(PLAIN))
        self._ends: dict[int, tuple[int, bool]] = {}

    @property
    def size(self) -> int:
        """How much is known."""
        return len(self.known) + len(self._marks_of) + len(self.labels.spans)

    @property
    def slots_of_steps(self) -> NDArray[np.int64]:
        """The slots of all steps."""
        if len(self._slots_array) < len(self._slots_of_steps):
            self._slots_array = np.array(self._slots_of_steps, dtype=np.int64)
        return self._slots_array

    def _add_step(self, label: int, slots: int) -> int:
        self.labels_of_steps.append(label)
        self._slots_of_steps.append(slots)
        return len(self._slots_of_steps) - 1

    def learn(
        self, context: tuple[Any, ...], facts: SegmentFacts, label_key: tuple[Any, ...], by: int
    ) -> tuple[int, int]:
        """Make the step of a new context.

        Args:
            context: The context; its second entry is the carry.
            facts: What is known of the fragment.
            label_key: What its label depends on.
            by: How many messages the fragment counts from behind the one before it.
        """
        label = self.labels.intern(facts, label_key)
        slots, carry = NO_SLOTS, 0
        if not self._by_texts:
            slots, carry = self.slots.next_slots(self.labels, label, context[1], by)
        made = self.known[context] = self._add_step(label, slots), carry
        return made

    def last_step(self, carry: int) -> int:
        """Return the step that ends a document; negative for none."""
        if self._by_texts:
            return NO_SLOTS
        context = ("end", carry)
        if context not in self.known:
            slots = self.slots.last_slots(carry)
            step = NO_SLOTS if slots < 0 else self._add_step(NO_LABEL, slots)
            self.known[context] = step, carry
        return self.known[context][0]

    def ends(self, segment: int) -> tuple[int, bool]:
        """Return the size of what ends an answer at the beginning of a fragment, and whether its end ends one."""
        found = self._ends.get(segment)
        if found is None:
            facts = self.segments.facts[segment]
            first, last = facts.parts[0], facts.parts[-1]
            match = None if first[1] is not None else self._stops.any_end().match(first[0] or "")
            ends_there = last[1] is None and self._stops.any_end().search(last[0] or "") is not None
            found = self._ends[segment] = (match.end() if match else 0), ends_there
        return found

    # ---- what is trained of a fragment

    def mark(self, marks: tuple[Mark, ...]) -> int:
        """Return the number of what is trained of a fragment."""
        number = self._marks.number(marks)
        if number == len(self._marked):
            self._marked.append(frozenset(mark.message for mark in marks))
        return number

    def join_marks(self, one: int, other: int) -> int:
        """Return the number of two together."""
        return self.mark((*self._marks[one], *self._marks[other]))

    def marks_at(self, number: int) -> tuple[Mark, ...]:
        """Return what is trained, by its number."""
        return self._marks[number]

    def marked(self, number: int) -> frozenset[int]:
        """Return the messages of what is trained, counted from the fragment's own."""
        return self._marked[number]

    def marks(self, answer: Answer[Cursor], bases: Sequence[int], *, is_cut: bool) -> list[tuple[int, int]]:
        """Return the fragments that an answer is in, and what is trained of each.

        Args:
            answer: The answer.
            bases: The messages that the fragments count from, from the one that it begins in.
            is_cut: Whether the document ends with the answer.
        """
        begin = answer.begin.entry
        distances = tuple([answer.message - base for base in bases[: answer.end.entry - begin + 1]])
        key = (answer.generations, distances, is_cut)
        found = self._marks_of.get(key)
        if found is None:
            made = _make_marks(answer, distances, is_cut=is_cut)
            found = self._marks_of[key] = tuple((entry, self.mark(marks)) for entry, marks in made.items())
        return [(answer.first + entry, number) for entry, number in found]


def _make_marks(answer: Answer[Cursor], distances: Sequence[int], *, is_cut: bool) -> dict[int, tuple[Mark, ...]]:
    """Make the marks of an answer, by fragments as its cursors count them."""
    marks: dict[int, tuple[Mark, ...]] = {}
    begin_entry = answer.begin.entry
    for generation in answer.generations:
        cuts = is_cut and generation is answer.generations[-1]
        for entry in range(generation.begin.entry, generation.end.entry + 1):
            begin, stop, end = (cursor[1:] if cursor.entry == entry else None for cursor in generation)
            if entry > generation.stop.entry:
                stop = (0, 0)
            mark = Mark(distances[entry - begin_entry], begin, stop, end, is_cut=cuts)
            marks[entry] = (*marks.get(entry, ()), mark)
    return marks


class FragmentWalk:
    """Walks over the renderings of one conversation."""

    def __init__(self, answers: Answers, table: StepTable) -> None:
        """Begin at the beginning of the whole conversation."""
        self._answers = answers
        self._table = table
        self._paths = answers.paths
        self._facts = answers.renderer.segments.facts
        self._roles = answers.view.roles
        self._voices = self._find_voices()
        """The voice of each message, and at the end that of an answer that is still to come."""
        self._unmarked: dict[int, int] = {}
        """Those of answers that are not trained in a fragment."""
        self._trail: list[WalkState] = [WalkState()]
        """Where a walk over F is before each fragment, as long as nothing is trained."""
        self._trail_steps: list[int] = []

    def _find_voices(self) -> list[int]:
        view = self._answers.view
        voices: list[int] = view.role_codes.tolist()
        if not view.is_plain:
            for message, role in enumerate(voices):
                if role == _ASSISTANT:
                    number = self._table.voices.number(Voice(self._answers.said(message)))
                    voices[message] = role | number << _NUMBER
        return [*voices, _ASSISTANT]

    def _unmarked_voice(self, message: int) -> int:
        """Return the voice of an answer that is not trained in a fragment."""
        voice = self._unmarked.get(message)
        if voice is None:
            answers = self._answers
            known = Voice(answers.said(message), answers.header(message), answers.opening(message), is_unmarked=True)
            voice = self._unmarked[message] = _ASSISTANT | self._table.voices.number(known) << _NUMBER
        return voice

    def steps(
        self,
        path: Path,
        marks: Mapping[int, int],
        stop: int,
        changed: frozenset[int] = _NOBODY,
    ) -> list[int]:
        """Return the steps of a document, each before the message that it counts from.

        Args:
            path: The rendering.
            marks: What is trained of its fragments.
            stop: Where the document ends.
            changed: Messages that are trained where they are, although later messages have changed them.
        """
        begin = 0 if changed else self._begin(path, marks, stop)
        self._extend_trail(begin)
        steps = self._trail_steps[: 2 * begin]
        where = self._trail[begin]
        reach = _Reach(self._paths.part(path, begin, stop), begin, marks, _Changed(changed) if changed else None)
        return self._ended(self._go(reach, where, steps, None), steps)

    def _begin(self, path: Path, marks: Mapping[int, int], stop: int) -> int:
        """Return where a document stops being what F is without anything trained.

        The label of a fragment may depend on the one after it, which must be the same, too.
        """
        return max(0, min([path.shared - 1, stop - 2, *marks]))

    def prompt_steps(self, path: Path) -> list[int]:
        """Return the steps of a rendering that ends with the generation prompt of a message that is still to come."""
        outputs = self._paths.listed(path)
        steps: list[int] = []
        reach = _Reach(outputs, 0, {}, None)
        if not outputs or outputs[-1][1] != ROOT or self._facts[outputs[-1][0]].owners:
            return self._ended(self._go(reach, WalkState(), steps, None), steps)
        where = self._go(reach, WalkState(), steps, None, len(outputs) - 1)
        if where.seen < 0:
            return self._ended(self._go(_Reach(outputs[-1:], 0, {}, None), where, steps, None), steps)

        # the last fragment is the next message's own
        at, segment = len(self._roles), outputs[-1][0]
        context = (segment, where.carry, at - where.before, 0, False, self._voices[at], (False,), False)
        made = self._table.known.get(context)
        if made is None:
            key = (segment, False, False, ((0, RoleCode.ASSISTANT),), (), (), _NOBODY, False, ())
            made = self._table.learn(context, self._facts[segment], key, at - where.before)
        steps += (made[0], at)
        return self._ended(WalkState(made[1], at, where.seen), steps)

    def _ended(self, where: WalkState, steps: list[int]) -> list[int]:
        last = self._table.last_step(where.carry)
        if last >= 0:
            steps += (last, where.before)
        return steps

    def _extend_trail(self, stop: int) -> None:
        """Walk over F up to a fragment."""
        done = len(self._trail) - 1
        if done < stop:
            # the last one is looked at alone
            reach = _Reach(self._paths.whole[done : stop + 1], done, {}, None)
            self._go(reach, self._trail[done], self._trail_steps, self._trail, stop - done)

    def _go(
        self,
        reach: _Reach,
        where: WalkState,
        steps: list[int],
        trail: list[WalkState] | None,
        count: int | None = None,
    ) -> WalkState:
        """Walk over fragments, and return where the walk is then.

        Args:
            reach: The fragments, and what is trained of them.
            where: Where the walk begins.
            steps: Gets each step, and the message that it counts from.
            trail: Gets where the walk is after each fragment.
            count: How many fragments are walked over; those after them are looked at. By default all.
        """
        outputs, first, marks, changed = reach
        facts, voices, table = self._facts, self._voices, self._table
        known = table.known
        voice: Any
        carry, before, seen = where
        last = len(outputs) - 1
        for number in range(len(outputs) if count is None else count):
            segment, base = outputs[number]
            owners = facts[segment].owners
            mark = marks.get(first + number, 0)
            if changed is not None and changed.ending:
                mark = table.join_marks(changed.ending, mark)
                changed.ending = 0
            if base < 0 or len(owners) > 1:
                at, own_voice, voice, is_unmarked = self._of_several(segment, base, mark, seen, changed)
            else:
                at = base
                own_voice = voices[base]
                voice = 0
                is_unmarked = False
                if owners:
                    message = base + owners[0]
                    voice = voices[message]
                    if voice & _ROLE == _ASSISTANT and not (mark and owners[0] in table.marked(mark)):
                        is_unmarked = True
                        voice = self._unmarked_voice(message)
                        if changed is not None and changed.is_trained(message):
                            voice |= _IS_CHANGED
            ends_next = is_unmarked and number < last and table.ends(outputs[number + 1][0])[0] > 0
            if changed is not None and ends_next:
                self._end_changed(changed, outputs[number], outputs[number + 1], mark)
            context = (segment, carry, at - before, mark, seen < 0, own_voice, voice, ends_next)
            made = known.get(context)
            if made is None:
                key = self._label_key(segment, base, at, mark, seen, ends_next=ends_next, changed=changed)
                made = table.learn(context, facts[segment], key, at - before)
            step, carry = made
            steps += (step, at)
            before = at
            if owners:
                seen = base + owners[-1]
                if changed is not None:
                    changed.speak(base, owners)
            elif base >= 0:
                seen = base
            if trail is not None:
                trail.append(WalkState(carry, before, seen))
        return WalkState(carry, before, seen)

    def _of_several(
        self, segment: int, base: int, mark: int, seen: int, changed: _Changed | None
    ) -> tuple[int, int, tuple[Any, ...], bool]:
        """Return the context of a fragment of the root, or with texts of several messages.

        That is the message that it counts from, this one's voice, those of the others, and whether one of these has an
        answer that is not trained.
        """
        owners = self._facts[segment].owners
        at = base
        if base == ROOT and not owners:
            at = max(seen, 0)
        marked = self._table.marked(mark)
        listed: list[int] = []
        is_unmarked = False
        for owner in owners:
            message = base + owner
            voice = self._voices[message]
            if voice & _ROLE == _ASSISTANT and owner not in marked:
                is_unmarked = True
                voice = self._unmarked_voice(message)
                if changed is not None and changed.is_trained(message):
                    voice |= _IS_CHANGED
            listed.append(voice)
        return at, self._voices[at] if at >= 0 else -1, (base == ROOT, *listed), is_unmarked

    def _end_changed(self, changed: _Changed, output: Output, following: Output, mark: int) -> None:
        """Have what ends a changed answer in the next fragment be trained."""
        segment, base = output
        owners = self._facts[segment].owners
        is_own = 0 in owners and 0 not in self._table.marked(mark) and self._voices[base] & _ROLE == _ASSISTANT
        if is_own and base in changed.messages and not self._table.ends(segment)[1]:
            size, _ = self._table.ends(following[0])
            changed.ending = self._table.mark((Mark(base - following[1], None, (0, 0), (0, size)),))

    def _codes_of_root(self, at: int) -> tuple[tuple[int, RoleCode], ...]:
        return ((0, self._roles[at]),) if self._roles else ()

    def _label_key(
        self, segment: int, base: int, at: int, mark: int, seen: int, *, ends_next: bool, changed: _Changed | None
    ) -> tuple[Any, ...]:
        """Return what the label of a fragment depends on: its id, then as in `labels.Segment` after the parts."""
        roles, answers = self._roles, self._answers
        owners = self._facts[segment].owners
        codes = {owner: roles[base + owner] for owner in owners}
        if base != ROOT:
            codes.setdefault(0, roles[base])
        elif not codes:
            codes = dict(self._codes_of_root(at))
        marked = self._table.marked(mark)
        unmarked = [owner for owner in owners if codes[owner] is RoleCode.ASSISTANT and owner not in marked]
        openings = tuple([(one, answers.header(base + one), answers.opening(base + one)) for one in unmarked])
        trained = _NOBODY
        if changed is not None:
            trained = frozenset(owner for owner in unmarked if changed.is_trained(base + owner))
        said: list[tuple[int, Said]] = []
        for owner, code in codes.items():
            if code is RoleCode.ASSISTANT and answers.said(at + owner) is not PLAIN:
                said.append((owner, answers.said(at + owner)))
        first = seen == ROOT
        marks = self._table.marks_at(mark)
        return segment, base == ROOT, first, tuple(codes.items()), marks, openings, trained, ends_next, tuple(said)


class _Reach(NamedTuple):
    """Fragments to walk over."""

    outputs: list[Output]
    first: int
    """Where the first of them is in its rendering."""
    marks: Mapping[int, int]
    """What is trained of the fragments of the rendering."""
    changed: _Changed | None


class _Changed:
    """Messages that are trained where they are, although later messages have changed them.

    After a text of another message they have no prompt, and are not trained any more.
    """

    def __init__(self, messages: frozenset[int]) -> None:
        self.messages = messages
        self.ending = 0
        """What is trained of the next fragment, since it begins with the end of such an answer."""
        self._speaking: set[int] = set()
        self._silent: set[int] = set()

    def is_trained(self, message: int) -> bool:
        """Return whether a message is trained here."""
        return message in self.messages and message not in self._silent

    def speak(self, base: int, owners: Sequence[int]) -> None:
        """Pass a fragment with texts of messages."""
        shown = {base + owner for owner in owners}
        self._silent |= self._speaking - (shown if len(shown) == 1 else set())
        self._speaking = shown if base == ROOT else shown & {base}
