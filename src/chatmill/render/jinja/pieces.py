"""What a template wrote for one record, cut by origin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from chatmill.render.jinja.expressions import Expression, Question, evaluate, root
from chatmill.render.jinja.paths import owner_of
from chatmill.render.jinja.record import RecordView
from chatmill.render.jinja.traced import atoms_of, plain_text


class Piece(NamedTuple):
    """A stretch of a rendering, of one origin."""

    start: int
    stop: int
    expression: Expression | None
    """None for text that the template wrote."""
    owner: int | None
    """The message the text is from, `TOOLS`, or None."""


class Rendering(NamedTuple):
    """What a template wrote for one record, cut by origin."""

    text: str
    pieces: tuple[Piece, ...]
    """They cover the text; neighbouring texts of the template are one piece."""
    questions: Mapping[Question, Any]
    """What the template asked, with the answers it got."""

    @classmethod
    def of(cls, text: str, questions: Mapping[Question, Any]) -> Rendering:
        """The rendering of a text that knows where it came from."""
        pieces: list[Piece] = []
        at = 0
        for size, expression in atoms_of(text):
            stop = at + size
            if expression is not None:
                pieces.append(Piece(at, stop, expression, owner_of(expression)))
            elif pieces and pieces[-1].expression is None:
                pieces[-1] = Piece(pieces[-1].start, stop, None, None)
            elif size:
                pieces.append(Piece(at, stop, None, None))
            at = stop
        return cls(plain_text(text), tuple(pieces), questions)

    def for_record(self, view: RecordView) -> Rendering:
        """The same rendering of another record that gives the same answers."""
        texts: list[str] = []
        pieces: list[Piece] = []
        at = 0
        for start, stop, expression, owner in self.pieces:
            text = self.text[start:stop]
            if expression is not None and expression[0] != "const" and root(expression) is not None:  # else as it was
                text = evaluate(expression, view.field)
            pieces.append(Piece(at, at + len(text), expression, owner))
            texts.append(text)
            at += len(text)
        return Rendering("".join(texts), tuple(pieces), self.questions)
