"""The renderings of one conversation and its answers, for a closer look at a template."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from chatmill.core.conversation import Message, Role
from chatmill.render.jinja.answers import Answers
from chatmill.render.jinja.as_sampled import SampledAnswers
from chatmill.render.jinja.paths import Path
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.renderer import Refusal, TemplateRunner
from chatmill.render.jinja.rendering import Rendering
from chatmill.render.jinja.rules import Answer
from chatmill.render.jinja.segments import Cursor, Window
from chatmill.render.jinja.stops import StopTokens


class Turns:
    """P(i), A(i), F and the answers of a conversation as texts, made when they are asked for."""

    def __init__(
        self, renderer: TemplateRunner, view: RecordView, stops: StopTokens, as_sampled: SampledAnswers | None = None
    ) -> None:
        """`view` is the conversation as the template sees it; `as_sampled` as in `Answers`."""
        self._renderer, self.view, self._stops, self._as_sampled = renderer, view, stops, as_sampled
        self._windows: dict[int, Window] = {}

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation's messages."""
        return self.view.conversation.messages

    @cached_property
    def _answers(self) -> Answers:
        return Answers(self._renderer, self.view, self._stops, as_sampled=self._as_sampled)

    @property
    def whole(self) -> Rendering:
        """F, or the template's own refusal as a `RecordError`."""
        return self._window(self._answers.whole()).rendering

    def prompt(self, index: int) -> Rendering | Refusal:
        """P(index)."""
        path = self._answers.prompt(index)
        return path if isinstance(path, Refusal) else self._window(path).rendering

    def until(self, index: int) -> Rendering | Refusal:
        """A(index): the rendering of all messages up to this one, whatever its role."""
        path = self._answers.until(index)
        return path if isinstance(path, Refusal) else self._window(path).rendering

    def trained(self, index: int) -> Rendering:
        """Return what the places of the answer of a message count in: A(index), or P(index) and its own turn."""
        return self._window(self._answers.trained(index)).rendering

    def _window(self, path: Path) -> Window:
        window = self._windows.get(id(path))  # answers hold them as long as this is there
        if window is None:
            outputs = self._answers.paths.listed(path)
            window = self._windows[id(path)] = self._renderer.segments.window(outputs, 0, self.view)
        return window

    def answers(self) -> list[Answer[int]]:
        """Return the answers of all assistant messages."""
        return [self.answer(i) for i, message in enumerate(self.messages) if message.role is Role.ASSISTANT]

    def answer(self, index: int) -> Answer[int]:
        """Return the answer of one assistant message."""
        answer = self._answers.answer(index)
        if answer.reason:
            return Answer(index, answer.reason, answer.detail)
        window = self._window(self._answers.trained(index))

        def at(place: Cursor) -> int:
            return window.at(place._replace(entry=place.entry + answer.first))

        return answer.moved(at, at)

    def is_as_sampled(self, answer: Answer[int]) -> bool:
        """Return whether an answer is what a model writes after its prompt, and not what history has."""
        return self._answers.is_as_sampled(answer.message)

    def opener(self, answer: Answer[int]) -> str:
        """Return what the prompt of such an answer opens reasoning with."""
        return self._answers.opener(answer.message)

    @property
    def declares_close(self) -> bool:
        """Whether what is between reasoning and content in such an answer is what the recipe says."""
        return self._as_sampled is not None and self._as_sampled.declares_close

    def is_stable(self, answer: Answer[int]) -> bool:
        """Return whether F has an answer after its own prompt, character by character."""
        return self._answers.answer(answer.message, self._answers.whole()).is_there
