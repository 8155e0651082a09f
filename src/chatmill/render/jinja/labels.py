"""What every stretch of a sequence is: the kind of each piece of its text, and the message it belongs to."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from chatmill.core.kinds import MARK, REPEATED, Part, RoleCode, kind
from chatmill.render.jinja.expressions import TOOLS, Expression, root
from chatmill.render.jinja.rendering import Piece, Rendering
from chatmill.render.jinja.shown import REASONING_MARK, THINKING
from chatmill.render.jinja.turns import Turns

THINKING_ENDS = re.compile(rf"(?s).*(?:{'|'.join(map(re.escape, THINKING.values()))})\s*")
"""Up to and including the last mark that ends reasoning."""


class Span(NamedTuple):
    """Characters of a sequence that are one thing."""

    text: str
    expression: Expression | None
    """None for text of the template."""
    kind: int
    message: int
    """-1 for none."""
    breaks: bool = False
    """Tokens do not cross the beginning of this span: a model starts to write here."""


class Placed(NamedTuple):
    """An assistant message in the text of a sequence."""

    message: int
    begin: int
    stop_begin: int
    end: int
    is_trained: bool


class SequenceLabels:
    """Goes through the text of a sequence once, and says of every stretch what it is."""

    def __init__(
        self,
        turns: Turns,
        rendering: Rendering,
        roles: Sequence[RoleCode],
        placed: Sequence[Placed],
        specials: re.Pattern[str] | None,
        following: int | None = None,
    ) -> None:
        """`placed` are the assistant messages in order; `following` is the message that comes behind the sequence."""
        self._rendering, self._placed, self._following = rendering, placed, following
        self._starts = [piece.start for piece in rendering.pieces]
        self._answers = {one.message: one for one in placed}
        self._ends = {one.end: one.message for one in reversed(placed) if one.end}
        self._turns, self._specials, self._roles = turns, specials, roles

    def spans(self) -> Iterator[Span]:
        """The spans, in order; none is empty."""
        at = 0
        for one in self._placed:
            yield from self._context(at, one.begin, one.message)
            flag = 0 if one.is_trained else REPEATED
            first = True
            for span in (span for span in self._answer(one) if span.text):
                yield span._replace(kind=span.kind | flag, breaks=first and one.is_trained)
                first = False
            at = one.end
        yield from self._context(at, len(self._rendering.text), self._following)

    # ---- answers

    def _answer(self, one: Placed) -> Iterator[Span]:
        role = RoleCode.ASSISTANT
        inside = list(self._between(one.begin, one.stop_begin))
        parts = [_part_said(piece) if piece.owner == one.message else None for piece in inside]
        for number, piece in enumerate(inside):
            text = self._rendering.text[piece.start : piece.stop]
            if piece.expression is not None:
                if piece.owner == one.message:
                    yield Span(text, piece.expression, kind(role, _part_said(piece)), one.message)
                else:
                    yield self._field(piece)
                continue
            before = next((p for p in reversed(parts[:number]) if p is not None), None)
            after = next((p for p in parts[number + 1 :] if p is not None), None)
            for start, stop, part in _marks(text, before, after):
                yield Span(text[start:stop], None, kind(role, part) | MARK, one.message)
        if one.end > one.stop_begin:
            stop_text = self._rendering.text[one.stop_begin : one.end]
            yield Span(stop_text, None, kind(role, Part.TERMINATOR), one.message)

    # ---- everything else

    def _context(self, start: int, stop: int, following: int | None) -> Iterator[Span]:
        """What is between two answers; behind it comes the answer of message `following`, or nothing."""
        pieces = list(self._between(start, stop))
        owner = self._ends.get(start)
        owners = [None if piece.expression is None or self._is_quoted(piece) else piece.owner for piece in pieces]
        for number, piece in enumerate(pieces):
            if piece.expression is None:
                after = next((one for one in owners[number + 1 :] if one is not None), following)
                yield from self._gap(piece.start, piece.stop, owner, after)
                continue
            yield self._field(piece)
            owner = owner if owners[number] is None else owners[number]

    def _is_quoted(self, piece: Piece) -> bool:
        """Whether a text outside of all answers is from one: gpt-oss names a called function again in a header."""
        return piece.owner in self._answers

    def _field(self, piece: Piece) -> Span:
        text = self._rendering.text[piece.start : piece.stop]
        if piece.owner == TOOLS or piece.owner is None:
            return Span(text, piece.expression, kind(RoleCode.SYSTEM, Part.CONTENT), -1)
        role = self._roles[piece.owner]
        flag = REPEATED if role is RoleCode.ASSISTANT else 0
        return Span(text, piece.expression, kind(role, part_of(piece)) | flag, piece.owner)

    def _gap(self, start: int, stop: int, before: int | None, after: int | None) -> Iterator[Span]:
        """Template text between two messages, or inside one."""
        if before is not None and before == after and before != TOOLS:
            yield self._literal(start, stop, kind(self._roles[before], Part.CONTENT) | MARK, before)
            return
        at = start
        answer = None if before is None else self._answers.get(before)
        if answer is not None and answer.end < start:  # its text is quoted in between: nothing here closes it
            before = None
        elif before is None:
            for span in self._opening(start, stop, after):
                at += len(span.text)
                yield span
        elif before == TOOLS:
            for span in self._tools_end(start, stop):
                at += len(span.text)
                yield span
        else:
            closing = min(stop, start + self._closing_size(before, start, stop))
            ended = answer is not None and answer.stop_begin < answer.end
            token_end = None if ended else self._first_special(start, closing)  # an answer has one stop
            role = self._roles[before]
            if token_end:
                yield self._literal(start, token_end, kind(role, Part.TERMINATOR), before)
            yield from self._some(token_end or start, closing, kind(role, Part.SEPARATOR), before)
            at = closing
        if after is None:
            owner = before if before is not None and before != TOOLS else -1
            role = self._roles[owner] if owner >= 0 else RoleCode.NONE
            part = Part.SEPARATOR if owner >= 0 else Part.DOCUMENT
            yield from self._some(at, stop, kind(role, part), owner)
        elif after == TOOLS:
            yield from self._some(at, stop, kind(RoleCode.SYSTEM, Part.CONTENT) | MARK, -1)
        else:
            yield from self._some(at, stop, kind(self._roles[after], Part.HEADER), after)

    def _closing_size(self, owner: int, start: int, stop: int) -> int:
        """How much of a gap behind a message its own ending has too."""
        answer = self._answers.get(owner)
        answered = answer is not None and answer.end == start
        return common(self._rendering.text[start:stop], self._turns.closing(owner, behind_stop=answered))

    def _opening(self, start: int, stop: int, after: int | None) -> Iterator[Span]:
        """Before the first message: what begins the document, then system text that the template writes itself."""
        at = start
        document = kind(RoleCode.NONE, Part.DOCUMENT)
        if after is None or after == TOOLS or self._specials is None:
            return
        first = self._specials.match(self._rendering.text, start, stop)
        bos = self._turns.bos
        if first is not None and bos and first.group() == bos:
            yield self._literal(at, first.end(), document, -1)
            at = first.end()
        pattern = self._turns.stops.pattern()
        ends = [found.end() for found in pattern.finditer(self._rendering.text, at, stop)] if pattern else []
        header = self._rendering.text[ends[-1] : stop].lstrip() if ends else ""
        if header:  # a stop that is itself the header of the first message ends nothing
            yield self._literal(at, stop - len(header), kind(RoleCode.SYSTEM, Part.CONTENT), -1)

    def _tools_end(self, start: int, stop: int) -> Iterator[Span]:
        """Behind tool definitions: more of the system's text, up to the token that ends it."""
        content = kind(RoleCode.SYSTEM, Part.CONTENT) | MARK
        found = self._specials.search(self._rendering.text, start, stop) if self._specials else None
        if found is None:
            yield self._literal(start, stop, content, -1)
            return
        yield from self._some(start, found.start(), content, -1)
        yield self._literal(found.start(), found.end(), kind(RoleCode.SYSTEM, Part.TERMINATOR), -1)
        rest = self._rendering.text[found.end() : stop]
        blank = len(rest) - len(rest.lstrip())
        yield from self._some(found.end(), found.end() + blank, kind(RoleCode.SYSTEM, Part.SEPARATOR), -1)

    def _first_special(self, start: int, stop: int) -> int | None:
        """The end of the first special token in a stretch of template text."""
        found = self._specials.search(self._rendering.text, start, stop) if self._specials else None
        return found.end() if found else None

    def _some(self, start: int, stop: int, code: int, message: int) -> Iterator[Span]:
        if start < stop:
            yield self._literal(start, stop, code, message)

    def _literal(self, start: int, stop: int, code: int, message: int) -> Span:
        return Span(self._rendering.text[start:stop], None, code, message)

    def _between(self, start: int, stop: int) -> Iterator[Piece]:
        """The pieces of a stretch; of a text of the record that is cut, the exact value matters."""
        pieces = self._rendering.pieces
        for number in range(max(0, bisect_left(self._starts, start) - 1), len(pieces)):
            piece = pieces[number]
            if piece.start > stop:
                break
            if piece.start == piece.stop >= start:  # empty, but it says whose place this is
                yield piece
            first, last = max(piece.start, start), min(piece.stop, stop)
            if first >= last:
                continue
            expression = piece.expression
            if expression is not None and last - first < piece.stop - piece.start:
                self._turns.notes.note(("exact", expression), self._rendering.text[piece.start : piece.stop])
                expression = ("apply", "cut", (first - piece.start, last - piece.start, None), expression)
            yield Piece(first, last, expression, piece.owner)


def _marks(text: str, before: Part | None, after: Part | None) -> Iterator[tuple[int, int, Part]]:
    """Whose part template text inside an answer is, between the parts before and after it."""
    part = after or before or Part.CONTENT
    if after is None:
        part = before or Part.CONTENT
    elif Part.REASONING in (before, after) and after is not Part.TOOL_CALL:
        part = Part.REASONING
    elif before is Part.TOOL_CALL:
        part = Part.TOOL_CALL
    thinking = THINKING_ENDS.match(text)
    cut = thinking.end() if thinking and part is not Part.REASONING and before in (None, Part.REASONING) else 0
    if cut:
        yield 0, cut, Part.REASONING
    if cut < len(text):
        yield cut, len(text), part


def _part_said(piece: Piece) -> Part:
    """The part of an answer that a field of its message is: a name that a model has to write is content."""
    part = part_of(piece)
    return Part.CONTENT if part is Part.HEADER else part


def part_of(piece: Piece) -> Part:
    """The part of its message that a field is."""
    assert piece.expression is not None
    path = root(piece.expression)
    if path is None or isinstance(path[0], str):
        return Part.CONTENT
    if path[1] == "call":
        return Part.TOOL_CALL
    if path[1] == "reasoning" or _is_reasoning(piece.expression):
        return Part.REASONING
    return Part.CONTENT if path[1] in ("content", "extra") else Part.HEADER


def _is_reasoning(expression: Expression) -> bool:
    """Whether a text is what stands before the mark that ends the reasoning inside a content."""
    while expression[0] == "apply":
        if expression[1] == "part" and REASONING_MARK.search(str(expression[2][1])):
            return bool(expression[2][3] == 0)
        expression = expression[3]
    return False


def common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    size = min(len(one), len(other))
    return next((i for i in range(size) if one[i] != other[i]), size)
