"""The rows of a conversation: which turns share a sequence, and what every character of it is.

A turn that later messages change cannot be trained in the rendering of the whole conversation. It gets a row of its
own: its real prompt and its answer. Rows of which one begins with the other are one row.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from chatmill.core.conversation import Role
from chatmill.core.kinds import MARK, REPEATED, Part, RoleCode, kind
from chatmill.errors import RecordError
from chatmill.render.jinja.expressions import Expression, root
from chatmill.render.jinja.options import Expand, TemplateOptions, Unproved
from chatmill.render.jinja.renderings import Piece, Refusal, Rendering
from chatmill.render.jinja.segments import TOOLS
from chatmill.render.jinja.turns import REASONING_MARK, Answer, Turns, not_shown, until_character

THINKING_ENDS = re.compile(r"(?s).*(?:</think>|</seed:think>|\[/THINK\]|<\|END_THINKING\|>|<\|/think\|>)\s*")
"""Up to and including the last mark that ends reasoning."""
REASONS = {
    "no_prompt": "the template cannot write the prompt of this answer",
    "template_refused": "the template refuses the conversation up to this message",
    "prompt_not_in_history": "what a model would be given is not what the template writes as history",
    "no_stop": "no stop token ends this answer",
    "not_shown": "the template leaves something out",
    "origin_lost": "the template changes a text beyond recognition",
    "content_after_result": "the answer goes on behind another message's text",
}
"""Why the mask of an answer cannot be proved, by code."""


class Span(NamedTuple):
    """Characters of a row that are one thing."""

    text: str
    expression: Expression | None
    """None for text of the template."""
    kind: int
    message: int
    """-1 for none."""
    breaks: bool = False
    """Tokens do not cross the beginning of this span: a model starts to write here."""


class Row(NamedTuple):
    """One sequence."""

    spans: tuple[Span, ...]
    trained: tuple[int, ...]
    """Messages whose answers are trained here."""
    appended: int = 0
    """Stops that the template alone would not have written."""
    unstable: tuple[int, ...] = ()
    """Messages that are trained here although later ones change their text."""


class Placed(NamedTuple):
    """An assistant message in the text of a row."""

    message: int
    begin: int
    stop_begin: int
    end: int
    is_trained: bool


class Counts(NamedTuple):
    """What the ledger says about one conversation."""

    turns: int
    """Answers that are trained."""
    unstable: int
    """Those that later messages change."""
    untrained: int
    """Answers that are context because their mask cannot be proved."""
    appended: int
    """Stops in the rows that the template alone would not have written."""


def rows_of(turns: Turns, given: TemplateOptions, specials: re.Pattern[str] | None) -> tuple[list[Row], Counts]:
    """The rows of a conversation; a `RecordError` where one of its answers cannot be proved."""
    whole = turns.whole
    answers = [answer for answer in turns.answers() if turns.messages[answer.message].weight != 0]
    if given.last_turn_only:
        last = max((k for k, message in enumerate(turns.messages) if message.role is Role.USER), default=-1)
        answers = [answer for answer in answers if answer.message > last]
    if given.expand is Expand.LAST:
        answers = answers[-1:]
    hidden = not_shown(whole, turns.view.conversation, range(len(turns.messages)), turns.notes)
    if hidden:
        turns.check()
        raise refusal(Answer(len(turns.messages) - 1, *hidden, is_general=hidden[0] != "origin_lost"))
    unproved = next((answer for answer in answers if answer.reason), None)
    if unproved is not None and given.unproved is Unproved.REFUSE:
        turns.check()
        raise refusal(unproved)
    proved = [answer for answer in answers if not answer.reason]
    stable = [turns.is_stable(answer) for answer in proved]
    writer = _RowWriter(turns, specials)
    if given.expand is Expand.NONE:
        rows = [writer.in_place(proved)]
    else:
        rows = writer.expanded(proved, stable) or [writer.whole([])]
    turns.check()
    appended = sum(row.appended for row in rows)
    return rows, Counts(len(proved), stable.count(False), len(answers) - len(proved), appended)


def prompt_row(turns: Turns, specials: re.Pattern[str] | None) -> Row:
    """All messages and the generation prompt, nothing of which is trained."""
    prompt = turns.prompt(len(turns.messages))
    if isinstance(prompt, Refusal):
        raise RecordError(f"the template cannot write a prompt here: {prompt.message}", code="no_prompt")
    return _RowWriter(turns, specials).prompt(prompt)


def refusal(answer: Answer) -> RecordError:
    """The error of a record that has an answer without a proof."""
    error = RecordError(
        f"{REASONS[answer.reason]}: {answer.detail}. Another template or option may prove it; `unproved: untrained` "
        "keeps the record and trains nothing of such a turn",
        code=answer.reason,
        path=answer.detail if answer.reason == "not_shown" else f"messages[{answer.message}]",
    )
    error.is_general = answer.is_general
    return error


class _RowWriter:
    """Writes the rows of one conversation."""

    def __init__(self, turns: Turns, specials: re.Pattern[str] | None) -> None:
        self._turns, self._specials = turns, specials
        self._roles = [RoleCode[message.role.name] for message in turns.messages]

    def whole(self, trained: Sequence[Answer]) -> Row:
        """F with these answers trained."""
        whole = self._turns.whole
        placed = []
        appended = 0
        for answer in trained:
            begin = answer.stop_begin
            found = self._stop_at(whole.text, begin)
            placed.append(Placed(answer.message, answer.begin, begin, begin + len(found or answer.stop), True))
            appended += found is None
        if not appended:
            return self._row(whole, placed)
        last = trained[-1]  # only the last message of all can lack its stop
        return self._row(_with_stop(whole, last.stop), placed, 1)

    def _stop_at(self, text: str, at: int) -> str | None:
        pattern = self._turns.stops.pattern()
        found = pattern.match(text, at) if pattern else None
        return found.group() if found else None

    def alone(self, trained: Sequence[Answer]) -> Row:
        """The prompt of the last of these answers and the answer; those before it are trained in the prompt."""
        last = trained[-1]
        ended = self._turns.until(last.message)
        assert isinstance(ended, Rendering)
        cut = _with_stop(ended, last.stop) if last.appended else until_character(ended, last.end)
        placed = []
        for answer in trained:
            found = self._stop_at(cut.text, answer.stop_begin) or answer.stop
            placed.append(Placed(answer.message, answer.begin, answer.stop_begin, answer.stop_begin + len(found), True))
        return self._row(cut, placed, int(last.appended))

    def expanded(self, proved: Sequence[Answer], stable: Sequence[bool]) -> list[Row]:
        """As few rows as train every answer behind its own prompt: one for each answer that no other row extends."""
        rows: list[Row] = []
        left = [answer for answer, is_stable in zip(proved, stable, strict=True) if not is_stable]
        while left:
            last = left.pop()
            ended = self._turns.until(last.message)
            assert isinstance(ended, Rendering)
            inside = [one for one in left if self._turns.has(ended, one)]
            left = [one for one in left if one not in inside]
            rows.append(self.alone([*inside, last]))
        rows.reverse()
        shared = [answer for answer, is_stable in zip(proved, stable, strict=True) if is_stable]
        return [*rows, self.whole(shared)] if shared else rows

    def in_place(self, proved: Sequence[Answer]) -> Row:
        """F with every answer trained where it is, as far as F has it."""
        whole = self._turns.whole
        placed, unstable = [], []
        for answer in proved:
            if self._turns.is_stable(answer):
                found = self._stop_at(whole.text, answer.stop_begin)
                end = answer.stop_begin + len(found or "")
                placed.append(Placed(answer.message, answer.begin, answer.stop_begin, end, True))
            else:
                found_place = self._context_place(whole, answer.message)
                if found_place is not None:
                    placed.append(found_place._replace(is_trained=True))
                    unstable.append(answer.message)
        last = proved[-1] if proved else None
        if last is not None and last.appended and last.message == len(self._turns.messages) - 1:
            end = placed[-1].stop_begin + len(last.stop)
            row = self._row(_with_stop(whole, last.stop), [*placed[:-1], placed[-1]._replace(end=end)], 1)
        else:
            row = self._row(whole, placed)
        return row._replace(unstable=tuple(unstable))

    def _context_place(self, rendering: Rendering, index: int) -> Placed | None:
        """Where an assistant message is in a row that does not train it as its prompt would have it."""
        own = [piece for piece in rendering.pieces if piece.owner == index]
        if not own:
            return None
        first, last = own[0].start, own[-1].stop
        before = max((p.stop for p in rendering.pieces if p.expression is not None and p.stop <= first), default=0)
        gap = rendering.text[before:first]
        opening = self._turns.opening(index)
        begin = before + (self._closing(rendering, before, first) if opening is None else _common(gap, opening))
        stop = self._turns.stops.pattern()
        after = next((p.start for p in rendering.pieces if p.owner not in (None, index) and p.start >= last), None)
        limit = len(rendering.text) if after is None else after
        found = stop.search(rendering.text, last, limit) if stop else None
        if found is None:
            return Placed(index, min(begin, first), last, last, False)
        return Placed(index, min(begin, first), found.start(), found.end(), False)

    def _is_spoken(self, piece: Piece) -> bool:
        """Whether a text is the content or reasoning of an assistant: answers end otherwise where there is none."""
        if piece.owner is None or piece.owner < 0 or self._roles[piece.owner] is not RoleCode.ASSISTANT:
            return False
        return _part_of(piece) in (Part.CONTENT, Part.REASONING)

    def _closing(self, rendering: Rendering, start: int, stop: int) -> int:
        """Characters behind a message that still belong to it: those that its own ending also has."""
        owner = next(
            (p.owner for p in reversed(rendering.pieces) if p.expression is not None and p.stop <= start), None
        )
        if owner is None or owner == TOOLS:
            return 0
        return _common(rendering.text[start:stop], self._turns.closing(owner))

    def prompt(self, rendering: Rendering) -> Row:
        """P of a message that is still to come."""
        self._roles = [*self._roles, RoleCode.ASSISTANT]
        return self._row(rendering, [], following=len(self._roles) - 1)

    def _row(
        self, rendering: Rendering, placed: Sequence[Placed], appended: int = 0, following: int | None = None
    ) -> Row:
        """Label a text; a text of the record that is empty here must be empty in every record of the plan."""
        for piece in rendering.pieces:
            if piece.expression is None or piece.expression[0] in ("const", "lost"):
                continue
            if piece.start == piece.stop or self._is_spoken(piece):
                self._turns.notes.note(("filled", piece.expression), piece.start < piece.stop)
        known = {one.message: one for one in placed}
        for index, role in enumerate(self._roles[: len(self._turns.messages)]):
            if role is RoleCode.ASSISTANT and index not in known:
                found = self._context_place(rendering, index)
                if found is not None:
                    known[index] = found
        ordered = sorted(known.values(), key=lambda one: one.begin)
        spans = [span for span in _Labels(self, rendering, ordered, following).spans() if span.text]
        return Row(tuple(spans), tuple(one.message for one in placed if one.is_trained), appended)


class _Labels:
    """Goes through the text of a row once, and says of every stretch what it is."""

    def __init__(
        self, writer: _RowWriter, rendering: Rendering, placed: Sequence[Placed], following: int | None = None
    ) -> None:
        self._rendering, self._placed, self._following = rendering, placed, following
        self._starts = [piece.start for piece in rendering.pieces]
        self._answers = {one.message: one for one in placed}
        self._ends = {one.end: one.message for one in reversed(placed) if one.end}
        self._turns, self._specials, self._roles = writer._turns, writer._specials, writer._roles

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
        parts = [_part_of(piece) if piece.owner == one.message else None for piece in inside]
        for number, piece in enumerate(inside):
            text = self._rendering.text[piece.start : piece.stop]
            if piece.expression is not None:
                if piece.owner == one.message:
                    yield Span(text, piece.expression, kind(role, parts[number] or Part.CONTENT), one.message)
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
        owner = self._owner_before(start)
        for number, piece in enumerate(pieces):
            if piece.expression is not None:
                yield self._field(piece)
                owner = piece.owner
                continue
            after = next((p.owner for p in pieces[number + 1 :] if p.expression is not None), following)
            yield from self._gap(piece.start, piece.stop, owner, after)

    def _owner_before(self, start: int) -> int | None:
        """Whose text ends at a place: the answer that ends there, or the message of the last field before."""
        ending = self._ends.get(start)
        if ending is not None:
            return ending
        pieces = self._rendering.pieces
        for number in range(bisect_right(self._starts, start) - 1, -1, -1):
            if pieces[number].expression is not None and pieces[number].stop <= start:
                return pieces[number].owner
        return None

    def _field(self, piece: Piece) -> Span:
        text = self._rendering.text[piece.start : piece.stop]
        if piece.owner == TOOLS or piece.owner is None:
            return Span(text, piece.expression, kind(RoleCode.SYSTEM, Part.CONTENT), -1)
        role = self._roles[piece.owner]
        flag = REPEATED if role is RoleCode.ASSISTANT else 0
        return Span(text, piece.expression, kind(role, _part_of(piece)) | flag, piece.owner)

    def _gap(self, start: int, stop: int, before: int | None, after: int | None) -> Iterator[Span]:
        """Template text between two messages, or inside one."""
        if before is not None and before == after and before != TOOLS:
            flag = REPEATED if self._roles[before] is RoleCode.ASSISTANT else 0  # gpt-oss names a call again later
            yield self._literal(start, stop, kind(self._roles[before], Part.CONTENT) | MARK | flag, before)
            return
        at = start
        if before is None:
            for span in self._opening(start, stop, after):
                at += len(span.text)
                yield span
        elif before == TOOLS:
            for span in self._tools_end(start, stop):
                at += len(span.text)
                yield span
        else:
            closing = min(stop, start + self._closing_size(before, start, stop))
            answer = self._answers.get(before)
            ended = answer is not None and answer.stop_begin < answer.end == start
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
        return _common(self._rendering.text[start:stop], self._turns.closing(owner, behind_stop=answered))

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


def _part_of(piece: Piece) -> Part:
    """The part of its message that a field is."""
    assert piece.expression is not None
    path = root(piece.expression)
    if path is None or path[0] == "tools":
        return Part.CONTENT
    if path[1] == "call":
        return Part.TOOL_CALL
    if path[1] == "reasoning" or _is_reasoning(piece.expression):
        return Part.REASONING
    return Part.CONTENT if path[1] == "content" else Part.HEADER


def _is_reasoning(expression: Expression) -> bool:
    """Whether a text is what stands before the mark that ends the reasoning inside a content."""
    while expression[0] == "apply":
        if expression[1] == "part" and REASONING_MARK.search(str(expression[2][1])):
            return bool(expression[2][3] == 0)
        expression = expression[3]
    return False


def _with_stop(rendering: Rendering, stop: str) -> Rendering:
    """A rendering with a stop token behind it."""
    size = len(rendering.text)
    piece = Piece(size, size + len(stop), None, None)
    return Rendering(rendering.text + stop, (*rendering.pieces, piece), rendering.questions)


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    size = min(len(one), len(other))
    return next((i for i in range(size) if one[i] != other[i]), size)
