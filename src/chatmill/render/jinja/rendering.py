"""What a template wrote for one record, cut by origin; whether one rendering begins with another."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from chatmill.render.jinja.expressions import Expression, Notes


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


_start = attrgetter("start")


def literal_from(rendering: Rendering, at: int) -> str:
    """Template text from a place on, up to the next text of the record."""
    piece = next((p for p in rendering.pieces if p.expression is None and p.start <= at < p.stop), None)
    return "" if piece is None else rendering.text[at : piece.stop]


def until_character(rendering: Rendering, stop: int) -> Rendering:
    """The beginning of a rendering, cut in template text."""
    count = bisect_left(rendering.pieces, stop, key=_start)
    pieces = rendering.pieces[:count]
    while count < len(rendering.pieces) and rendering.pieces[count].stop <= stop:  # empty ones
        pieces = (*pieces, rendering.pieces[count])
        count += 1
    if pieces and pieces[-1].stop > stop:
        pieces = (*pieces[:-1], pieces[-1]._replace(stop=stop))
    return Rendering(rendering.text[:stop], pieces)


def note_emptiness(rendering: Rendering, notes: Notes) -> None:
    """Note which texts of the record are empty: what else is asked of a rendering depends on that."""
    for start, stop, expression, _ in rendering.pieces:
        if expression is not None and expression[0] != "const":
            notes.note(("filled", expression), start < stop)


def begins_with(longer: Rendering, shorter: Rendering, notes: Notes) -> bool:
    """Whether one rendering begins with another; what that depends on beside the shape is noted."""
    same = _same_pieces(longer, shorter)
    ours, theirs = _Walk(longer, same), _Walk(shorter, same)
    while theirs.piece is not None:
        if ours.piece is not None and ours.is_same_field(theirs):
            ours.step()
            theirs.step()
        elif theirs.passes_nothing(notes) or ours.passes_nothing(notes):
            pass
        elif ours.piece is None or ours.differs_at_once(theirs, notes) or theirs.differs_at_once(ours, notes):
            return False
        else:
            if ours.piece.expression is not None or theirs.piece.expression is not None:
                ours.note_exact(notes)
                theirs.note_exact(notes)
            size = min(ours.left, theirs.left)
            if longer.text[ours.at : ours.at + size] != shorter.text[theirs.at : theirs.at + size]:
                return False
            ours.move(size)
            theirs.move(size)
    return True


def _same_pieces(one: Rendering, other: Rendering) -> int:
    """How many pieces both surely begin with."""
    pairs = enumerate(zip(one.pieces, other.pieces, strict=False))
    count = next((number for number, (a, b) in pairs if a != b), min(len(one.pieces), len(other.pieces)))
    size = one.pieces[count - 1].stop if count else 0
    return count if one.text.startswith(other.text[:size]) else 0


class _Walk:
    """A place in a rendering, moved piece by piece; so many pieces are passed over."""

    def __init__(self, rendering: Rendering, passed: int) -> None:
        self._text = rendering.text
        self._pieces: Iterator[Piece] = islice(rendering.pieces, passed, None)
        self.piece: Piece | None = None
        self.at = 0
        self.step()

    @property
    def left(self) -> int:
        """Characters of the piece that are still ahead."""
        return 0 if self.piece is None else self.piece.stop - self.at

    def is_same_field(self, other: _Walk) -> bool:
        """Whether both are at the beginning of the same text of the record."""
        mine, theirs = self.piece, other.piece
        if mine is None or theirs is None or mine.expression is None or mine.expression != theirs.expression:
            return False
        return self.at == mine.start and other.at == theirs.start

    def passes_nothing(self, notes: Notes) -> bool:
        """Step over a text of the record that is empty; later records must agree that it is."""
        if self.piece is None or self.left:
            return False
        notes.note(("filled", self.piece.expression), False)
        self.step()
        return True

    def differs_at_once(self, other: _Walk, notes: Notes) -> bool:
        """Whether a text of the record begins with another character than the template writes in its place."""
        mine, theirs = self.piece, other.piece
        if mine is None or theirs is None or mine.expression is None or theirs.expression is not None:
            return False
        if self.at != mine.start or mine.expression[0] == "const":
            return False
        begins = self._text[self.at] == other._text[other.at]
        notes.note(("filled", mine.expression), True)
        notes.note(("method", mine.expression, "startswith", (other._text[other.at],)), begins)
        return not begins

    def note_exact(self, notes: Notes) -> None:
        """The value of this piece matters, not only where it is from."""
        piece = self.piece
        if piece is not None and piece.expression is not None and piece.expression[0] != "const":
            notes.note(("exact", piece.expression), self._text[piece.start : piece.stop])

    def step(self) -> None:
        """To the next piece."""
        self.piece = next(self._pieces, None)
        if self.piece is not None:
            self.at = self.piece.start

    def move(self, size: int) -> None:
        """Forward by characters of this piece."""
        self.at += size
        if self.piece is not None and self.at >= self.piece.stop:
            self.step()


def difference(prompt: Rendering, history: Rendering) -> str:
    """Where the prompt and the history part ways, in the template's own text."""
    pairs = enumerate(zip(prompt.text, history.text, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(prompt.text), len(history.text)))
    sides = [literal_from(one, at)[:24] for one in (prompt, history)]
    said = [repr(side) if side else "a text of the record, or nothing" for side in sides]
    return f"the prompt goes on with {said[0]}, the history with {said[1]}"
