"""What every stretch of a segment is: the kind of each piece of its text, and the message it belongs to.

A literal that is written in a message's turn is that message's: its header before its first text, what closes it after
its last. What is trained is known from P(i) and A(i), as places in the segment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from chatmill.core.kinds import MARK, REPEATED, Part, RoleCode, kind
from chatmill.render.jinja.expressions import Expression, root
from chatmill.render.jinja.rendering import common_start
from chatmill.render.jinja.stops import REASONING_MARK, THINKING
from chatmill.render.jinja.tries import Part as SegmentPart

THINKING_ENDS = re.compile(rf"(?s).*(?:{'|'.join(map(re.escape, THINKING.values()))})\s*")
"""Up to and including the last mark that ends reasoning."""
NOBODY = -(1 << 30)
"""The owner of text that is no message's; owners are counted from the turn's own message."""
TOOLS = NOBODY + 1
Spot = tuple[int, int]
"""A part of a segment, and characters into it."""


class Span(NamedTuple):
    """Characters of a document that are one thing."""

    text: str
    expression: Expression | None
    """None for text of the template."""
    kind: int
    message: int
    """Counted from the turn's own message; `NOBODY` for none."""
    breaks: bool = False
    """Tokens do not cross the beginning of this span: a model starts to write here."""


class Mark(NamedTuple):
    """An answer in a segment."""

    message: int
    begin: Spot | None
    """None where it began in a segment before."""
    stop: Spot | None
    end: Spot | None
    """None where it goes on in the next one."""
    is_trained: bool = True
    is_cut: bool = False
    """Whether the document ends with it."""


class Shred(NamedTuple):
    """A part of a segment, or a stretch of a literal."""

    text: str
    expression: Expression | None
    mark: Mark | None
    """The answer that it is in."""
    is_stop: bool
    begins: bool
    owner: int


class Said(NamedTuple):
    """What an assistant message says, by its fields of Harmony."""

    part: Part = Part.CONTENT
    is_continued: bool = False
    """Whether the assistant's turn goes on after it: what ends the message is no stop."""


class TokenTexts(NamedTuple):
    """The tokens that labels look for in template text."""

    specials: re.Pattern[str]
    stops: re.Pattern[str]
    ends: re.Pattern[str]
    """Stops, and what history has in their place."""
    bos: str | None
    document_end: str | None
    """The token after a whole conversation."""


class Segment(NamedTuple):
    """A segment, and what its labels depend on next to it."""

    parts: tuple[SegmentPart, ...]
    is_root: bool
    is_first: bool
    """Whether no text of a message comes before it."""
    codes: tuple[tuple[int, RoleCode], ...]
    """The roles of the messages that its texts are from, counted from the turn's own."""
    marks: tuple[Mark, ...] = ()
    openings: tuple[tuple[int, str | None, str], ...] = ()
    """Of assistant messages that have no mark: what comes before their answers, and their generation prompts."""
    changed: frozenset[int] = frozenset()
    """Those of them that are trained here, although later messages have changed them."""
    is_ended_next: bool = False
    """Whether the next segment begins with what ends an answer."""
    harmony: tuple[tuple[int, Said], ...] = ()
    """What assistant messages with fields of Harmony say."""


def spans_of(segment: Segment, tokens: TokenTexts) -> tuple[Span, ...]:
    """Return the spans of a segment, in order."""
    return tuple(span for span in _Labeller(segment, tokens).spans() if span.text or span.expression is not None)


class _Labeller:
    """Labels one segment."""

    def __init__(self, segment: Segment, tokens: TokenTexts) -> None:
        self._segment, self._tokens = segment, tokens
        self._marks = (*segment.marks, *_context_marks(segment, tokens))
        self._shreds = list(_shredded(segment.parts, self._marks))
        roles = dict.fromkeys((mark.message for mark in segment.marks), RoleCode.ASSISTANT)
        self._roles, self._said = roles | dict(segment.codes), dict(segment.harmony)

    def spans(self) -> Iterator[Span]:
        """Yield the spans, some of which may be empty."""
        shreds, speakers = self._shreds, [self._speaker(shred) for shred in self._shreds]
        for number, shred in enumerate(shreds):
            mark = shred.mark
            if mark is not None:
                yield from self._answer(number, shred, mark)
            elif shred.expression is not None and (
                speakers[number] != NOBODY or shred.owner == 0 or self._segment.is_root
            ):
                yield self._field(shred, shred.expression)
            else:
                before = next((speaker for speaker in reversed(speakers[:number]) if speaker != NOBODY), None)
                after = next((speaker for speaker in speakers[number + 1 :] if speaker != NOBODY), None)
                if shred.expression is None:
                    yield from self._gap(number, shred.text, before, after)
                else:
                    yield self._quoted(number, shred, shred.expression, before, after)
            is_next_outside = number + 1 < len(shreds) and shreds[number + 1].mark is None
            if mark is not None and mark.is_cut and is_next_outside and (shred.is_stop or not mark.end):
                return

    def _speaker(self, shred: Shred) -> int:
        """Return whose a shred is; text of an answer outside of it is quoted, and says nothing about its place."""
        if shred.mark is not None:
            return shred.mark.message
        is_said = any(mark.message == shred.owner for mark in self._marks)
        is_quoted = is_said or (not self._segment.is_root and shred.owner not in (0, TOOLS))
        return NOBODY if is_quoted and self._roles.get(shred.owner) is RoleCode.ASSISTANT else shred.owner

    def _answer(self, number: int, shred: Shred, mark: Mark) -> Iterator[Span]:
        role, flag, said = RoleCode.ASSISTANT, 0 if mark.is_trained else REPEATED, self._said.get(mark.message, Said())
        breaks, text = shred.begins and mark.is_trained, shred.text
        if shred.expression is not None and shred.owner != mark.message:
            yield self._field(shred, shred.expression)._replace(breaks=breaks)
        elif shred.expression is not None:
            code = kind(role, _part_said(shred.expression, said)) | flag
            yield Span(text, shred.expression, code, mark.message, breaks)
        elif shred.is_stop:
            yield Span(text, None, _closing_kind(role, said) | flag, mark.message, breaks)
        else:
            before, after = (
                next((part for part in map(partial(_part_in, mark, said), shreds) if part is not None), None)
                for shreds in (reversed(self._shreds[:number]), self._shreds[number + 1 :])
            )
            ends = self._tokens.ends.finditer(text) if before and after else ()
            cut = max((match.end() for match in ends), default=0)
            if cut:  # Harmony ends each part as it ends a message; what is after belongs to the next part
                ending = before if before in (Part.REASONING, Part.CONTENT) else Part.TERMINATOR
                yield Span(text[:cut], None, kind(role, ending) | MARK | flag, mark.message, breaks)
                text, before, breaks = text[cut:], None, False
            for start, stop, part in _marks(text, before, after):
                yield Span(text[start:stop], None, kind(role, part) | MARK | flag, mark.message, breaks and start == 0)

    def _field(self, shred: Shred, expression: Expression) -> Span:
        if shred.owner == TOOLS:
            return Span(shred.text, expression, kind(RoleCode.SYSTEM, Part.CONTENT), NOBODY)
        code = _context_kind(self._roles[shred.owner], part_of(expression))
        return Span(shred.text, expression, code, shred.owner)

    def _quoted(self, number: int, shred: Shred, expression: Expression, before: int | None, after: int | None) -> Span:
        """Text of an answer in the turn of another message, as the name of a call before its result: that message's."""
        if after is not None and after != before:
            return self._header(shred.text, after)._replace(expression=expression)
        if before is None or before == TOOLS:
            return self._field(shred, expression)
        return Span(shred.text, expression, self._inside(number, before), before)

    def _gap(self, number: int, text: str, before: int | None, after: int | None) -> Iterator[Span]:
        """Template text that is in no answer."""
        end = self._tokens.document_end
        if after is None and end and text.endswith(end) and not self._segment.is_first:
            yield from self._gap(number, text[: -len(end)], before, after)
            yield Span(end, None, kind(RoleCode.NONE, Part.DOCUMENT), NOBODY)
        elif before is None:
            yield from self._before_texts(text, after)
        elif before == TOOLS:
            yield from self._behind_tools(text, after)
        elif before == after and not self._is_between_turns(number):
            yield Span(text, None, self._inside(number, before), before)
        else:
            yield from self._closing(number, text, before, after)

    def _closing(self, number: int, text: str, before: int, after: int | None) -> Iterator[Span]:
        """After a message: what ends it, unless that was in its answer; then blanks, and the header of the next."""
        role, specials = self._roles[before], self._tokens.specials
        is_said = any(mark.message == before for mark in self._marks)
        is_ended = is_said and any(shred.is_stop for shred in self._shreds[:number])
        match = None if is_ended else specials.search(text)
        at = 0 if match is None else match.end()
        flag = REPEATED if role is RoleCode.ASSISTANT else 0
        yield Span(text[:at], None, _closing_kind(role, self._said.get(before, Said())) | flag, before)
        blank = len(text) if after is None else len(text) - len(text[at:].lstrip())
        yield Span(text[at:blank], None, kind(role, Part.SEPARATOR), before)
        if after is not None:
            yield self._header(text[blank:], after)

    def _is_between_turns(self, number: int) -> bool:
        """Return whether a message stopped right before a shred, and goes on after it: its turn is opened again."""
        before, after = self._shreds[number - 1], self._shreds[number + 1]
        return before.is_stop and after.begins

    def _inside(self, number: int, owner: int) -> int:
        """Return the kind of what a template writes between two texts of a message."""
        if self._is_in_header(number, owner):
            return kind(self._roles[owner], Part.HEADER)
        return _context_kind(self._roles[owner], Part.CONTENT) | MARK

    def _is_in_header(self, number: int, owner: int) -> bool:
        """Return whether the last text of a message before a shred is part of its header."""
        last = next((shred for shred in self._shreds[number::-1] if shred.mark is None and shred.owner == owner), None)
        return last is not None and last.expression is not None and part_of(last.expression) is Part.HEADER

    def _before_texts(self, text: str, after: int | None) -> Iterator[Span]:
        """Before the first text of a segment: what begins the document, system text of the template, then a header."""
        at, segment, tokens = 0, self._segment, self._tokens
        if segment.is_first:
            match = tokens.specials.match(text)
            if match is not None and match.group() == tokens.bos:
                at = match.end()
                yield Span(text[:at], None, kind(RoleCode.NONE, Part.DOCUMENT), NOBODY)
            ends = [one.end() for one in tokens.stops.finditer(text, at)]
            header = text[ends[-1] :].lstrip() if ends else ""
            if after is not None and after != TOOLS and header:  # a stop that is itself the first header ends nothing
                yield Span(text[at : len(text) - len(header)], None, kind(RoleCode.SYSTEM, Part.CONTENT), NOBODY)
                at = len(text) - len(header)
        rest = text[at:]
        if after is not None:
            yield self._header(rest, after)
        elif segment.is_root and segment.is_first:
            says = tokens.stops.search(rest) or tokens.specials.sub("", rest).strip()
            code = kind(RoleCode.SYSTEM, Part.CONTENT) if says else kind(RoleCode.NONE, Part.DOCUMENT)
            yield Span(rest, None, code, NOBODY)
        else:  # after all messages, it is the last one's
            part = Part.SEPARATOR if segment.is_root else Part.HEADER
            yield Span(rest, None, kind(self._roles.get(0, RoleCode.NONE), part), 0)

    def _behind_tools(self, text: str, after: int | None) -> Iterator[Span]:
        """After tool definitions: more of the system's text, up to the token that ends it."""
        content = kind(RoleCode.SYSTEM, Part.CONTENT) | MARK
        match = self._tokens.specials.search(text) if after != TOOLS else None
        if match is None:
            yield Span(text, None, content, NOBODY)
            return
        yield Span(text[: match.start()], None, content, NOBODY)
        yield Span(match.group(), None, kind(RoleCode.SYSTEM, Part.TERMINATOR), NOBODY)
        rest = text[match.end() :].lstrip()
        blank = text[match.end() : len(text) - len(rest)]
        yield Span(blank, None, kind(RoleCode.SYSTEM, Part.SEPARATOR), NOBODY)
        yield Span(rest, None, content, NOBODY) if after is None else self._header(rest, after)

    def _header(self, text: str, after: int) -> Span:
        if after == TOOLS:
            return Span(text, None, kind(RoleCode.SYSTEM, Part.CONTENT) | MARK, NOBODY)
        return Span(text, None, kind(self._roles[after], Part.HEADER), after)


def _context_kind(role: RoleCode, part: Part) -> int:
    """Return the kind of text that is not trained: answers are repeated."""
    return kind(role, part) | (REPEATED if role is RoleCode.ASSISTANT else 0)


def _shredded(parts: Sequence[SegmentPart], marks: Sequence[Mark]) -> Iterator[Shred]:
    """Cut literals where answers and their stops begin and end."""
    current = next((mark for mark in marks if mark.begin is None), None)
    is_stop, begins = False, False
    for number, (literal, expression) in enumerate(parts):
        text, at = literal or "", 0
        cuts: list[tuple[int, int, Mark]] = []
        for mark in marks:
            for order, spot in enumerate((mark.end, mark.begin, mark.stop)):
                if spot is not None and spot[0] == number:
                    cuts.append((spot[1], order, mark))
        for offset, order, mark in sorted(cuts, key=lambda cut: cut[:2]):
            if offset > at:
                yield Shred(text[at:offset], None, current, is_stop, begins, NOBODY)
                begins, at = False, offset
            if order == 0:
                current, is_stop = None, False
            elif order == 1:
                current, is_stop, begins = mark, False, True
            else:
                is_stop = True
        if expression is not None:
            yield Shred(text, expression, current, False, begins, _owner(expression))
            begins = False
        elif at < len(text):
            yield Shred(text[at:], None, current, is_stop, begins, NOBODY)
            begins = False


def _owner(expression: Expression) -> int:
    owner = root(expression)[0]
    return owner if type(owner) is int else TOOLS


def _context_marks(segment: Segment, tokens: TokenTexts) -> Iterator[Mark]:
    """Yield the answers of assistant messages that are not trained here, as their texts and stops show them."""
    owners = [NOBODY if e is None else _owner(e) for _, e in segment.parts]
    for owner, header, opening in segment.openings:
        parts = [number for number, part_owner in enumerate(owners) if part_owner == owner]
        if not parts or (owner != 0 and not segment.is_root):  # another turn quotes it
            continue
        first: int | None = parts[0]
        begin: Spot = (parts[0], 0)
        if parts[0] and owners[parts[0] - 1] == NOBODY:
            before = segment.parts[parts[0] - 1][0] or ""
            begin = (parts[0] - 1, _header_size(before, header))
        while first is not None:
            last = first
            for number in range(first, len(owners)):
                literal = segment.parts[number][0] if owners[number] == NOBODY else None
                if owners[number] == owner:
                    last = number
                elif literal is None or tokens.stops.search(literal):
                    break
            stop, end = _closing(segment, last, owners, tokens)
            yield Mark(owner, begin, stop, end, is_trained=owner in segment.changed)
            first = next((number for number in parts if number > last), None)
            again = None if first is None or stop is None or end is None else _opened_again(segment, end, opening)
            if again is None:
                break
            begin = again


def _opened_again(segment: Segment, end: Spot, opening: str) -> Spot | None:
    """Return where a message goes on whose turn the template opens again after a stop; None where it does not."""
    literal, opening = segment.parts[end[0]][0] or "", opening.lstrip()
    blank = len(literal) - len(literal[end[1] :].lstrip())
    return (end[0], blank + len(opening)) if opening and literal.startswith(opening, blank) else None


def _header_size(literal: str, header: str | None) -> int:
    """Return how much of the template's text before an assistant's text opens the message."""
    if header is None:
        return len(literal)
    at = literal.rfind(header) if header else 0
    if at >= 0:
        return at + len(header)
    return common_start(literal, header)


def _closing(segment: Segment, last: int, owners: Sequence[int], tokens: TokenTexts) -> tuple[Spot | None, Spot | None]:
    """Return where the stop of a message is, and where the message ends; None where it goes on in the next segment."""
    if last + 1 < len(owners) and owners[last + 1] == NOBODY:
        match = tokens.ends.search(segment.parts[last + 1][0] or "")
        if match is not None:
            return (last + 1, match.start()), (last + 1, match.end())
    if segment.is_ended_next and last + 2 >= len(owners):
        return None, None
    return None, (last + 1, 0)


def _closing_kind(role: RoleCode, said: Said) -> int:
    """Return what the end of a message is: no stop if the assistant's turn goes on."""
    return kind(role, said.part) | MARK if said.is_continued else kind(role, Part.TERMINATOR)


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
    yield 0, cut, Part.REASONING
    yield cut, len(text), part


def _part_in(mark: Mark, said: Said, shred: Shred) -> Part | None:
    """Return the part that a shred says of an answer; None if it is none of its texts."""
    if shred.mark is not mark or shred.expression is None or shred.owner != mark.message:
        return None
    return _part_said(shred.expression, said)


def _part_said(expression: Expression, said: Said) -> Part:
    """The part of an answer that a field of its message is: a name that a model has to write is said like the rest."""
    part = part_of(expression)
    return said.part if part in (Part.CONTENT, Part.HEADER) else part


def part_of(expression: Expression) -> Part:
    """Return the part of its message that a field is."""
    path = root(expression)
    if isinstance(path[0], str):
        return Part.CONTENT
    if path[1] == "call":
        return Part.TOOL_CALL
    if path[1] == "reasoning" or _is_reasoning(expression):
        return Part.REASONING
    return Part.CONTENT if path[1] in ("content", "parts", "extra") else Part.HEADER


def _is_reasoning(expression: Expression) -> bool:
    """Return whether a text is what stands before the mark that ends the reasoning inside a content."""
    while expression[0] == "apply":
        if expression[1] == "part" and REASONING_MARK.search(str(expression[2][1])):
            return bool(expression[2][3] == 0)
        expression = expression[3]
    return False
