"""Renderings of one template: each is made once per shape and set of answers, and found again by asking.

What a template wrote for a record holds for every record of the same shape that gives the same answers to what the
template asked. Renderings of long conversations are put together from segments (see `segments`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import jinja2

from chatmill.errors import ChatmillError, RecordError
from chatmill.render.jinja.expressions import Expression, Question, ask, evaluate, root
from chatmill.render.jinja.notes import Notes
from chatmill.render.jinja.record import RecordView
from chatmill.render.jinja.sandbox import LimitError, PlainSandbox, TracingSandbox
from chatmill.render.jinja.segments import TOOLS, PlacedSegment, SegmentBook, SegmentPiece, Surveyor, Use
from chatmill.render.jinja.traced import Traced, joined, plain_text

MAX_KEPT = 500_000
"""Pieces and questions of the renderings that are kept per template."""
MAX_VARIANTS = 64
"""Different answers that are kept for one shape."""


class TraceError(ChatmillError):
    """What was derived from traces is not what the template writes."""


OwnedPiece = tuple[str, Expression | None, int | None]
"""Text, the expression it comes from, and the message that the text is from."""


class Piece(NamedTuple):
    """A stretch of a rendering, of one origin."""

    start: int
    stop: int
    expression: Expression | None
    """None for text that the template wrote."""
    owner: int | None
    """The message the text is from, `TOOLS`, or None."""


class Rendering:
    """What a template wrote for one record, cut by origin."""

    __slots__ = ("pieces", "questions", "text")

    def __init__(self, text: str, pieces: tuple[Piece, ...], questions: Mapping[Question, Any]) -> None:
        """`questions` are what the template asked, with the answers it got."""
        self.text, self.pieces, self.questions = text, pieces, questions

    @property
    def size(self) -> int:
        """Characters."""
        return len(self.text)

    def near(self, message: int) -> tuple[Rendering, int]:
        """A part that begins somewhere before the text of a message and goes to the end, and where it begins."""
        return self, 0

    def from_difference(self, other: Rendering, *, all_of_it: bool = True) -> tuple[Rendering, Rendering]:
        """Both renderings without a beginning that they surely share; of this one as much as the other may need."""
        return self, other

    def surely_begins_with(self, other: Rendering) -> bool:
        """Whether that is known without looking at the text."""
        return False

    def differing(self, other: Rendering) -> list[int] | None:
        """Messages that are not surely written as in another rendering; None for any."""
        return None

    def for_record(self, view: RecordView) -> Rendering:
        """The same rendering of another record that gives the same answers."""
        parts = ((self.text[p.start : p.stop], p.expression) for p in self.pieces)
        return rendering_of(parts, view, self.questions)


def rendering_of(
    parts: Iterator[SegmentPiece] | Sequence[SegmentPiece], view: RecordView | None, questions: Mapping[Question, Any]
) -> Rendering:
    """Put texts one behind the other; neighbouring texts of the template become one piece.

    The text of an expression is evaluated for the record, unless there is none to evaluate it for.
    """
    texts: list[str] = []
    pieces: list[Piece] = []
    at = 0
    for text, expression in parts:
        if expression is None:
            if not text:
                continue
            if pieces and pieces[-1].expression is None:
                pieces[-1] = Piece(pieces[-1].start, at + len(text), None, None)
                texts.append(text)
                at += len(text)
                continue
        elif view is not None and expression[0] not in ("const", "lost"):
            text = evaluate(expression, view.field)
        owner = None if expression is None else _owner(expression)
        pieces.append(Piece(at, at + len(text), expression, owner))
        texts.append(text)
        at += len(text)
    return Rendering("".join(texts), tuple(pieces), questions)


@lru_cache(maxsize=1 << 16)
def _owner(expression: Expression) -> int | None:
    path = root(expression)
    if path is None:  # lost: whatever it is, it is from the first of its fields
        inner = expression
        while inner[0] == "apply":
            inner = inner[3]
        path = inner[1][0]
    return TOOLS if path[0] == "tools" else int(path[0])


class ComposedRendering(Rendering):
    """A rendering put together from segments: the one before all messages, then one for each message."""

    __slots__ = ("__dict__", "_composition", "doubts", "segments")

    def __init__(self, segments: list[PlacedSegment], composition: Composition, doubts: list[Use]) -> None:
        """Text and pieces are made when they are asked for; `doubts` are uses that were not confirmed so far."""
        self.segments, self._composition, self.doubts = segments, composition, doubts
        self._near: dict[int, Rendering] = {}

    @cached_property
    def _whole(self) -> Rendering:
        return self._composition.rendering(self.segments)

    @property
    def text(self) -> str:  # type: ignore[override]
        """All of it."""
        return self._whole.text

    @property
    def pieces(self) -> tuple[Piece, ...]:  # type: ignore[override]
        """All of them."""
        return self._whole.pieces

    @property
    def questions(self) -> Mapping[Question, Any]:  # type: ignore[override]
        """Those of all segments."""
        return dict(pair for segment in self.segments for pair in segment.questions)

    @cached_property
    def _begins(self) -> list[int]:
        """Where every segment begins, and where the last one ends."""
        return [0, *accumulate(map(self._composition.size, self.segments))]

    @property
    def size(self) -> int:
        """Characters."""
        return self._begins[-1]

    def near(self, message: int) -> tuple[Rendering, int]:
        """From the message before on."""
        first = max(0, min(message, len(self.segments) - 1))
        found = self._near.get(first)
        if found is None:
            found = self._near[first] = self._composition.rendering(self.segments[first:])
        return found, self._begins[first]

    def from_difference(self, other: Rendering, *, all_of_it: bool = True) -> tuple[Rendering, Rendering]:
        """Without the segments that both begin with."""
        if not isinstance(other, ComposedRendering):
            return self, other
        same = self._common(other)
        stop = None if all_of_it else len(other.segments) + 1
        composed = self._composition
        return composed.rendering(self.segments[same:stop]), composed.rendering(other.segments[same:])

    def surely_begins_with(self, other: Rendering) -> bool:
        """Whether all segments of the other are the first ones of this."""
        return isinstance(other, ComposedRendering) and self._common(other) == len(other.segments)

    def _common(self, other: ComposedRendering) -> int:
        """How many segments both begin with."""
        pairs = zip(self.segments, other.segments, strict=False)
        shorter = min(len(self.segments), len(other.segments))
        return next((i for i, (mine, theirs) in enumerate(pairs) if mine is not theirs), shorter)

    def differing(self, other: Rendering) -> list[int] | None:
        """Messages whose segments are others."""
        if not isinstance(other, ComposedRendering):
            return None
        pairs = zip(self.segments[1:], other.segments[1:], strict=False)
        return [index for index, (mine, theirs) in enumerate(pairs) if mine is not theirs]


class Composition:
    """Puts the renderings of one conversation together."""

    def __init__(self, book: SegmentBook, view: RecordView, shape: tuple[Any, ...]) -> None:
        """Looks segments up when they are first needed."""
        self._book, self._view = book, view
        self._surveyor = Surveyor(shape, bool(view.conversation.tools))
        self._found: list[dict[int, tuple[PlacedSegment, Use | None]]] = [{} for _ in shape]
        self._answers: dict[Question, Any] = {}
        self._written: dict[PlacedSegment, list[OwnedPiece]] = {}
        """The pieces of segments with the texts of this record."""
        self._sizes: dict[PlacedSegment, int] = {}

    def compose(self, count: int, prompt: bool) -> ComposedRendering | None:
        """The rendering of the first messages; None where a segment of it was never seen."""
        survey, book = self._surveyor, self._book
        opening = book.opening(survey, count, prompt, self._view, self._answers) if count else None
        if opening is None:
            return None
        segments = [opening]
        doubts = [book.doubt(-1, survey, count, prompt, opening)]
        for index in range(count):
            bits = (survey.next_user[index] < count) | (survey.next_assistant[index] < count) << 1
            bits |= (survey.next_final[index] < count) << 2 | (index + 1 < count) << 3 | prompt << 4
            known = self._found[index].get(bits)
            if known is None:  # what was never seen may have been learned since
                segment = book.at(index, survey, count, prompt, self._view, self._answers)
                if segment is None:
                    return None
                known = self._found[index][bits] = (segment, book.doubt(index, survey, count, prompt, segment))
            segments.append(known[0])
            doubts.append(known[1])
        return ComposedRendering(segments, self, [doubt for doubt in doubts if doubt is not None])

    def rendering(self, segments: Sequence[PlacedSegment]) -> Rendering:
        """Some segments as text and pieces."""
        texts: list[str] = []
        pieces: list[Piece] = []
        at, literal = 0, -1  # where the open piece of template text began
        for segment in segments:
            for text, expression, owner in self._pieces(segment):
                stop = at + len(text)
                if expression is not None:
                    literal = -1
                    pieces.append(Piece(at, stop, expression, owner))
                elif not text:
                    continue
                elif literal >= 0:
                    pieces[-1] = Piece(literal, stop, None, None)
                else:
                    literal = at
                    pieces.append(Piece(at, stop, None, None))
                texts.append(text)
                at = stop
        return Rendering("".join(texts), tuple(pieces), {})

    def _pieces(self, segment: PlacedSegment) -> list[OwnedPiece]:
        found = self._written.get(segment)
        if found is None:
            found = self._written[segment] = [
                (
                    text if e is None or e[0] in ("const", "lost") else evaluate(e, self._view.field),
                    e,
                    None if e is None else _owner(e),
                )
                for text, e in segment.pieces
            ]
        return found

    def size(self, segment: PlacedSegment) -> int:
        """Characters of a segment."""
        found = self._sizes.get(segment)
        if found is None:
            found = self._sizes[segment] = sum(len(text) for text, _, _ in self._pieces(segment))
        return found


class Refusal(NamedTuple):
    """What a template said when it refused a conversation."""

    message: str
    line: int | None
    questions: Mapping[Question, Any]
    is_general: bool
    """Whether every record of the shape that gives the same answers is refused in the same words."""


class Variants:
    """What is known of the records of one shape, by their answers."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        """Nothing is known."""
        self._known: list[tuple[tuple[tuple[Question, Any], ...], Any]] = []

    def find(self, view: RecordView) -> Any:
        """What is known of a record; None where nothing is."""
        answers: dict[Question, Any] = {}
        for questions, value in self._known:
            for question, answer in questions:
                if question not in answers:
                    answers[question] = ask(question, view.field)
                given = answers[question]
                if given != answer or type(given) is not type(answer):
                    break
            else:
                return value
        return None

    def put(self, questions: Mapping[Question, Any], value: Any) -> None:
        """Keep what holds for all records that give these answers."""
        if len(self._known) < MAX_VARIANTS:
            self._known.append((tuple(questions.items()), value))


class Renderer:
    """Runs one template, on traced values or on plain ones, under fixed options."""

    def __init__(
        self,
        source: str,
        tracing: TracingSandbox,
        plain: PlainSandbox,
        variables: Mapping[str, Any],
        name: str,
        share_segments: bool = True,
    ) -> None:
        """`variables` are the special tokens and the template's options."""
        self._tracing, self._plain = tracing, plain
        self._traced_template, self._plain_template = tracing.template(source), plain.template(source)
        self.variables = dict(variables)
        self._name = name
        self.segments = SegmentBook()
        self.segments.is_sound = share_segments
        self._known: dict[Any, Variants] = {}
        self._kept = 0
        self.runs = 0
        """How often the template ran on traced values."""

    def composition(self, view: RecordView, shape: tuple[Any, ...]) -> Composition:
        """What puts renderings of a conversation together."""
        return Composition(self.segments, view, shape)

    def render(
        self, view: RecordView, shape: tuple[Any, ...], count: int, prompt: bool, composition: Composition | None = None
    ) -> Rendering | Refusal:
        """The rendering of the first messages, with or without the generation prompt."""
        if composition is not None and self.segments.is_sound:
            composed = composition.compose(count, prompt)
            if composed is not None:
                return composed
        key = (shape[:count], bool(view.conversation.tools), prompt)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = Variants()
        found: Rendering | Refusal | None = known.find(view)
        if isinstance(found, Rendering):
            return found.for_record(view)
        if found is None:
            found = self._run(view, shape, count, prompt)
            if self._kept >= MAX_KEPT:
                self._known, self._kept = {}, 0
            else:
                known.put(found.questions, found)
                self._kept += 1 + len(found.questions) + (len(found.pieces) if isinstance(found, Rendering) else 0)
        if composition is not None and self.segments.is_sound and isinstance(found, Rendering):
            return composition.compose(count, prompt) or found  # the same, in parts that others share
        return found

    def _run(self, view: RecordView, shape: tuple[Any, ...], count: int, prompt: bool) -> Rendering | Refusal:
        self.runs += 1
        notes = Notes()
        messages, tools = view.values(count, notes)
        chunks: list[str] = []
        marks: list[int | None] = []
        try:
            for chunk in self._tracing.chunks(self._traced_template, self._values(messages, tools, prompt)):
                chunks.append(chunk)
                marks.append(self._tracing.message)
            text = self._tracing.checked(joined(chunks))
        except jinja2.TemplateError as error:
            return self._refusal(view, count, prompt, notes, error)
        if self.segments.is_sound and count:
            surveyor = Surveyor(shape[:count], bool(view.conversation.tools))
            self.segments.learn(surveyor, count, prompt, _parts(chunks, marks, count), notes.answers)
        pieces = text.pieces() if isinstance(text, Traced) else iter([(text, None)])
        return rendering_of(list(pieces), None, notes.answers)

    def _refusal(
        self, view: RecordView, count: int, prompt: bool, notes: Notes, traced: jinja2.TemplateError
    ) -> Refusal:
        """What the template says on plain values, in the words its author chose."""
        is_general = not isinstance(traced.message, Traced)
        try:
            self.plain(view, count, prompt)
        except jinja2.TemplateError as error:
            said = plain_text(str(error.message or error))
            if isinstance(error, LimitError):
                said = f"the template was stopped: {said}"
            return Refusal(said, getattr(error, "lineno", None), notes.answers, is_general)
        return Refusal("the template fails on values that are traced", None, notes.answers, False)

    def plain(self, view: RecordView, count: int, prompt: bool) -> str:
        """The text of the first messages by plain Jinja, without any tracing."""
        messages, tools = view.values(count, None)
        return self._plain.render(self._plain_template, self._values(messages, tools, prompt))

    def plain_if_any(self, view: RecordView, count: int, prompt: bool) -> str | None:
        """The same; None where the template refuses the messages."""
        try:
            return self.plain(view, count, prompt)
        except jinja2.TemplateError:
            return None

    def unlike(self, view: RecordView) -> TraceError:
        """The error of a record that was put together, and that the template writes differently."""
        return TraceError(
            f"the template {self._name!r} writes record {view.conversation.id or view.conversation.where!r} "
            "otherwise than its parts elsewhere. Set `traces: whole` in the recipe: every shape is then run "
            "through the template as a whole, which is slower"
        )

    def _values(self, messages: list[Any], tools: Any, prompt: bool) -> dict[str, Any]:
        return {
            **self.variables,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompt,
        }

    def refused(self, refusal: Refusal) -> RecordError:
        """The error of a record that the template refuses."""
        place = f" (line {refusal.line})" if refusal.line else ""
        error = RecordError(
            f"the template {self._name!r}{place} refuses the conversation: {refusal.message}",
            code="template_refused",
        )
        error.is_general = refusal.is_general
        return error


def _parts(chunks: Sequence[str], marks: Sequence[int | None], count: int) -> list[list[SegmentPiece]] | None:
    """What was written before all messages, for each of them, and behind them; None where that is not its order."""
    parts: list[list[SegmentPiece]] = [[] for _ in range(count + 2)]
    at = 0
    for chunk, mark in zip(chunks, marks, strict=True):
        place = mark + 1 if mark is not None else 0 if at == 0 else count + 1
        if place < at:
            return None
        at = place
        parts[place] += list(chunk.pieces()) if isinstance(chunk, Traced) else [(chunk, None)]
    return parts
