"""The sequences of a conversation: which turns share a sequence, and what every character of it is.

A turn that later messages change cannot be trained in the rendering of the whole conversation. It gets a sequence of
its own: its real prompt and its answer. Sequences of which one begins with the other are one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from chatmill.core.conversation import Role
from chatmill.core.kinds import Part, RoleCode
from chatmill.errors import RecordError
from chatmill.render.jinja.expressions import TOOLS
from chatmill.render.jinja.labels import Placed, SequenceLabels, Span, common, part_of
from chatmill.render.jinja.options import Expand, TemplateOptions, Unproved
from chatmill.render.jinja.renderer import Refusal
from chatmill.render.jinja.rendering import Piece, Rendering, literal_from, until_character
from chatmill.render.jinja.shown import not_shown
from chatmill.render.jinja.turns import Answer, Turns

REASONS = {
    "no_prompt": "the template cannot write the prompt of this answer",
    "template_refused": "the template refuses the conversation up to this message",
    "prompt_not_in_history": "what a model would be given is not what the template writes as history",
    "reasoning_not_closed": "the prompt opens reasoning that the answer never closes",
    "goes_on_after_stop": "a stop comes before the end of the message, and what is behind it has no prompt of its own",
    "no_stop": "no stop token ends this answer",
    "not_shown": "the template leaves something out",
    "origin_lost": "the template changes a text beyond recognition",
    "content_after_result": "the answer goes on behind another message's text",
}
"""Why the mask of an answer cannot be proved, by code."""


class TextSequence(NamedTuple):
    """One sequence."""

    spans: tuple[Span, ...]
    trained: tuple[int, ...]
    """Messages whose answers are trained here."""
    appended: int = 0
    """Stops that the template alone would not have written."""
    unstable: tuple[int, ...] = ()
    """Messages that are trained here although later ones change their text."""


class Counts(NamedTuple):
    """What the ledger says about one conversation."""

    turns: int
    """Answers that are trained."""
    unstable: int
    """Those that later messages change."""
    untrained: int
    """Answers that are context because their mask cannot be proved."""
    appended: int
    """Stops in the sequences that the template alone would not have written."""


def sequences_of(
    turns: Turns, given: TemplateOptions, specials: re.Pattern[str] | None
) -> tuple[list[TextSequence], Counts]:
    """The sequences of a conversation; a `RecordError` where one of its answers cannot be proved."""
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
    writer = _SequenceWriter(turns, specials)
    if given.expand is Expand.NONE:
        sequences = [writer.in_place(proved)]
    else:
        sequences = writer.expanded(proved, stable, whole=given.whole_sequence) or [writer.whole([])]
    turns.check()
    appended = sum(sequence.appended for sequence in sequences)
    return sequences, Counts(len(proved), stable.count(False), len(answers) - len(proved), appended)


def prompt_sequence(turns: Turns, specials: re.Pattern[str] | None) -> TextSequence:
    """All messages and the generation prompt, nothing of which is trained."""
    prompt = turns.prompt(len(turns.messages))
    if isinstance(prompt, Refusal):
        raise RecordError(f"the template cannot write a prompt here: {prompt.message}", code="no_prompt")
    return _SequenceWriter(turns, specials).prompt(prompt)


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


class _SequenceWriter:
    """Writes the sequences of one conversation."""

    def __init__(self, turns: Turns, specials: re.Pattern[str] | None) -> None:
        self._turns, self._specials = turns, specials
        self._roles = [RoleCode[message.role.name] for message in turns.messages]

    def whole(self, trained: Sequence[Answer]) -> TextSequence:
        """F with these answers trained."""
        whole = self._turns.whole
        appended = [answer for answer in trained if self._lacks_stop(answer)]
        if appended:
            whole = _with_stop(whole, appended[0].stop)
        return self._sequence(whole, [_place(answer) for answer in trained], len(appended))

    def _lacks_stop(self, answer: Answer) -> bool:
        """Whether F ends with an answer whose stop the template leaves to the next message."""
        return answer.appended and answer.message == len(self._turns.messages) - 1

    def alone(self, trained: Sequence[Answer]) -> TextSequence:
        """The prompt of the last of these answers and the answer; those before it are trained in the prompt."""
        last = trained[-1]
        ended = self._turns.until(last.message)
        assert isinstance(ended, Rendering)
        cut = _with_stop(ended, last.stop) if last.appended else until_character(ended, last.end)
        return self._sequence(cut, [_place(answer) for answer in trained], int(last.appended))

    def expanded(self, proved: Sequence[Answer], stable: Sequence[bool], *, whole: bool) -> list[TextSequence]:
        """As few sequences as train every answer behind its own prompt: one for each answer that no other extends.

        With `whole` the last sequence is F, also where no answer is trained in it.
        """
        sequences: list[TextSequence] = []
        left = [answer for answer, is_stable in zip(proved, stable, strict=True) if not is_stable]
        while left:
            last = left.pop()
            ended = self._turns.until(last.message)
            assert isinstance(ended, Rendering)
            inside = [one for one in left if self._turns.has(ended, one)]
            left = [one for one in left if one not in inside]
            sequences.append(self.alone([*inside, last]))
        sequences.reverse()
        shared = [answer for answer, is_stable in zip(proved, stable, strict=True) if is_stable]
        return [*sequences, self.whole(shared)] if shared or whole else sequences

    def in_place(self, proved: Sequence[Answer]) -> TextSequence:
        """F with every answer trained where it is, as far as F has it."""
        whole = self._turns.whole
        appended = next((answer.stop for answer in proved if self._lacks_stop(answer)), None)
        sequence = whole if appended is None else _with_stop(whole, appended)
        placed, unstable = [], []
        for answer in proved:
            if self._turns.is_stable(answer):
                placed.append(_place(answer))
                continue
            found = self._context_place(whole, answer.message)
            if found is not None:
                placed.append(found._replace(is_trained=True))
                unstable.append(answer.message)
        return self._sequence(sequence, placed, int(appended is not None))._replace(unstable=tuple(unstable))

    def _context_place(self, rendering: Rendering, index: int) -> Placed | None:
        """Where an assistant message is in a sequence that does not train it as its prompt would have it."""
        own = [piece for piece in rendering.pieces if piece.owner == index]
        if not own:
            return None
        first = own[0].start
        last = self._end_of_text(rendering, index, first)
        before = max((p.stop for p in rendering.pieces if p.expression is not None and p.stop <= first), default=0)
        gap = rendering.text[before:first]
        opening = self._turns.opening(index)
        begin = before + (self._closing(rendering, before, first) if opening is None else common(gap, opening))
        end = self._turns.stops.any_end()
        found = end.search(rendering.text, last, last + len(literal_from(rendering, last))) if end else None
        if found is None:
            return Placed(index, min(begin, first), last, last, False)
        return Placed(index, min(begin, first), found.start(), found.end(), False)

    def _end_of_text(self, rendering: Rendering, index: int, first: int) -> int:
        """Where the text of a message ends that begins at a place: before a stop, or before text of another one."""
        stop, last = self._turns.stops.pattern(), first
        for piece in rendering.pieces:
            if piece.start < first:
                continue
            if piece.owner == index:
                last = piece.stop
            elif piece.expression is not None:
                if piece.start < piece.stop:
                    break
            elif stop is not None and stop.search(rendering.text, piece.start, piece.stop):
                break
        return last

    def _is_spoken(self, piece: Piece) -> bool:
        """Whether a text is the content or reasoning of an assistant: answers end otherwise where there is none."""
        if piece.owner is None or piece.owner < 0 or self._roles[piece.owner] is not RoleCode.ASSISTANT:
            return False
        return part_of(piece) in (Part.CONTENT, Part.REASONING)

    def _closing(self, rendering: Rendering, start: int, stop: int) -> int:
        """Characters behind a message that still belong to it: those that its own ending also has."""
        owner = next(
            (p.owner for p in reversed(rendering.pieces) if p.expression is not None and p.stop <= start), None
        )
        if owner is None or owner == TOOLS:
            return 0
        return common(rendering.text[start:stop], self._turns.closing(owner))

    def prompt(self, rendering: Rendering) -> TextSequence:
        """P of a message that is still to come."""
        self._roles = [*self._roles, RoleCode.ASSISTANT]
        return self._sequence(rendering, [], following=len(self._roles) - 1)

    def _sequence(
        self, rendering: Rendering, placed: Sequence[Placed], appended: int = 0, following: int | None = None
    ) -> TextSequence:
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
        labels = SequenceLabels(self._turns, rendering, self._roles, ordered, self._specials, following)
        spans = [span for span in labels.spans() if span.text]
        return TextSequence(tuple(spans), tuple(one.message for one in placed if one.is_trained), appended)


def _place(answer: Answer) -> Placed:
    """Where a trained answer is in a rendering that has it."""
    end = answer.stop_begin + len(answer.stop)
    return Placed(answer.message, answer.begin, answer.stop_begin, end, is_trained=True)


def _with_stop(rendering: Rendering, stop: str) -> Rendering:
    """A rendering with a stop token behind it."""
    size = len(rendering.text)
    piece = Piece(size, size + len(stop), None, None)
    return Rendering(rendering.text + stop, (*rendering.pieces, piece), rendering.questions)
