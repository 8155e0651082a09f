"""Answers as they are sampled: what a model writes after a prompt that opens its reasoning, where history has none.

Some templates end the generation prompt with the mark that opens reasoning, and write answers of the past without it
(DeepSeek R1: `<think>`). No rendering then has a prompt with its answer after it. What the model wrote is known all the
same: the reasoning, the mark that closes it, and the content. The template itself says whether that is right: given all
of this as the content of the message, it must cut it to the history that it writes for the record, or show it whole.
See docs/masks.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.errors import ConfigError
from chatmill.render.jinja.expressions import Expression, root
from chatmill.render.jinja.options import AnswerText, NoReasoning, TemplateOptions
from chatmill.render.jinja.record_view import InputForm, RecordView
from chatmill.render.jinja.renderer import TemplateRunner
from chatmill.render.jinja.rendering import Piece, Rendering, common_start, difference
from chatmill.render.jinja.rules import Answer
from chatmill.render.jinja.stops import BLOCKS, THINKING, StopTokens
from chatmill.render.jinja.tries import Part

EMPTY_BLOCK = re.compile("|".join(rf"(?:{re.escape(a)}\s*{re.escape(b)}\s*)" for a, b in BLOCKS.items()))
"""Reasoning that is closed at once."""
REASONED = Message(Role.ASSISTANT, "A-one.", reasoning="R-one.")


class SampledTurn(NamedTuple):
    """What a model writes after a prompt, as parts of a segment, and the texts that prove it."""

    parts: tuple[Part, ...]
    """The answer, its stop, and what the template writes after it; paths count from the first message."""
    opener: str
    """What the prompt has and history does not: the mark that opens reasoning, with the white space after it, or an
    empty block of reasoning. Empty where only the white space is another one."""
    said: tuple[str, ...]
    """Reasoning, close and content as one text: as it is trained, and without white space around the close."""


class _Opening(NamedTuple):
    """What a prompt ends with, and where history goes on instead."""

    opener: str
    mark: str
    close: str
    """The mark that closes reasoning; empty where nothing is open: the prompt has closed it, or never opened it."""
    begin: int
    """Where A(i) goes on: after the header of the message, and after an empty block of reasoning."""

    def passed(self, content: str) -> int:
        """Return how many characters of a content the prompt has already: the mark, and white space that both have."""
        blank = len(content) - len(content.lstrip())
        if not content.startswith(self.mark, blank):
            return 0
        at = blank + len(self.mark)
        return at + common_start(content[at:], self.opener[len(self.opener.rstrip()) :])


class SampledAnswers:
    """The rule for answers as they are sampled, for one template under fixed options."""

    def __init__(
        self,
        given: TemplateOptions,
        stops: StopTokens,
        between: str,
        *,
        is_strict: bool = False,
        reads_reasoning: bool = True,
    ) -> None:
        """`between` is what the template writes between reasoning and content, where it shows both.

        `is_strict`: an answer whose reasoning is in neither has no proof. `reads_reasoning`: the template knows it.
        """
        self._given, self._stops, self._between = given, stops, between
        self.is_first = given.answers is AnswerText.SAMPLED
        """Whether it is asked also where history follows the prompt, but leaves the reasoning out."""
        self.is_strict = is_strict
        self._reads_reasoning = reads_reasoning

    @property
    def declares_close(self) -> bool:
        """Whether the recipe says what is between reasoning and content, since the template never writes both."""
        return not self._between

    def turn(
        self, message: Message, index: int, prompt: Rendering, ended: Rendering
    ) -> SampledTurn | Answer[Any] | None:
        """Return what a model writes after P(i); why that is not known; None where P(i) opens no reasoning."""
        opening = None if message.parts else self._opening(index, prompt, ended)
        if opening is None:
            return None
        if not opening.close:
            rest = _parts_from(ended, opening.begin)
            # Another thinking switch may show the reasoning, unless the template has no place for any.
            has_place = bool(opening.opener) or self._reads_reasoning
            is_hidden = has_place and self.is_hidden(message, index, ended)
            return None if is_hidden else SampledTurn(rest, opening.opener, (message.content,))
        own = [piece for piece in ended.pieces if piece.owner == index]
        content = message.content
        if (message.reasoning or "").strip():
            turn: SampledTurn | None = self._with_reasoning(message, index, opening, own, ended)
        elif content.lstrip().startswith(opening.mark) or opening.close in content:
            turn = self._with_tags(content, index, opening, own, prompt, ended)
        elif other := next((mark for mark in THINKING if content.lstrip().startswith(mark)), ""):
            detail = f"the prompt ends with {opening.mark!r}, and the content begins with the mark of another template"
            return Answer(index, "no_reasoning", f"{detail}, {other!r}: give the reasoning in its own field")
        elif self._given.no_reasoning is NoReasoning.REFUSE:
            return Answer(index, "no_reasoning", f"the prompt ends with {opening.mark!r}")
        else:
            close = self._close_text(opening.close)
            said = (close + content, opening.close + content)
            turn = SampledTurn(((close, None), *_parts_from(ended, opening.begin)), opening.opener, said)
        if turn is None:
            return None
        count = turn.said[0].count(opening.close)
        if count == 0:
            return Answer(index, "reasoning_not_closed", f"no {opening.close!r} follows {opening.mark!r}")
        if count > 1:
            return Answer(index, "ambiguous_thinking", f"{opening.close!r} is there {count} times")
        return turn

    def is_hidden(self, message: Message, index: int, answer: Rendering) -> bool:
        """Return whether a rendering leaves out the reasoning of a message, in its own field or in its content."""
        own = [piece for piece in answer.pieces if piece.owner == index and piece.start < piece.stop]
        if (message.reasoning or "").strip():
            return not any(_field_of(piece) == "reasoning" for piece in own)
        opened = next((mark for mark in THINKING if message.content.lstrip().startswith(mark)), None)
        thought, close, said = message.content.partition(THINKING.get(opened or "", "\0"))
        inside = thought.lstrip().removeprefix(opened or "").strip()
        # what is said after the reasoning may hold the same words: it does not count
        shown = "".join(answer.text[piece.start : piece.stop] for piece in own).strip().removesuffix(said.strip())
        return bool(close and inside) and inside not in shown

    def _with_reasoning(
        self, message: Message, index: int, opening: _Opening, own: Sequence[Piece], ended: Rendering
    ) -> SampledTurn:
        """Reasoning in its own field: what the template writes of both, or reasoning, close and content."""
        rest, reasoning = _parts_from(ended, opening.begin), message.reasoning or ""
        if any(_field_of(piece) == "reasoning" and piece.start < piece.stop for piece in own):
            behind = max(piece.stop for piece in own if _field_of(piece) in ("reasoning", "content"))
            if self._between and ended.text.startswith(self._between, behind):  # and no content
                behind += len(self._between)
            return SampledTurn(rest, opening.opener, (ended.text[opening.begin : behind],))
        close = self._close_text(opening.close)
        parts = ((None, ("field", (index, "reasoning"))), (close, None), *rest)
        said = tuple(reasoning + between + message.content for between in (close, opening.close))
        return SampledTurn(parts, opening.opener, said)

    def _with_tags(
        self, content: str, index: int, opening: _Opening, own: Sequence[Piece], prompt: Rendering, ended: Rendering
    ) -> SampledTurn | None:
        """Reasoning inside the content, as the model wrote it: what is behind the opener, every character of it."""
        shown = [piece for piece in own if _field_of(piece) == "content"]
        if not shown:
            return None
        text, passed = content, opening.passed(content)
        body: Expression = ("field", (index, "content"))
        if ended.text.startswith(prompt.text) and shown[0].expression is not None:
            # the template writes the content itself after the header, trimmed perhaps, and it begins as the prompt ends
            text, body = ended.text[shown[0].start : shown[0].stop], shown[0].expression
            passed = len(prompt.text) - shown[0].start
        if passed:
            body = ("apply", "removeprefix", (text[:passed],), body)
        split = ("split", (opening.close, 1), ())
        thought, answered = (("apply", "part", (*split, number), body) for number in range(2))
        parts = ((None, thought), (opening.close, None), (None, answered), *_parts_from(ended, shown[-1].stop))
        return SampledTurn(parts, opening.opener, (text[passed:],))

    def _close_text(self, close: str) -> str:
        """Return what closes reasoning: as the template writes it, as the recipe says, or on a line of its own."""
        if close in self._between:
            return self._between
        given = self._given.thinking_close
        if given is None:
            return f"\n{close}\n\n"
        if given.strip() != close:
            raise ConfigError(
                f"thinking_close is {given!r}, and reasoning ends with {close!r} under this template: give this mark "
                "with the white space around it"
            )
        return given

    def _opening(self, index: int, prompt: Rendering, ended: Rendering) -> _Opening | None:
        """Find what P(i) opens behind the beginning that it shares with A(i)."""
        last = _last_text(prompt, len(prompt.text))
        own = [piece for piece in ended.pieces if piece.owner == index and piece.start < piece.stop]
        before = _last_text(ended, min((piece.start for piece in own), default=len(ended.text)))
        if (last and last.expression) != (before and before.expression):
            return None
        tail, start = prompt.text[last.stop if last else 0 :], before.stop if before else 0
        said = [piece.start for piece in own if not _is_blank_reasoning(piece, ended)]
        lead = ended.text[start : min(said, default=len(ended.text))]
        mark = next((word for word in THINKING if tail.rstrip().endswith(word)), None)
        if mark is None:
            first = next((p.start - start for p in ended.pieces if p.owner == index and p.start >= start), len(lead))
            return self._closed(tail, lead, start, first) or self._opening_in_words(tail, lead, start)
        head = tail[: tail.rindex(mark)]
        at = _behind(lead, head)
        if at is None:
            return None
        opens, close = re.escape(mark), THINKING[mark]
        block = re.compile(rf"\s*(?:{opens})?\s*{re.escape(close)}\s*|\s*{opens}\s*").match(lead, at)
        return _Opening(tail[len(head) :], mark, close, start + (block.end() if block else at))

    @staticmethod
    def _closed(tail: str, lead: str, start: int, first: int) -> _Opening | None:
        """Find a prompt that has an empty block of reasoning, or other white space, where history has not.

        `first` is where the message's own first text is, empty or not.
        """
        block = next((match for match in EMPTY_BLOCK.finditer(tail) if match.end() == len(tail)), None)
        if block is not None:
            at = _behind(lead, tail[: block.start()])
            if at is not None and EMPTY_BLOCK.match(lead, at) is None:
                return _Opening(block.group(), "", "", start + at)
        at = _behind(lead, tail)
        if at is None:
            return None
        is_blank = not lead[min(at, first) : max(at, first)].strip()
        return _Opening("", "", "", start + (first if is_blank else at))

    def _opening_in_words(self, tail: str, lead: str, start: int) -> _Opening | None:
        """Find an opener of another kind (Apriel opens with a sentence): the template says by what it is closed."""
        opener, close = tail[len(lead) :], self._between.strip()
        if not close or not tail.startswith(lead) or not opener.strip() or self._stops.any_end().search(opener):
            return None
        return _Opening(opener, opener.strip(), close, start + len(lead))


def written_between(renderer: TemplateRunner, form: InputForm) -> str:
    """Return what a template writes between reasoning and content; nothing where it does not show both."""
    view = RecordView(Conversation((Message(Role.USER, "Q-one?"), REASONED)), form)
    rendering = renderer.render(view, 2, False)
    if not isinstance(rendering, Rendering):
        return ""
    places = {_field_of(piece): piece for piece in rendering.pieces if piece.owner == 1}
    reasoning, content = places.get("reasoning"), places.get("content")
    return "" if reasoning is None or content is None else rendering.text[reasoning.stop : content.start]


def is_cut(
    renderer: TemplateRunner, view: RecordView, index: int, turn: SampledTurn, history: str, trained: str
) -> bool:
    """Return whether a template makes its history of what a model writes, or shows all of it; by plain Jinja."""
    if not turn.opener:  # history has the same, but for white space of the template
        return True
    message = view.conversation.messages[index]
    texts = [turn.opener + said for said in turn.said]
    given = [message._replace(content=text, reasoning=None, has_content=True) for text in texts]
    written = [_plain_with(renderer, view, index, one) for one in given]
    if written[0] == trained or history in written:
        return True
    if not message.tool_calls:
        return False
    # a template may write a content next to calls in another way, or not at all: what it cuts is seen without calls
    alone = _plain_with(renderer, view, index, message._replace(tool_calls=(), has_content=True))
    without_calls = [_plain_with(renderer, view, index, one._replace(tool_calls=())) for one in given]
    return alone is not None and alone in without_calls


def _plain_with(renderer: TemplateRunner, view: RecordView, index: int, message: Message) -> str | None:
    """Return A(index) by plain Jinja with another message in its last place; None where the template refuses it."""
    messages = (*view.conversation.messages[:index], message)
    changed = RecordView(view.conversation._replace(messages=messages), view.form)
    return renderer.plain_if_any(changed, index + 1, False)


def not_cut(prompt: Rendering, ended: Rendering) -> str:
    """Say what is wrong where a template does not make its history of what a model would have written."""
    return f"{difference(prompt, ended)}; of what a model would write there, the template makes another history"


def _field_of(piece: Piece) -> str:
    """Return the name of the field that a text of a message is from."""
    return "" if piece.expression is None else str(root(piece.expression)[1])


def _is_blank_reasoning(piece: Piece, rendering: Rendering) -> bool:
    """Tell whether a piece is reasoning of white space alone."""
    return _field_of(piece) == "reasoning" and not rendering.text[piece.start : piece.stop].strip()


def _last_text(rendering: Rendering, limit: int) -> Piece | None:
    """Return the last text of the record before a character."""
    texts = (p for p in reversed(rendering.pieces) if p.expression is not None and p.start < p.stop <= limit)
    return next(texts, None)


def _behind(text: str, head: str) -> int | None:
    """Return where a text goes on after a beginning, which may have other white space; None where it has another."""
    if text.startswith(head):
        return len(head)
    letters = r"\s*".join(map(re.escape, "".join(head.split())))
    match = re.compile(rf"\s*{letters}\s*").match(text)
    return None if match is None else match.end()


def _parts_from(rendering: Rendering, at: int) -> tuple[Part, ...]:
    """Return what a rendering has from a character of the template on, as parts of a segment."""
    parts: list[Part] = []
    for start, stop, expression, _ in rendering.pieces:
        if at <= start < stop and expression is not None:
            parts.append((None, expression))
        elif stop > at and expression is None:
            parts.append((rendering.text[max(start, at) : stop], None))
    return tuple(parts)
