"""Renderings put together from segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

from chatmill.render.jinja.expressions import Question, evaluate
from chatmill.render.jinja.pieces import OwnedPiece, Piece, Rendering, owner_of
from chatmill.render.jinja.record import RecordView
from chatmill.render.jinja.segments import PlacedSegment, SegmentBook, Surveyor, Use


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
                    None if e is None else owner_of(e),
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
