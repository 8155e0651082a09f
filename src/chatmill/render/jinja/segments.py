"""What a template writes for single messages, learned from whole renderings and put together for other conversations.

A conversation of sixty messages has well over a hundred prompts and histories, and hardly any other conversation has
the same shape. But its messages look alike: what a template writes for a message depends on the message, its
neighbours, and a few facts about the rest. Those are the *surroundings* of a message. A rendering is put together from
what was written in the same surroundings before. Nothing is taken for granted: surroundings that do not decide the
text are looked at in more detail, then end the method for that template, and every shape that is put together is
compared with plain Jinja.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from chatmill.render.jinja.expressions import Expression, Question, ask, root
from chatmill.render.jinja.record import RecordView

MAX_VARIANTS = 64
"""Different answers that are kept for the same surroundings."""
MAX_KEPT = 500_000
"""Pieces and questions of the segments that are kept; beyond, all are learned again."""
EXACT_COUNTS = 32
"""A rendering of fewer messages than this is compared once for each number of messages and each ending."""
TOOLS = -1
"""The owner of tool definitions, which belong to no message."""

SegmentPiece = tuple[str, Expression | None]
"""Text, and the expression it comes from."""


class Segment:
    """What was written for one message, with paths that are relative to it."""

    __slots__ = ("_placed", "answers", "pieces", "questions")

    def __init__(self, pieces: tuple[SegmentPiece, ...], questions: tuple[tuple[Question, Any], ...]) -> None:
        """Paths are relative: message 0 is the one that the segment is for."""
        self.pieces, self.questions, self.answers = pieces, questions, dict(questions)
        self._placed: dict[int, PlacedSegment] = {}

    def at(self, index: int) -> PlacedSegment:
        """The same for the message at an index; the same object whenever it is asked for."""
        found = self._placed.get(index)
        if found is None:
            pieces = tuple((text, expression and moved(expression, index)) for text, expression in self.pieces)
            questions = tuple((moved_question(question, index), answer) for question, answer in self.questions)
            found = self._placed[index] = PlacedSegment(pieces, questions, self)
        return found


class PlacedSegment:
    """A segment of a message at a known index; two of them are equal only if they are one."""

    __slots__ = ("pieces", "questions", "segment")

    def __init__(
        self, pieces: tuple[SegmentPiece, ...], questions: tuple[tuple[Question, Any], ...], segment: Segment
    ) -> None:
        """Paths are those of the conversation."""
        self.pieces, self.questions, self.segment = pieces, questions, segment


class Surroundings(NamedTuple):
    """What decides the text of a message, together with the answers to the template's questions about it."""

    before: tuple[Any, ...]
    """The two messages before, in outline or by their shapes."""
    own: Any
    """Its own shape."""
    after: Any
    """The next message; None for the last one."""
    is_first: bool
    is_odd: bool
    """Whether its index is; False in outline."""
    opening: Any
    """The first message."""
    user_before: bool
    user_after: bool
    assistant_before: bool
    assistant_after: bool
    final_after: bool
    """An answer without calls."""
    calls_before: bool
    has_tools: bool
    prompt: bool
    """Whether the generation prompt is written behind the conversation."""


class Surveyor:
    """Knows the surroundings of every message of a conversation, for any number of first messages."""

    def __init__(self, shape: Sequence[Any], has_tools: bool) -> None:
        """`shape` has one entry per message, its role first."""
        self.shape, self._has_tools = shape, has_tools
        self.outline = [outline(one) for one in shape]
        roles = [one[0] for one in shape]
        self.next_user = _next([role == "user" for role in roles])
        self.next_assistant = _next([role == "assistant" for role in roles])
        self.next_final = _next([one[0] == "assistant" and not one[4] for one in shape])
        self.user_before = _before([role == "user" for role in roles])
        self.assistant_before = _before([role == "assistant" for role in roles])
        self.calls_before = _before([bool(one[4]) for one in shape])

    def surroundings(self, index: int, count: int, prompt: bool, in_detail: bool) -> Surroundings:
        """Those of one of the first messages."""
        others = self.shape if in_detail else self.outline
        return Surroundings(
            before=tuple(others[max(0, index - 2) : index]),
            own=self.shape[index],
            after=others[index + 1] if index + 1 < count else None,
            is_first=index == 0,
            is_odd=in_detail and bool(index & 1),
            opening=others[0],
            user_before=self.user_before[index],
            user_after=self.next_user[index] < count,
            assistant_before=self.assistant_before[index],
            assistant_after=self.next_assistant[index] < count,
            final_after=self.next_final[index] < count,
            calls_before=self.calls_before[index],
            has_tools=self._has_tools,
            prompt=prompt,
        )


def outline(shape: Any) -> tuple[str, bool, bool]:
    """What mostly matters of a neighbour's shape: its role, whether it has reasoning, whether it has calls."""
    return shape[0], shape[1], bool(shape[4])


def _next(flags: Sequence[bool]) -> list[int]:
    """For each message, the index of the next one with a flag; the number of messages, or more, where there is none."""
    found, at = [0] * len(flags), len(flags) + 1
    for index in range(len(flags) - 1, -1, -1):
        found[index] = at
        if flags[index]:
            at = index
    return found


def _before(flags: Sequence[bool]) -> list[bool]:
    """For each message, whether a flag is set on one before it."""
    found, seen = [], False
    for flag in flags:
        found.append(seen)
        seen = seen or flag
    return found


Use = tuple[int, bool, Surroundings, Segment]
"""Where a segment was used: how many messages there were (roughly; for the first and last segments), whether before all
of them, and the surroundings in detail."""


class SegmentBook:
    """All segments of one template under one set of options."""

    def __init__(self) -> None:
        """Nothing learned yet."""
        self._segments: dict[Hashable, list[Segment]] = {}
        self._equal: dict[Any, Segment] = {}
        """Segments by what they hold: equal ones are one, in whatever surroundings."""
        self._kept = 0
        self._confirmed: set[Use] = set()
        self.in_detail = False
        """Whether neighbours are known by their whole shapes."""
        self.is_sound = True
        """Whether surroundings have decided the text so far."""

    @property
    def state(self) -> tuple[bool, bool]:
        """What changes when surroundings turn out not to decide the text."""
        return self.in_detail, self.is_sound

    def refine(self) -> None:
        """What a message becomes depends on more than was thought: look at its neighbours in detail, then give up."""
        self.is_sound = self.is_sound and not self.in_detail
        self.in_detail = True
        self._segments, self._confirmed = {}, set()

    def learn(
        self,
        surveyor: Surveyor,
        count: int,
        prompt: bool,
        parts: Sequence[Sequence[SegmentPiece]] | None,
        asked: Mapping[Question, Any],
    ) -> None:
        """Take a whole rendering in: what was written before all messages, for each of them, and behind them."""
        if parts is None or len(parts) != count + 2:
            self.is_sound = False
        if not self.is_sound or parts is None:
            return
        if self._kept > MAX_KEPT:
            self._segments, self._equal, self._confirmed, self._kept = {}, {}, set(), 0
        if not self._take_in(surveyor, count, prompt, parts, asked):
            self.refine()
            self.learn(surveyor, count, prompt, parts, asked)

    def _take_in(
        self,
        surveyor: Surveyor,
        count: int,
        prompt: bool,
        parts: Sequence[Sequence[SegmentPiece]],
        asked: Mapping[Question, Any],
    ) -> bool:
        """Keep the segments of a rendering; False where one contradicts another."""
        about: dict[int | None, list[tuple[Question, Any]]] = {}
        for question, answer in asked.items():
            about.setdefault(subject_of(question), []).append((question, answer))
        if None in about:  # a question about several messages at once
            self.is_sound = False
            return True
        for index in range(count):
            written = list(parts[index + 1])
            if index == count - 1:
                written += parts[-1]
            questions = tuple((moved_question(q, -index), answer) for q, answer in about.get(index, ()))
            pieces = [(text, e and relative(e, index)) for text, e in written]
            if not self._keep(surveyor.surroundings(index, count, prompt, self.in_detail), pieces, questions):
                return False
        pieces = [(text, e and relative(e, 0)) for text, e in parts[0]]
        return self._keep(self._opening(surveyor, count, prompt), pieces, tuple(about.get(TOOLS, ())))

    def _opening(self, surveyor: Surveyor, count: int, prompt: bool) -> Hashable:
        return ("opening", count > 1, prompt, surveyor.surroundings(0, count, prompt, self.in_detail))

    def _keep(
        self, key: Hashable, pieces: list[tuple[str, Expression | None]], questions: tuple[tuple[Question, Any], ...]
    ) -> bool:
        """Keep a segment; False where it contradicts another one."""
        if any(e is UNREACHABLE for _, e in pieces):
            self.is_sound = False
            return True
        content = (_merged(pieces), questions)
        try:
            hash(questions)
            same: Hashable = content
        except TypeError:  # an answer is a list or an object of the record
            same = (content[0], repr(questions))
        new = self._equal.get(same)
        if new is None:
            new = self._equal[same] = Segment(*content)
            self._kept += 1 + len(content[0]) + len(questions)
        known = self._segments.setdefault(key, [])
        for one in known:
            if may_both_hold(one.answers, questions):
                return one.pieces == new.pieces
        if len(known) < MAX_VARIANTS:
            known.append(new)
        return True

    def at(
        self, index: int, surveyor: Surveyor, count: int, prompt: bool, view: RecordView, answers: dict[Question, Any]
    ) -> PlacedSegment | None:
        """The segment of one of the first messages; None where no such record was seen."""
        return self._find(surveyor.surroundings(index, count, prompt, self.in_detail), index, view, answers)

    def _find(self, key: Hashable, index: int, view: RecordView, answers: dict[Question, Any]) -> PlacedSegment | None:
        for segment in self._segments.get(key, ()):
            placed = segment.at(index)
            if _holds(placed.questions, view, answers):
                return placed
        return None

    def doubt(self, index: int, surveyor: Surveyor, count: int, prompt: bool, placed: PlacedSegment) -> Use | None:
        """The use of a segment (index -1: before all messages), unless plain Jinja has confirmed such a use."""
        messages = 0 if 0 <= index < count - 1 else count if count < EXACT_COUNTS else count // 8 + EXACT_COUNTS
        use = (messages, index < 0, surveyor.surroundings(max(index, 0), count, prompt, True), placed.segment)
        return None if use in self._confirmed else use

    def confirm(self, uses: Iterable[Use]) -> None:
        """Plain Jinja has written the same."""
        self._confirmed.update(uses)
        self._kept += 1

    def are_confirmed(self, uses: Iterable[Use]) -> bool:
        """Whether plain Jinja has written all of these."""
        return self._confirmed.issuperset(uses)

    def opening(
        self, surveyor: Surveyor, count: int, prompt: bool, view: RecordView, answers: dict[Question, Any]
    ) -> PlacedSegment | None:
        """What is written before all messages."""
        return self._find(self._opening(surveyor, count, prompt), 0, view, answers)


def _holds(questions: Iterable[tuple[Question, Any]], view: RecordView, answers: dict[Question, Any]) -> bool:
    for question, answer in questions:
        if question not in answers:
            answers[question] = ask(question, view.field)
        given = answers[question]
        if given != answer or type(given) is not type(answer):
            return False
    return True


def may_both_hold(answers: Mapping[Question, Any], other: Iterable[tuple[Question, Any]]) -> bool:
    """Whether a record could give both sets of answers."""
    return all(answers.get(question, answer) == answer for question, answer in other)


def _merged(pieces: list[tuple[str, Expression | None]]) -> tuple[SegmentPiece, ...]:
    """Neighbouring pieces of template text as one; texts of a record are known by their expression alone."""
    found: list[SegmentPiece] = []
    for text, expression in pieces:
        if expression is not None and expression[0] not in ("const", "lost"):
            found.append(("", expression))
        elif expression is None and found and found[-1][1] is None:
            found[-1] = (found[-1][0] + text, None)
        elif text or expression is not None:
            found.append((text, expression))
    return tuple(found)


UNREACHABLE: Expression = ("unreachable",)


def relative(expression: Expression, index: int) -> Expression:
    """An expression with a path relative to a message; `UNREACHABLE` where it is of a message that is not near."""
    path = root(expression)
    if path is None or path[0] == "tools":
        return UNREACHABLE if path is None else expression
    if not -2 <= path[0] - index <= 1:
        return UNREACHABLE
    return moved(expression, -index)


@lru_cache(maxsize=1 << 16)
def moved(expression: Expression, by: int) -> Expression:
    """An expression of the message that many places further on."""
    if expression[0] == "apply":
        return (*expression[:3], moved(expression[3], by))
    path = expression[-1]
    return expression if path[0] == "tools" else (*expression[:-1], (path[0] + by, *path[1:]))


@lru_cache(maxsize=1 << 16)
def moved_question(question: Question, by: int) -> Question:
    """A question about the message that many places further on."""
    return (question[0], *(_moved_part(part, by) for part in question[1:]))


_EXPRESSIONS = frozenset({"field", "const", "apply", "json", "text"})


def _moved_part(part: Any, by: int) -> Any:
    if not isinstance(part, tuple) or not part:
        return part
    if part[0] in _EXPRESSIONS:
        return moved(part, by)
    return (part[0] + by, *part[1:]) if _is_path(part) else part


def _is_path(part: tuple[Any, ...]) -> bool:
    return isinstance(part[0], int) and len(part) > 1 and isinstance(part[1], str)


def subject_of(question: Question) -> int | None:
    """The message that a question is about, `TOOLS`, or None for several."""
    found = set()
    for part in question[1:]:
        if isinstance(part, tuple) and part:
            path = root(part) if part[0] in _EXPRESSIONS else part
            if path is not None and path and path[0] == "tools":
                found.add(TOOLS)
            elif path is not None and _is_path(path):
                found.add(path[0])
    return found.pop() if len(found) == 1 else None
