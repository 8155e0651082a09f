"""What a template wrote for one record, cut by origin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from chatmill.render.jinja.expressions import Expression, Question, evaluate, root
from chatmill.render.jinja.record import RecordView
from chatmill.render.jinja.segments import TOOLS, SegmentPiece

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
        owner = None if expression is None else owner_of(expression)
        pieces.append(Piece(at, at + len(text), expression, owner))
        texts.append(text)
        at += len(text)
    return Rendering("".join(texts), tuple(pieces), questions)


@lru_cache(maxsize=1 << 16)
def owner_of(expression: Expression) -> int | None:
    """The message that a text is from, or `TOOLS`."""
    path = root(expression)
    if path is None:  # lost: whatever it is, it is from the first of its fields
        inner = expression
        while inner[0] == "apply":
            inner = inner[3]
        path = inner[1][0]
    return TOOLS if path[0] == "tools" else int(path[0])
