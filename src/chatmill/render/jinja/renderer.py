"""Renderings of one template: each is made once per shape and set of replies, and found again by asking.

What a template wrote for a record holds for every record of the same shape that gives the same replies to what the
template asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import jinja2

from chatmill.errors import ChatmillError, RecordError
from chatmill.render.jinja.expressions import Notes, Question, ask
from chatmill.render.jinja.hooked_sandbox import HookedSandbox
from chatmill.render.jinja.limits import LimitError
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.remembered_texts import RememberedTexts
from chatmill.render.jinja.rendering import Rendering
from chatmill.render.jinja.sandbox import PlainSandbox
from chatmill.render.jinja.traced import Traced, plain_text
from chatmill.render.jinja.traced_values import fixed, wrapped
from chatmill.render.jinja.tracing_sandbox import TracingSandbox
from chatmill.render.jinja.turn_run import TurnRun
from chatmill.render.jinja.views import MessagesView

MAX_KEPT = 500_000
"""Pieces and questions of the renderings that are kept per template."""
MAX_VARIANTS = 64
"""Different replies that are kept for one shape."""


class TraceError(ChatmillError):
    """What was derived from traces is not what the template writes."""


class NotFollowedError(TraceError, RecordError):
    """The same, found out where it costs one record alone."""

    def __init__(self, message: str, **place: str) -> None:
        """The message says which template and what it does."""
        RecordError.__init__(self, message, code="not_followed", **place)
        self.is_general = False


OF_ITS_SHAPE = (
    "other records of its shape: a fault of Chatmill, or of a template that reads texts in ways that cannot be followed"
)


class Refusal(NamedTuple):
    """What a template said when it refused a conversation."""

    message: str
    line: int | None
    questions: Mapping[Question, Any]
    is_general: bool
    """Whether every record of the shape that gives the same replies is refused in the same words."""


def gives(view: RecordView, questions: Iterable[tuple[Question, Any]], asked: dict[Question, Any]) -> bool:
    """Whether a record gives these replies; what it was asked, here or before, is kept in `asked`."""
    for question, reply in questions:
        if question not in asked:
            asked[question] = ask(question, view.field)
        said = asked[question]
        if said != reply or type(said) is not type(reply):
            return False
    return True


class Variants:
    """What is known of the records of one shape, by their replies."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        """Nothing is known."""
        self._known: list[tuple[tuple[tuple[Question, Any], ...], Any]] = []

    def find(self, view: RecordView) -> Any:
        """What is known of a record; None where nothing is."""
        asked: dict[Question, Any] = {}
        return next((value for questions, value in self._known if gives(view, questions, asked)), None)

    def put(self, questions: Mapping[Question, Any], value: Any) -> None:
        """Keep what holds for all records that give these replies."""
        if len(self._known) < MAX_VARIANTS:
            self._known.append((tuple(questions.items()), value))


class Renderer:
    """Runs one template, on traced values or on plain ones, under fixed options."""

    def __init__(
        self,
        source: str,
        tracing: TracingSandbox,
        plain: PlainSandbox,
        hooked: HookedSandbox,
        variables: Mapping[str, Any],
        name: str,
        given_by_record: Iterable[str] = (),
    ) -> None:
        """`variables` are the special tokens and the template's options; those that a record gives are its text."""
        self._tracing, self._plain = tracing, plain
        self._traced_template, self._plain_template = tracing.template(source), plain.template(source)
        self._hooked, self._source = hooked, source
        self.texts = RememberedTexts(hooked)
        self.variables = dict(variables)
        self._given_by_record = tuple(given_by_record)
        self.name = name
        self._known: dict[Any, Variants] = {}
        self._kept = 0

    def render(self, view: RecordView, shape: tuple[Any, ...], count: int, prompt: bool) -> Rendering | Refusal:
        """The rendering of the first messages, with or without the generation prompt."""
        key = (shape[:count], bool(view.conversation.tools), prompt)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = Variants()
        found: Rendering | Refusal | None = known.find(view)
        if isinstance(found, Rendering):
            return found.for_record(view)
        if found is None:
            found = self._run(view, count, prompt)
            if self._kept >= MAX_KEPT:
                self._known, self._kept = {}, 0
            else:
                known.put(found.questions, found)
                self._kept += 1 + len(found.questions) + (len(found.pieces) if isinstance(found, Rendering) else 0)
        return found

    def _run(self, view: RecordView, count: int, prompt: bool) -> Rendering | Refusal:
        notes = Notes()
        messages, tools = view.values(count, notes)
        try:
            values = self._values(messages, tools, prompt)
            values |= {name: fixed(values[name], ("options", name), notes) for name in self._given_by_record}
            text = self._tracing.render(self._traced_template, values)
        except jinja2.TemplateError as error:
            return self._refusal(view, count, prompt, notes, error)
        return Rendering.of(text, notes.replies)

    def _refusal(
        self, view: RecordView, count: int, prompt: bool, notes: Notes, traced: jinja2.TemplateError
    ) -> Refusal:
        """What the template says on plain values, in the words its author chose."""
        is_general = not isinstance(traced.message, Traced)
        try:
            self.plain(view, count, prompt)
        except jinja2.TemplateError as error:
            said = plain_text(str(error.message or error))
            if isinstance(error, LimitError):
                said = f"the template was stopped: {said}"
            return Refusal(said, getattr(error, "lineno", None), notes.replies, is_general)
        return Refusal("the template fails on values that are traced", None, notes.replies, False)

    def plain(self, view: RecordView, count: int, prompt: bool) -> str:
        """The text of the first messages by plain Jinja, without any tracing."""
        messages, tools = view.values(count, None)
        return self._plain.render(self._plain_template, self._values(messages, tools, prompt))

    def plain_if_any(self, view: RecordView, count: int, prompt: bool) -> str | None:
        """The same; None where the template refuses the messages."""
        try:
            return self.plain(view, count, prompt)
        except jinja2.TemplateError:
            return None

    @cached_property
    def _hooked_template(self) -> jinja2.Template:
        return self._hooked.template(self._source)

    def text(self, view: RecordView, count: int, prompt: bool) -> str | None:
        """The text of the first messages, from turns that are remembered; None where the template refuses them."""

        def code(run: TurnRun) -> str:
            tools = list(view.conversation.tools) or None
            given = None if tools is None else wrapped(tools, ("tools",), run)
            values = self._values(MessagesView(run), given, prompt)
            values |= {name: fixed(values[name], ("options", name), run) for name in self._given_by_record}
            return self._hooked.render(self._hooked_template, values)

        return self.texts.text(view, count, prompt, code, lambda: self.plain_if_any(view, count, prompt))

    def unlike_its_shape(self, view: RecordView) -> NotFollowedError:
        """The error of a record of which the template writes something else on traced values."""
        return NotFollowedError(f"{self._writes(view)} otherwise than {OF_ITS_SHAPE}")

    def _writes(self, view: RecordView) -> str:
        return f"the template {self.name!r} writes record {view.conversation.id or view.conversation.where!r}"

    def _values(self, messages: Any, tools: Any, prompt: bool) -> dict[str, Any]:
        return {
            **self.variables,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompt,
        }

    def refused(self, refusal: Refusal) -> RecordError:
        """The error of a record that the template refuses."""
        place = f" (line {refusal.line})" if refusal.line else ""
        error = RecordError(
            f"the template {self.name!r}{place} refuses the conversation: {refusal.message}",
            code="template_refused",
        )
        error.is_general = refusal.is_general
        return error
