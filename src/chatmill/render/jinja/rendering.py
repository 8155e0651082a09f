"""What a template wrote for one record, cut by origin; whether one rendering begins with another."""

from __future__ import annotations

from bisect import bisect_left
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
    """Return the beginning of a rendering, cut in template text."""
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
        notes.filled(expression, start < stop)


def begins_with(longer: Rendering, shorter: Rendering, notes: Notes) -> bool:
    """Return whether one rendering begins with another; what that depends on besides the shape is noted."""
    ours, theirs = (
        [_Left(one.text[p.start : p.stop], p.expression) for p in reversed(one.pieces)] for one in (longer, shorter)
    )
    while theirs:
        a, b = ours[-1] if ours else None, theirs[-1]
        if a is not None and a.expression is not None and a.expression == b.expression and not a.at and not b.at:
            ours.pop()
            theirs.pop()
            continue
        empty = next((side for side, one in ((theirs, b), (ours, a)) if one is not None and not one.text), None)
        if empty is not None:  # later records must agree that it is
            notes.filled(empty.pop().expression, False)
            continue
        if a is None or _differ_at_once(a, b, notes) or _differ_at_once(b, a, notes):
            return False
        if a.expression is not None or b.expression is not None:
            for one in (a, b):
                if one.expression is not None and one.expression[0] != "const":
                    notes.note(("exact", one.expression), one.text)
        size = min(len(a.text) - a.at, len(b.text) - b.at)
        if a.text[a.at : a.at + size] != b.text[b.at : b.at + size]:
            return False
        for side in (ours, theirs):
            one = side.pop()
            if one.at + size < len(one.text):
                side.append(one._replace(at=one.at + size))
    return True


class _Left(NamedTuple):
    """A piece, and how many of its characters are passed."""

    text: str
    expression: Expression | None
    at: int = 0


def _differ_at_once(field: _Left, literal: _Left, notes: Notes) -> bool:
    """Return whether a text of the record begins with another character than the template writes in its place."""
    if field.expression is None or field.expression[0] == "const" or field.at or literal.expression is not None:
        return False
    first = literal.text[literal.at]
    begins = field.text.startswith(first)
    notes.filled(field.expression, True)
    notes.note(("method", field.expression, "startswith", (first,)), begins)
    return not begins


def common_start(text: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(text), len(other)))


def difference(prompt: Rendering, history: Rendering) -> str:
    """Return where the prompt and the history part ways, in the template's own text."""
    at = common_start(prompt.text, history.text)
    sides = [literal_from(one, at)[:24] for one in (prompt, history)]
    said = [repr(side) if side else "a text of the record, or nothing" for side in sides]
    return f"the prompt goes on with {said[0]}, the history with {said[1]}"
