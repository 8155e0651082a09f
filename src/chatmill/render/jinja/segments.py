"""What is known of the segments of a template: whose texts they have, and where these are in a rendering."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from chatmill.render.jinja.expressions import Expression, evaluate, owner_of, root
from chatmill.render.jinja.questions import moved, shifted
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.rendering import Piece, Rendering
from chatmill.render.jinja.tries import Output, Part, SegmentFacts


class Cursor(NamedTuple):
    """A place in a list of outputs: before a character of a literal, or before a part."""

    entry: int
    part: int
    offset: int


class Window(NamedTuple):
    """Some outputs of a conversation as a rendering, and where their parts are in it."""

    rendering: Rendering
    parts: list[tuple[int, int, int, int]]
    """Start, stop, entry and part."""

    def place(self, at: int) -> Cursor:
        """Return the place of a character; of an empty text at that place, the place before it.

        The end of all is in the output after the last: how long a text is differs between records.
        """
        for start, stop, entry, part in self.parts:
            if start <= at < stop or start == at:
                return Cursor(entry, part, at - start)
        return Cursor(self.parts[-1][2] + 1, 0, 0)

    def at(self, place: Cursor) -> int:
        """Return the character at a place."""
        if place.entry > self.parts[-1][2]:
            return len(self.rendering.text)
        return next(start for start, _, entry, part in self.parts if (entry, part) == place[:2]) + place.offset

    def place_behind(self, at: int) -> Cursor:
        """Return the place after a character."""
        for start, stop, entry, part in self.parts:
            if start < at <= stop:
                return Cursor(entry, part, at - start)
        raise IndexError(at)


class Segments:
    """All segments of one template."""

    def __init__(self) -> None:
        """Begin without any."""
        self.facts: list[SegmentFacts] = []
        """All segments so far, by their numbers."""
        self._numbers: dict[tuple[Part, ...], int] = {}

    def number(self, parts: tuple[Part, ...]) -> int:
        """Return the number of a segment."""
        number = self._numbers.setdefault(parts, len(self.facts))
        if number == len(self.facts):
            self.facts.append(SegmentFacts(parts))
        return number

    def located(self, outputs: list[Output], count: int) -> list[Output]:
        """Return outputs whose segments name messages by their distance alone."""
        facts = self.facts
        return [
            output if not facts[output[0]].is_counted else (self.placed(output[0], output[1], count), output[1])
            for output in outputs
        ]

    def placed(self, number: int, base: int, count: int) -> int:
        """Return a segment that names messages from either end as one that names them by their distance."""

        def place(expression: Expression | None) -> Expression | None:
            if expression is None or type(root(expression)[0]) is not tuple:
                return expression
            end, distance = root(expression)[0]
            return moved(expression, distance - base + (count if end == "last" else 0))

        return self.number(tuple((literal, place(e)) for literal, e in self.facts[number].parts))

    def window(self, outputs: Sequence[Output], first: int, view: RecordView) -> Window:
        """Return outputs as a rendering; their entries are counted from `first`."""
        texts: list[str] = []
        pieces: list[Piece] = []
        parts: list[tuple[int, int, int, int]] = []
        at = 0
        for entry, (number, base) in enumerate(outputs, first):
            for part, (literal, relative) in enumerate(self.facts[number].parts):
                expression = None if relative is None else shifted(relative, base)
                text = literal if literal is not None else evaluate(expression, view.field)  # type: ignore[arg-type]
                stop = at + len(text)
                if expression is not None:
                    pieces.append(Piece(at, stop, expression, owner_of(expression)))
                elif pieces and pieces[-1].expression is None:
                    pieces[-1] = pieces[-1]._replace(stop=stop)
                else:
                    pieces.append(Piece(at, stop, None, None))
                parts.append((at, stop, entry, part))
                texts.append(text)
                at = stop
        return Window(Rendering("".join(texts), tuple(pieces)), parts)

    def closing(self, outputs: Sequence[Output]) -> tuple[Expression | None, str]:
        """Return the last text of the record in outputs, and what the template writes after it."""
        literals: list[str] = []
        for number, base in reversed(outputs):
            for literal, expression in reversed(self.facts[number].parts):
                if expression is not None:
                    return shifted(expression, base), "".join(reversed(literals))
                literals.append(literal or "")
        return None, "".join(reversed(literals))
