"""Sequences put together from single messages, for conversations of a shape that was never seen.

Long chats with tools hardly ever have the same shape, but their messages do. What every stretch of a sequence is
depends on the message, its neighbours, and a few facts about the rest of the conversation: the *place* of a message.
Whole conversations teach what is written at each place, and under which replies to the template's questions. A
conversation whose places are all known is put together from them. Nothing is taken for granted: where two conversations
teach different things about one place, places are looked at in more detail, then given up for that template. Every
sequence that is put together is compared with plain Jinja, and some of them with the long way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import accumulate
from operator import or_
from typing import Any, NamedTuple
from zlib import crc32

from chatmill.core.conversation import Role
from chatmill.core.kinds import Part, part_of
from chatmill.render.jinja.expressions import (
    TOOLS,
    UNREACHABLE,
    Expression,
    Question,
    evaluate,
    moved,
    moved_question,
    relative,
    root,
    subjects_of,
)
from chatmill.render.jinja.labels import Span
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.renderer import gives
from chatmill.render.jinja.turn_sequences import Counts, TextSequence

MAX_VARIANTS = 32
"""Different replies that are kept for one place."""
MAX_PLACES = 100_000
MAX_TOOL_QUESTIONS = 128
"""Conversations whose tools are asked about more often are written the long way."""
CHECKED_ALL, CHECKED_LATER = 32, 256
"""One sequence in so many is compared with the long way: of the first thousands, and of those behind."""
MANY = 1024
NO_MESSAGE = -1


class Detail(IntEnum):
    """How closely the neighbours of a message are looked at."""

    OUTLINE = 0
    """Role, reasoning and calls."""
    SHAPES = 1
    """Everything that a template sees without asking."""
    REPLIES = 2
    """What it asks about the messages before and behind, too."""


class PlacedLesson(NamedTuple):
    """What is written for the message at an index."""

    spans: tuple[Span, ...]
    questions: tuple[tuple[Question, Any], ...]


class Lesson:
    """What is written for a message at one place, with paths relative to it."""

    __slots__ = ("_placed", "appended", "is_unstable", "questions", "replies", "spans")

    def __init__(
        self,
        spans: tuple[tuple[bool, Span], ...],
        questions: tuple[tuple[Question, Any], ...],
        appended: int,
        is_unstable: bool,
    ) -> None:
        """Message 0 is the one that the lesson is about; a span may also belong to no message (True)."""
        self.spans, self.appended, self.is_unstable = spans, appended, is_unstable
        self.questions, self.replies = questions, dict(questions)
        self._placed: dict[int, PlacedLesson] = {}

    def at(self, index: int) -> PlacedLesson:
        """The lesson for the message at an index."""
        found = self._placed.get(index)
        if found is None:
            spans = tuple(
                span._replace(
                    expression=span.expression and moved(span.expression, index),
                    message=NO_MESSAGE if is_free else span.message + index,
                )
                for is_free, span in self.spans
            )
            questions = tuple((moved_question(question, index), reply) for question, reply in self.questions)
            found = self._placed[index] = PlacedLesson(spans, questions)
        return found


class Group(NamedTuple):
    """What a conversation has for one of its messages."""

    lesson: Lesson
    message: int
    empty: tuple[int, ...]
    """The spans of which the sequence has nothing."""
    texts: list[str]
    """The text of every span."""

    def spans(self) -> list[Span]:
        """The spans of the sequence."""
        return [
            span if span.text == text else Span(text, span.expression, span.kind, span.message, span.breaks)
            for number, (span, text) in enumerate(zip(self.lesson.at(self.message).spans, self.texts, strict=True))
            if number not in self.empty
        ]


class ComposedAnswer(NamedTuple):
    """An answer in a sequence that was put together."""

    message: int
    text: str
    """The sequence up to and including its stop."""
    begin: int
    """Where it begins in that text."""


class Composed(NamedTuple):
    """A sequence that was put together."""

    groups: list[Group]
    trained: tuple[int, ...]
    replies: Mapping[Question, Any]
    """What it depends on beside the shape."""
    seed: int
    """A number that the shape gives: it decides what is compared."""
    made: int
    """Sequences put together before this one."""

    @property
    def compare_all(self) -> bool:
        """Whether this sequence is to be compared with the long way."""
        return self.made < 2 or self.seed % (CHECKED_ALL if self.made < MANY else CHECKED_LATER) == 0

    def answers(self) -> Iterator[ComposedAnswer]:
        """The answers that are trained behind their own prompts."""
        changed = set(self.unstable)  # the prompt of these is not what the sequence has before them
        before = ""
        for message, group in enumerate(self.groups):
            if message in self.trained and message not in changed:
                own = group.lesson.at(message).spans
                begin = next((number for number, span in enumerate(own) if span.breaks), len(own))
                stops = (n for n in range(begin, len(own)) if part_of(own[n].kind) is Part.TERMINATOR)
                end = next(stops, len(own) - 1) + 1
                is_appended = end == len(own) and bool(group.lesson.appended)
                said = "".join(group.texts[: end - is_appended])
                yield ComposedAnswer(message, before + said, len(before) + sum(map(len, group.texts[:begin])))
            before += "".join(group.texts)

    @property
    def appended(self) -> int:
        """Stops that the template alone would not have written: at most one, behind everything."""
        return self.groups[-1].lesson.appended

    @property
    def unstable(self) -> tuple[int, ...]:
        """Messages that are trained although later ones change their text."""
        return tuple(group.message for group in self.groups if group.lesson.is_unstable)

    @property
    def sequence(self) -> TextSequence:
        """The sequence, written out."""
        spans = tuple(span for group in self.groups for span in group.spans())
        return TextSequence(spans, self.trained, self.appended, self.unstable)

    @property
    def counts(self) -> Counts:
        """For the ledger."""
        return Counts(len(self.trained), len(self.unstable), 0, self.appended)

    @property
    def text(self) -> str:
        """What the template alone would have written."""
        texts = [text for group in self.groups for text in group.texts]
        return "".join(texts[:-1] if self.appended else texts)


class MessageSequences:
    """All lessons of one template under one set of options."""

    def __init__(self) -> None:
        """Nothing learned yet."""
        self._lessons: dict[Any, list[Lesson]] = {}
        self._shapes: dict[Any, int] = {}
        self._detail = Detail.OUTLINE
        self.made = 0
        """Sequences put together so far."""
        self.is_sound = True
        """Whether places have decided everything so far."""

    def compose(self, view: RecordView, shape: Sequence[Any]) -> Composed | None:
        """The sequence of a conversation; None where one of its messages is at a place that is not known."""
        if not self.is_sound:
            return None
        asked: dict[Question, Any] = {}
        given: dict[Question, Any] = {}
        groups: list[Group] = []
        for index, place in enumerate(self._places(view, shape)):
            lesson = self._find(place, index, view, asked, given)
            if lesson is None:
                return None
            texts: list[str] = []
            empty: tuple[int, ...] = ()
            for span in lesson.at(index).spans:
                expression = span.expression
                if expression is None or expression[0] == "const":
                    texts.append(span.text)
                    continue
                text = evaluate(expression, view.field)
                if not text:  # the sequence has nothing of it, and so must those of other conversations that are alike
                    given["filled", expression] = False
                    empty = (*empty, len(texts))
                texts.append(text)
            groups.append(Group(lesson, index, empty, texts))
        self.made += 1
        return Composed(groups, _trained(view), given, crc32(repr(shape).encode()), self.made - 1)

    def _find(
        self, place: Any, index: int, view: RecordView, asked: dict[Question, Any], given: dict[Question, Any]
    ) -> Lesson | None:
        for lesson in self._lessons.get(place, ()):
            questions = lesson.at(index).questions
            if gives(view, questions, asked):
                given.update(questions)
                return lesson
        return None

    def learn(
        self,
        view: RecordView,
        shape: Sequence[Any],
        sequences: Sequence[TextSequence],
        counts: Counts,
        notes: Mapping[Question, Any],
    ) -> None:
        """Take a whole conversation in, if its sequence holds all of its answers."""
        if (
            not self.is_sound
            or len(sequences) != 1
            or counts.unstable != len(sequences[0].unstable)
            or counts.untrained
        ):
            return
        if sequences[0].trained != _trained(view) or len(self._lessons) > MAX_PLACES:
            return
        groups = _by_message(sequences[0].spans, len(shape))
        about = _by_subject(notes)
        if groups is None or about is None:
            return
        last = len(shape) - 1
        lessons = [
            self._lesson(
                group, index, about, sequences[0].appended if index == last else 0, index in sequences[0].unstable
            )
            for index, group in enumerate(groups)
        ]
        if None in lessons:
            return
        for place, lesson in zip(self._places(view, shape), lessons, strict=True):
            assert lesson is not None
            if not self._keep(place, lesson):
                if self.widen():
                    self.learn(view, shape, sequences, counts, notes)
                return

    def _lesson(
        self,
        spans: list[Span],
        index: int,
        about: Mapping[int, list[tuple[Question, Any]]],
        appended: int,
        is_unstable: bool,
    ) -> Lesson | None:
        reach = 1 if self._detail is Detail.REPLIES else 0
        subjects = set(range(max(0, index - reach), index + reach + 1))
        if any(span.expression is not None and _is_of_tools(span.expression) for span in spans):
            subjects.add(TOOLS)
        near = [pair for one in subjects for pair in about.get(one, ())]
        moved_spans = []
        for span in spans:
            expression = span.expression and relative(span.expression, index)
            if expression is UNREACHABLE:
                return None
            text = span.text if expression is None or expression[0] == "const" else ""
            message = NO_MESSAGE if span.message == NO_MESSAGE else span.message - index
            moved_spans.append((span.message == NO_MESSAGE, Span(text, expression, span.kind, message, span.breaks)))
        questions = tuple((moved_question(question, -index), reply) for question, reply in near)
        return Lesson(tuple(moved_spans), questions, appended, is_unstable)

    def _keep(self, place: Any, lesson: Lesson) -> bool:
        """Take a lesson in; False where it contradicts another one."""
        known = self._lessons.setdefault(place, [])
        for one in known:
            shared = (question for question in lesson.replies if question in one.replies)
            if all(
                one.replies[question] == lesson.replies[question] for question in shared
            ):  # one record may give both
                if not _agree(one, lesson):
                    return False
                if one.replies.items() <= lesson.replies.items():  # it says the same of more records
                    return True
        if len(known) < MAX_VARIANTS:
            known.append(lesson)
        return True

    def widen(self) -> bool:
        """What a message becomes depends on more than was thought: look closer; False where that was the last step."""
        self.is_sound = self._detail < Detail.REPLIES
        self._detail = Detail(min(self._detail + 1, Detail.REPLIES))
        self._lessons = {}
        return self.is_sound

    def _places(self, view: RecordView, shape: Sequence[Any]) -> list[Any]:
        """The place of every message: shapes around it, and facts about the messages before and behind it."""
        numbers = [self._shapes.setdefault(one, len(self._shapes)) for one in shape]
        in_outline = self._detail is Detail.OUTLINE
        others = [(one[0], one[1], bool(one[4])) for one in shape] if in_outline else numbers
        count, around = len(shape), [None, None, *others, None]
        users, answers = ([one[0] == role for one in shape] for role in (Role.USER, Role.ASSISTANT))
        calls = [bool(one[4]) for one in shape]
        next_user, next_answer = _next(users), _next(answers)
        next_final = _next([is_answer and not has_calls for is_answer, has_calls in zip(answers, calls, strict=True)])
        user_before, answer_before, calls_before = _before(users), _before(answers), _before(calls)
        last_answer = max((k for k, is_answer in enumerate(answers) if is_answer), default=-1)
        has_tools = bool(view.conversation.tools)
        places = []
        for index in range(count):
            user, answer = next_user[index], next_answer[index]
            later = (  # what the prompts and answers behind this message have between them and it
                user < count,
                answer < count,
                user < answer,
                answer < count and next_answer[answer] < min(user, count),
                last_answer > user,
                next_final[index] < count,
            )
            before = (user_before[index], answer_before[index], calls_before[index])
            near = (around[index], around[index + 1], numbers[index], around[index + 3])
            places.append((*near, others[0], index & 1 and not in_outline, *before, *later, has_tools))
        return places


def _next(flags: Sequence[bool]) -> list[int]:
    """For each message, the index of the next one with a flag; more than there are messages where there is none."""
    found, at = [0] * len(flags), len(flags) + 1
    for index in range(len(flags) - 1, -1, -1):
        found[index] = at
        if flags[index]:
            at = index
    return found


def _before(flags: Sequence[bool]) -> list[bool]:
    """For each message, whether a flag is set on one before it."""
    return [False, *accumulate(flags, or_)][: len(flags)]


def _agree(one: Lesson, other: Lesson) -> bool:
    """Whether two lessons teach the same for records that give the replies of both."""
    if one.is_unstable != other.is_unstable or one.appended != other.appended:
        return False
    if one.spans == other.spans:
        return True
    empty = {question[1] for question, reply in (*one.questions, *other.questions) if _is_empty(question, reply)}
    ours, theirs = ([pair for pair in lesson.spans if pair[1].expression not in empty] for lesson in (one, other))
    return ours == theirs


def _is_empty(question: Question, reply: Any) -> bool:
    return question[0] == "filled" and reply is False


def _is_of_tools(expression: Expression) -> bool:
    path = root(expression)
    return path is not None and isinstance(path[0], str)


def _trained(view: RecordView) -> tuple[int, ...]:
    """The messages that are trained where every answer is."""
    messages = view.conversation.messages
    return tuple(k for k, message in enumerate(messages) if message.role is Role.ASSISTANT and message.weight != 0)


def _by_message(spans: Sequence[Span], count: int) -> list[list[Span]] | None:
    """The spans of every message; those of no message go with the one before. None where messages are not in order."""
    groups: list[list[Span]] = [[] for _ in range(count)]
    at = 0
    for span in spans:
        if span.message != NO_MESSAGE:
            if span.message < at:
                return None
            at = span.message
        groups[at].append(span)
    return groups


def _by_subject(notes: Mapping[Question, Any]) -> dict[int, list[tuple[Question, Any]]] | None:
    """Questions by the message they are about; None where one is about several."""
    about: dict[int, list[tuple[Question, Any]]] = {}
    for question, reply in notes.items():
        subjects = set(subjects_of(question))
        if len(subjects) != 1:
            return None
        about.setdefault(subjects.pop(), []).append((question, reply))
    return None if len(about.get(TOOLS, ())) > MAX_TOOL_QUESTIONS else about
