"""The answers of a conversation, found by rule: for each assistant message its prompt, its answer and its stop.

P(i) is the rendering of the messages before i with the generation prompt, A(i) that of the messages up to i without
one. The answer of i is what A(i) has behind P(i), up to and including its stop. Some templates write the messages
before i in another way once it is there (gpt-oss drops reasoning before calls): the answer then is what A(i) writes in
the turn of i behind the generation prompt, and follows P(i) in a sequence of its own. See docs/masks.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Message, Role
from chatmill.render.jinja.expressions import Notes
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.renderer import Refusal, Renderer
from chatmill.render.jinja.rendering import Piece, Rendering, begins_with, difference, literal_from, until_character
from chatmill.render.jinja.shown import THINKING, not_shown
from chatmill.render.jinja.stops import StopTokens

PROBE_TEXT = "Next."


class Pause(NamedTuple):
    """A stop inside an answer: the template opens the assistant's turn again behind it, and goes on."""

    stop_begin: int
    end: int
    """Behind the stop."""
    begin: int
    """Where the answer goes on, behind the repeated generation prompt."""


class Answer(NamedTuple):
    """The answer of one assistant message, or the reason why there is none."""

    message: int
    reason: str = ""
    """Empty for an answer that is proved; else a code of docs/errors.md."""
    detail: str = ""
    begin: int = 0
    """Where the answer begins in `Turns.trained(i)`, behind the whole of P(i); so are all other places."""
    end: int = 0
    """Where it ends in A(i), behind its stop; the end of A(i) where the stop is appended."""
    stop: str = ""
    stop_begin: int = 0
    """Where the stop begins in A(i)."""
    appended: bool = False
    """The stop is not in A(i): the next message's header would write it."""
    pauses: tuple[Pause, ...] = ()
    """Stops before the last one; between a pause's stop and its end of the prompt is what a server writes."""
    is_general: bool = True
    """Whether the detail quotes nothing of the record."""


def is_continued(message: Message) -> bool:
    """Whether an assistant's turn goes on behind a message (of Harmony): what ends the message is no stop."""
    if message.tool_calls or message.channel not in ("analysis", "commentary"):
        return False
    return message.channel == "analysis" or message.recipient is None


class Turns:
    """All renderings of one conversation that the rules speak of, made when they are asked for."""

    def __init__(
        self, renderer: Renderer, view: RecordView, stops: StopTokens, bos: str | None, document_end: str | None = None
    ) -> None:
        """`view` is the conversation as the template sees it; the tokens are those that begin and end a document."""
        self._renderer, self.view, self.stops, self.bos, self.document_end = renderer, view, stops, bos, document_end
        self._prompts: dict[int, Rendering | Refusal] = {}
        self._ends: dict[int, Rendering | Refusal] = {}
        self._apart: dict[int, Rendering] = {}
        self._stable: dict[Answer, bool] = {}
        self.notes = Notes()
        """What the analysis depends on, beside the shape."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation's messages."""
        return self.view.conversation.messages

    @cached_property
    def whole(self) -> Rendering:
        """F, or the template's own refusal as a `RecordError`."""
        found = self.until(len(self.messages) - 1)
        if isinstance(found, Refusal):
            raise self._renderer.refused(found)
        return found

    def prompt(self, index: int) -> Rendering | Refusal:
        """P(index)."""
        if index not in self._prompts:
            self._prompts[index] = self._render(index, True)
        return self._prompts[index]

    def until(self, index: int) -> Rendering | Refusal:
        """A(index): the rendering of all messages up to this one, whatever its role."""
        if index not in self._ends:
            self._ends[index] = self._render(index + 1, False)
        return self._ends[index]

    def trained(self, index: int) -> Rendering | Refusal:
        """Return what the places of the answer of a message count in: A(index), or P(index) and its own turn."""
        return self._apart.get(index) or self.until(index)

    def _render(self, count: int, prompt: bool) -> Rendering | Refusal:
        return self._renderer.render(self.view, count, prompt)

    def _with_own_turn(self, index: int) -> Rendering | None:
        """Return P(index) with what A(index) writes in the turn of the message; None if no loop writes it."""
        prompt, ended = (self._renderer.outputs(self.view, index + more, not more) for more in (0, 1))
        if isinstance(prompt, Refusal) or isinstance(ended, Refusal):
            return None
        outputs = self._renderer.segments.with_own_turn(prompt, ended, index)
        return None if outputs is None else self._renderer.segments.window(outputs, 0, self.view).rendering

    def answers(self) -> list[Answer]:
        """The answers of all assistant messages."""
        return [self.answer(i) for i, message in enumerate(self.messages) if message.role is Role.ASSISTANT]

    def answer(self, index: int) -> Answer:
        """The answer of one assistant message."""
        prompt, ended = self.prompt(index), self.until(index)
        if isinstance(prompt, Refusal):
            return Answer(index, "no_prompt", prompt.message, is_general=prompt.is_general)
        if isinstance(ended, Refusal):
            return Answer(index, "template_refused", ended.message, is_general=ended.is_general)
        if not begins_with(ended, prompt, self.notes):
            apart = self._with_own_turn(index)
            if apart is None or not begins_with(apart, prompt, self.notes):
                return Answer(index, "prompt_not_in_history", difference(prompt, ended))
            ended = self._apart[index] = apart
        hidden = self._hidden(ended, index)
        if hidden:
            return Answer(index, *hidden)
        begin, own = len(prompt.text), [piece for piece in ended.pieces if piece.owner == index]
        if any(piece.start < begin < piece.stop for piece in own):
            return Answer(index, "prompt_not_in_history", "the generation prompt ends inside the message's own text")
        said = max([begin, *(piece.stop for piece in own)])
        stop = self._stop_behind(ended, index, said if is_continued(self.messages[index]) else begin)
        pauses: tuple[Pause, ...] = ()
        while stop is not None:
            again = self._behind_prompt(ended, index, stop.end())
            behind = None if again is None else self._stop_behind(ended, index, again)
            if again is not None and behind is not None:
                pauses = (*pauses, Pause(stop.start(), stop.end(), again))
                stop = behind
            elif self._goes_on(own, stop.end()):
                rest = literal_from(ended, stop.end())[:40]
                return Answer(index, "goes_on_after_stop", f"{stop.group()!r} and then {rest!r}")
            else:
                break
        ends = [*(pause.stop_begin for pause in pauses), len(ended.text) if stop is None else stop.end()]
        for start, end in zip([begin, *(pause.begin for pause in pauses)], ends, strict=True):
            unclosed = self._unclosed_reasoning(index, ended, start, end)
            if unclosed:
                return Answer(index, "reasoning_not_closed", unclosed)
        if stop is not None:
            return Answer(index, begin=begin, end=stop.end(), stop=stop.group(), stop_begin=stop.start(), pauses=pauses)
        foreign = self._foreign_text(ended, index, begin, said)
        if foreign is not None:
            return Answer(index, "content_after_result", f"{foreign[:40]!r} is inside the answer", is_general=False)
        appended = self._appended_stop(index, ended)
        if appended is None:
            return Answer(index, "no_stop", f"the template writes {literal_from(ended, said)[:40]!r} behind the answer")
        size = len(ended.text)
        return Answer(index, begin=begin, end=size, stop=appended, stop_begin=size, appended=True)

    def _hidden(self, ended: Rendering, index: int) -> tuple[str, str] | None:
        """What A(index) leaves out of the messages."""
        return not_shown(ended, self.view, range(index + 1), self.notes, tools=False)

    def _goes_on(self, own: list[Piece], end: int) -> bool:
        """Whether text of a message is behind the stop of its answer; later records must agree."""
        behind = [piece for piece in own if piece.start >= end]
        return any(self.notes.note(("filled", one.expression), one.start < one.stop) for one in behind)

    def _behind_prompt(self, ended: Rendering, index: int, at: int) -> int | None:
        """Return the end of a generation prompt that the template writes again behind a stop; None without one."""
        literal = literal_from(ended, at)
        blank = len(literal) - len(literal.lstrip())
        opening = self.generation_prompt(index).lstrip() if blank < len(literal) else ""
        return at + blank + len(opening) if opening and literal.startswith(opening, blank) else None

    def generation_prompt(self, index: int) -> str:
        """Return what P(index) has behind A(index - 1), where the template wrote all of that; else nothing.

        Where the template opens no turn behind an assistant's message, the turn is the one that message is in.
        """
        while True:
            prompt, before = self.prompt(index), self._render(index, False)
            if isinstance(prompt, Refusal) or isinstance(before, Refusal):
                return ""
            opening = added_by(prompt, before, self.notes)
            if opening or index == 0 or self.messages[index - 1].role is not Role.ASSISTANT:
                return opening or ""
            index -= 1

    def _unclosed_reasoning(self, index: int, ended: Rendering, begin: int, end: int) -> str:
        """What is wrong where the prompt opens reasoning and the answer does not close it; later records must agree."""
        opening = (self.opening(index) or "").rstrip()
        mark = next((one for one in THINKING if opening.endswith(one)), None)
        if mark is None:
            return ""
        close = THINKING[mark]
        for piece in ended.pieces:
            if piece.stop <= begin or piece.start >= end:
                continue
            closes = close in ended.text[max(begin, piece.start) : min(end, piece.stop)]
            if piece.expression is not None:
                self.notes.note(("contains", piece.expression, close), closes)
            if closes:
                return ""
        return f"the prompt ends with {mark!r}, and no {close!r} follows"

    def _foreign_text(self, ended: Rendering, index: int, begin: int, behind: int) -> str | None:
        """Text of another message, or of the tools, that an answer goes on behind; later records must agree."""
        for piece in ended.pieces:
            if piece.expression is None or piece.owner == index or not begin <= piece.start < behind:
                continue
            self.notes.note(("filled", piece.expression), piece.start < piece.stop)
            if piece.start < piece.stop:
                return ended.text[piece.start : piece.stop]
        return None

    def _stop_behind(self, rendering: Rendering, index: int, at: int) -> re.Match[str] | None:
        """The first stop token in template text behind a place, before any text that is not of message `index`."""
        pattern = self.stops.any_end() if is_continued(self.messages[index]) else self.stops.pattern()
        if pattern is None:
            return None
        for piece in rendering.pieces:
            if piece.stop <= at and piece.start < piece.stop:
                continue
            if piece.expression is not None:
                if piece.start >= at and piece.start < piece.stop and piece.owner != index:
                    return None
                continue
            found = pattern.search(rendering.text, max(at, piece.start), piece.stop)
            if found is not None:
                return found
        return None

    def _appended_stop(self, index: int, ended: Rendering) -> str | None:
        """The stop that the header of a next message writes; None where it is none, or other text comes first."""
        for found in self._with_next(index):
            if isinstance(found, Refusal):
                continue
            own = [piece.start for piece in found.pieces if piece.owner == index]
            if own:  # the next message may change this one (GLM drops its reasoning), but not where it ends
                behind = own[0]
            elif begins_with(found, ended, self.notes):
                behind = len(ended.text)
            else:
                continue
            stop = self._stop_behind(found, index, behind)
            if stop is not None:
                return stop.group()
        return None

    def _with_next(self, index: int) -> Iterator[Rendering | Refusal]:
        """A(index) with a next message: a result where the message calls a tool, and a question."""
        view = self.view.again()
        for number in probe(view, [index])[0].tolist():
            if number >= 0:
                yield self._renderer.render(view.probed(index + 2, number), index + 2, False)

    def is_stable(self, answer: Answer) -> bool:
        """Whether F has this answer behind its own prompt, character by character."""
        if answer not in self._stable:
            self._stable[answer] = self._is_stable(answer)
        return self._stable[answer]

    def _is_stable(self, answer: Answer) -> bool:
        is_last = answer.message == len(self.messages) - 1 and answer.message not in self._apart
        return is_last or self.has(self.whole, answer)

    def has(self, longer: Rendering, answer: Answer) -> bool:
        """Whether a rendering of more messages has an answer behind its own prompt, character by character."""
        ended = self.trained(answer.message)
        assert isinstance(ended, Rendering)
        if not answer.appended:
            return begins_with(longer, until_character(ended, answer.end), self.notes)
        stop = literal_from(longer, len(ended.text))
        return begins_with(longer, ended, self.notes) and stop.startswith(answer.stop)

    def opening(self, message: int) -> str | None:
        """Template text at the end of P(message), from the last text of the record on; None without a prompt."""
        prompt = self.prompt(message)
        if isinstance(prompt, Refusal):
            return None
        last = max((piece.stop for piece in prompt.pieces if piece.expression is not None), default=0)
        return prompt.text[last:]


def added_by(prompt: Rendering, before: Rendering, notes: Notes) -> str | None:
    """Return what a prompt has behind the same messages without one; None where that is not text of the template."""
    size = len(before.text)
    added = literal_from(prompt, size)
    return added if begins_with(prompt, before, notes) and size + len(added) == len(prompt.text) else None


def probe(view: RecordView, answers: Sequence[int]) -> NDArray[np.int64]:
    """Have a view hold what may follow its answers: a result where one calls a tool, and a question.

    Gives two numbers of probes for each answer, in this order; the second is -1 where there is one only.
    """
    question = len(view.roles)
    probes = [Message(Role.USER, PROBE_TEXT)]
    numbers = np.full((len(answers), 2), (question, -1), dtype=np.int64)
    for place, index in enumerate(answers):
        calls = view.conversation.messages[index].tool_calls
        if calls:
            numbers[place] = question + len(probes), question
            probes.append(Message(Role.TOOL, PROBE_TEXT, tool_call_id=calls[-1].id, name=calls[-1].name))
    view.probe(probes)
    return numbers
