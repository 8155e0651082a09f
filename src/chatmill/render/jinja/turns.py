"""The answers of a conversation, found by rule: for each assistant message its prompt, its answer and its stop.

P(i) is the rendering of the messages before i with the generation prompt, A(i) that of the messages up to i without
one. The answer of i is what A(i) has behind P(i), up to and including its stop. See docs/masks.md.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import NamedTuple
from zlib import crc32

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.render.jinja.expressions import Notes, subjects_of
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.renderer import Refusal, Renderer
from chatmill.render.jinja.rendering import Piece, Rendering, begins_with, difference, literal_from, until_character
from chatmill.render.jinja.shown import THINKING, not_shown
from chatmill.render.jinja.stops import StopTokens

PROBE_TEXT = "Next."


class Answer(NamedTuple):
    """The answer of one assistant message, or the reason why there is none."""

    message: int
    reason: str = ""
    """Empty for an answer that is proved; else a code of docs/errors.md."""
    detail: str = ""
    begin: int = 0
    """Where the answer begins in A(i), behind the whole of P(i)."""
    end: int = 0
    """Where it ends in A(i), behind its stop; the end of A(i) where the stop is appended."""
    stop: str = ""
    stop_begin: int = 0
    """Where the stop begins in A(i)."""
    appended: bool = False
    """The stop is not in A(i): the next message's header would write it."""
    is_general: bool = True
    """Whether the detail quotes nothing of the record."""


class Turns:
    """All renderings of one conversation that the rules speak of, made when they are asked for."""

    def __init__(self, renderer: Renderer, view: RecordView, stops: StopTokens, bos: str | None) -> None:
        """`view` is the conversation as the template sees it; `bos` is the token that begins a document."""
        self._renderer, self.view, self.stops, self.bos = renderer, view, stops, bos
        self.shape = view.shape()
        self._prompts: dict[int, Rendering | Refusal] = {}
        self._ends: dict[int, Rendering | Refusal] = {}
        self._closings: dict[tuple[int, bool], str] = {}
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

    def _render(self, count: int, prompt: bool) -> Rendering | Refusal:
        found = self._renderer.render(self.view, self.shape, count, prompt)
        self.notes.add(found.questions)
        return found

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
            return Answer(index, "prompt_not_in_history", difference(prompt, ended))
        hidden = not_shown(ended, self.view.conversation, range(index + 1), self.notes, tools=False)
        if hidden:
            return Answer(index, *hidden, is_general=hidden[0] != "origin_lost")
        begin, own = len(prompt.text), [piece for piece in ended.pieces if piece.owner == index]
        if any(piece.start < begin < piece.stop for piece in own):
            return Answer(index, "prompt_not_in_history", "the generation prompt ends inside the message's own text")
        stop = self._stop_behind(ended, index, begin)
        if stop is not None and self._goes_on(own, stop.end()):
            return Answer(
                index, "goes_on_after_stop", f"{stop.group()!r} and then {literal_from(ended, stop.end())[:40]!r}"
            )
        unclosed = self._unclosed_reasoning(index, ended, begin)
        if unclosed:
            return Answer(index, "reasoning_not_closed", unclosed)
        if stop is not None:
            return Answer(index, begin=begin, end=stop.end(), stop=stop.group(), stop_begin=stop.start())
        behind = max([begin, *(piece.stop for piece in own)])
        foreign = self._foreign_text(ended, index, begin, behind)
        if foreign is not None:
            return Answer(index, "content_after_result", f"{foreign[:40]!r} is inside the answer", is_general=False)
        appended = self._appended_stop(index, ended)
        if appended is None:
            return Answer(
                index, "no_stop", f"the template writes {literal_from(ended, behind)[:40]!r} behind the answer"
            )
        size = len(ended.text)
        return Answer(index, begin=begin, end=size, stop=appended, stop_begin=size, appended=True)

    def _goes_on(self, own: list[Piece], end: int) -> bool:
        """Whether text of a message is behind the stop of its answer; later records must agree."""
        behind = [piece for piece in own if piece.start >= end]
        return any(self.notes.note(("filled", one.expression), one.start < one.stop) for one in behind)

    def _unclosed_reasoning(self, index: int, ended: Rendering, begin: int) -> str:
        """What is wrong where the prompt opens reasoning and the answer does not close it; later records must agree."""
        opening = (self.opening(index) or "").rstrip()
        mark = next((one for one in THINKING if opening.endswith(one)), None)
        if mark is None:
            return ""
        close = THINKING[mark]
        for piece in ended.pieces:
            if piece.stop <= begin:
                continue
            closes = close in ended.text[max(begin, piece.start) : piece.stop]
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
        pattern = self.stops.pattern()
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
        message = self.messages[index]
        following: list[Message] = [Message(Role.USER, PROBE_TEXT)]
        if message.tool_calls:
            call = message.tool_calls[-1]
            following.insert(0, Message(Role.TOOL, PROBE_TEXT, tool_call_id=call.id, name=call.name))
        for probe in following:
            longer = Conversation((*self.messages[: index + 1], probe), tools=self.view.conversation.tools)
            view = RecordView(longer, self.view.form)
            found = self._renderer.render(view, view.shape(), index + 2, False)
            if isinstance(found, Refusal):
                continue
            for question, reply in found.questions.items():
                if max(subjects_of(question), default=0) <= index:
                    self.notes.note(question, reply)
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

    def is_stable(self, answer: Answer) -> bool:
        """Whether F has this answer behind its own prompt, character by character."""
        if answer not in self._stable:
            self._stable[answer] = self._is_stable(answer)
        return self._stable[answer]

    def _is_stable(self, answer: Answer) -> bool:
        return answer.message == len(self.messages) - 1 or self.has(self.whole, answer)

    def has(self, longer: Rendering, answer: Answer) -> bool:
        """Whether a rendering of more messages has an answer behind its own prompt, character by character."""
        ended = self.until(answer.message)
        assert isinstance(ended, Rendering)
        if not answer.appended:
            return begins_with(longer, until_character(ended, answer.end), self.notes)
        return begins_with(longer, ended, self.notes) and longer.text.startswith(answer.stop, len(ended.text))

    def closing(self, message: int, *, behind_stop: bool = False) -> str:
        """Template text that A(message) has behind the message's own text, or behind the first stop token there."""
        found = self._closings.get((message, behind_stop))
        if found is None:
            found = self._closings[message, behind_stop] = self._closing(message, behind_stop)
        return found

    def _closing(self, message: int, behind_stop: bool) -> str:
        ended = self.until(message)
        if isinstance(ended, Refusal):
            return ""
        last = max((piece.stop for piece in ended.pieces if piece.owner == message), default=None)
        if not behind_stop:
            return "" if last is None else literal_from(ended, last)
        if last is None:
            prompt = self.prompt(message)
            last = len((prompt if isinstance(prompt, Rendering) else ended).text)
        pattern = self.stops.pattern()
        found = pattern.search(ended.text, last) if pattern else None
        return literal_from(ended, found.end()) if found else ""

    def opening(self, message: int) -> str | None:
        """Template text at the end of P(message), from the last text of the record on; None without a prompt."""
        prompt = self.prompt(message)
        if isinstance(prompt, Refusal):
            return None
        last = max((piece.stop for piece in prompt.pieces if piece.expression is not None), default=0)
        return prompt.text[last:]

    def check(self) -> None:
        """Compare F, one prompt and one answer with plain Jinja."""
        speaking = [k for k, message in enumerate(self.messages) if message.role is Role.ASSISTANT]
        chosen = speaking[crc32(repr(self.shape).encode()) % len(speaking)] if speaking else -1
        self._compare(self.whole, len(self.messages), False)
        if chosen in self._prompts:
            self._compare(self._prompts[chosen], chosen, True)
        if chosen in self._ends and chosen < len(self.messages) - 1:
            self._compare(self._ends[chosen], chosen + 1, False)

    def _compare(self, rendering: Rendering | Refusal, count: int, prompt: bool) -> None:
        if isinstance(rendering, Rendering) and self._renderer.plain_if_any(self.view, count, prompt) != rendering.text:
            raise self._renderer.unlike_its_shape(self.view)
