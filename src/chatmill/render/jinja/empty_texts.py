"""Empty texts of a record between texts of the template that make a control token together."""

from __future__ import annotations

from chatmill.render.jinja.expressions import Expression
from chatmill.render.jinja.questions import HOLE
from chatmill.render.jinja.traced import Atom, Traced, of_atoms, plain_text


def without_empty(text: str) -> str:
    """Return a text without empty texts of the record, where template text around them makes a control token.

    Whether they are empty is noted; what is empty elsewhere stays.
    """
    if type(text) is not Traced or not text._notes.controls:
        return text
    controls, pieces = text._notes.controls, list(text.pieces())
    atoms: list[Atom] = []
    before = ""
    for number, (piece, expression) in enumerate(pieces):
        if expression is None:
            before += piece
        elif before and controls.meet_in(before, _literal_after(pieces, number)):
            if not text._notes.filled(expression, bool(piece)):
                continue
            before = ""
        else:
            before = ""
        atoms.append((len(piece), expression))
    return of_atoms(plain_text(text), tuple(atoms), text._notes)


def _literal_after(pieces: list[tuple[str, Expression | None]], number: int) -> str:
    """Return the template text behind a piece and other texts of the record next to it."""
    literal = ""
    for piece, expression in pieces[number:]:
        if expression is None:
            literal += piece
        elif literal or expression[0] == HOLE:
            break
    return literal
