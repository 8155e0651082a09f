"""The answers of a conversation, found by rule: for each assistant message its prompt, its answer and its stop.

P(i) is the rendering of the messages before i with the generation prompt, A(i) that of the messages up to i without
one. The answer of i is what A(i) has behind P(i), up to and including its stop. See docs/masks.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any, NamedTuple
from zlib import crc32

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.render.jinja.beginnings import begins_at_once, begins_with, difference, literal_from, until_character
from chatmill.render.jinja.composition import ComposedRendering
from chatmill.render.jinja.expressions import Question, root
from chatmill.render.jinja.notes import Notes
from chatmill.render.jinja.pieces import Rendering
from chatmill.render.jinja.record import RecordView
from chatmill.render.jinja.renderings import Refusal, Renderer
from chatmill.render.jinja.shown import not_shown

PROBE_TEXT = "Next."


class Answer(NamedTuple):
    """The answer of one assistant message, or the reason why there is none."""

    message: int
    reason: str = ""
    """Empty for an answer that is proved; else a code of docs/masks.md."""
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


@lru_cache(maxsize=256)
def _any_of(names: tuple[str, ...]) -> re.Pattern[str] | None:
    ordered = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


class StopTokens(NamedTuple):
    """The tokens that end an answer."""

    names: tuple[str, ...]
    same: Mapping[str, tuple[str, ...]] = {}
    """Stops that count as the same one: what F may have in the place of A(i)'s stop."""

    def pattern(self) -> re.Pattern[str] | None:
        """Finds a stop token; the longest one first."""
        return _any_of(self.names)

    def are_same(self, one: str, other: str) -> bool:
        """Whether two stops end an answer in the same way."""
        return one == other or other in self.same.get(one, ())


class Turns:
    """All renderings of one conversation that the rules speak of, made when they are asked for."""

    def __init__(self, renderer: Renderer, view: RecordView, stops: StopTokens, bos: str | None) -> None:
        """`view` is the conversation as the template sees it; `bos` is the token that begins a document."""
        self._renderer, self.view, self.stops, self.bos = renderer, view, stops, bos
        self.shape = view.shape()
        self._composition = renderer.composition(view, self.shape)
        self._noted: set[int] = set()
        self._prompts: dict[int, Rendering | Refusal] = {}
        self._ends: dict[int, Rendering | Refusal] = {}
        self._closings: dict[tuple[int, bool], str] = {}
        self._stable: dict[Answer, bool] = {}
        self._probed: list[tuple[RecordView, Rendering]] = []
        """Renderings with a message more, made to see what ends an answer."""
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
        found = self._renderer.render(self.view, self.shape, count, prompt, self._composition)
        if isinstance(found, ComposedRendering):
            for segment in found.segments:
                if id(segment) not in self._noted:
                    self._noted.add(id(segment))
                    for question, answer in segment.questions:
                        self.notes.note(question, answer)
        else:
            for question, answer in found.questions.items():
                self.notes.note(question, answer)
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
        near, base = ended.near(index)
        hidden = self._hidden(ended, near, index)
        if hidden:
            return Answer(index, *hidden, is_general=hidden[0] != "origin_lost")
        begin = prompt.size - base
        late = next((p for p in near.pieces if p.owner == index and p.start < begin < p.stop), None)
        if late is not None or begin < 0:
            return Answer(index, "prompt_not_in_history", "the generation prompt ends inside the message's own text")
        first = min((piece.start for piece in near.pieces if piece.owner == index), default=begin)
        pattern = self.stops.pattern()
        if pattern is not None and pattern.search(near.text, begin, max(begin, first)):
            return Answer(index, "prompt_not_in_history", "the template ends another answer behind the prompt")
        behind = max([begin, *(piece.stop for piece in near.pieces if piece.owner == index)])
        foreign = self._foreign_text(near, index, begin, behind)
        if foreign is not None:
            return Answer(index, "content_after_result", f"{foreign[:40]!r} is inside the answer", is_general=False)
        stop = self._stop_behind(near, behind)
        if stop is not None:
            place = base + stop.start()
            return Answer(index, begin=base + begin, end=base + stop.end(), stop=stop.group(), stop_begin=place)
        appended = self._appended_stop(index, ended)
        if appended is None:
            return Answer(
                index, "no_stop", f"the template writes {literal_from(near, behind)[:40]!r} behind the answer"
            )
        size = ended.size
        return Answer(index, begin=base + begin, end=size, stop=appended, stop_begin=size, appended=True)

    def _hidden(self, ended: Rendering, near: Rendering, index: int) -> tuple[str, str] | None:
        """What A(index) leaves out; messages that it writes as F does are looked at in F."""
        differing = ended.differing(self.whole)
        conversation = self.view.conversation
        if differing is None:
            return not_shown(ended, conversation, range(index + 1), self.notes, tools=False)
        changed = [one for one in differing if one != index]
        return not_shown(near, conversation, [index], self.notes, tools=False) or (
            not_shown(ended, conversation, changed, self.notes, tools=False) if changed else None
        )

    def _foreign_text(self, ended: Rendering, index: int, begin: int, behind: int) -> str | None:
        """Text of another message, or of the tools, that an answer goes on behind; later records must agree."""
        for piece in ended.pieces:
            if piece.expression is None or piece.owner == index or not begin <= piece.start < behind:
                continue
            self.notes.note(("filled", piece.expression), piece.start < piece.stop)
            if piece.start < piece.stop:
                return ended.text[piece.start : piece.stop]
        return None

    def _stop_behind(self, rendering: Rendering, at: int) -> re.Match[str] | None:
        """The first stop token in template text behind a place, before any other message's text."""
        pattern = self.stops.pattern()
        if pattern is None:
            return None
        for piece in rendering.pieces:
            if piece.stop <= at and piece.start < piece.stop:
                continue
            if piece.expression is not None:
                if piece.start >= at and piece.start < piece.stop:
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
            shape = view.shape()
            found = self._renderer.render(view, shape, index + 2, False, self._renderer.composition(view, shape))
            if isinstance(found, Refusal):
                continue
            self._probed.append((view, found))
            for question, answer in found.questions.items():
                if not _is_about(question, index + 1):
                    self.notes.note(question, answer)
            near, base = found.near(index)
            own = [piece.stop for piece in near.pieces if piece.owner == index]
            if own:  # the next message may change this one (GLM drops its reasoning), but not where it ends
                behind = max(own)
            elif begins_with(found, ended, self.notes):
                behind = ended.size - base
            else:
                continue
            stop = self._stop_behind(near, behind)
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
        if not answer.appended and longer.surely_begins_with(ended):
            return True
        found = self._has(*longer.from_difference(ended, all_of_it=False), answer, ended.size)
        if found is None:
            found = self._has(*longer.from_difference(ended), answer, ended.size)
        return bool(found)

    def _has(self, longer: Rendering, ended: Rendering, answer: Answer, size: int) -> bool | None:
        """The same for what is behind a common beginning; None where the longer one may go on."""
        stop_begin = answer.stop_begin - (size - ended.size)
        if stop_begin < 0:  # both have the whole answer in common
            return True
        kept = ended if answer.appended else until_character(ended, stop_begin)
        begins = begins_at_once(longer, kept, self.notes)
        if not begins:
            return begins
        stop = self.stops.pattern()
        found = stop.match(longer.text, len(kept.text)) if stop else None
        if found is None:
            return None if longer.size - kept.size <= max(map(len, self.stops.names), default=0) else False
        return self.stops.are_same(answer.stop, found.group())

    def closing(self, message: int, *, behind_stop: bool = False) -> str:
        """Template text that A(message) has behind the message's own text, or behind the first stop token there."""
        found = self._closings.get((message, behind_stop))
        if found is None:
            write = self._closing_behind_stop if behind_stop else self._closing
            found = self._closings[message, behind_stop] = write(message)
        return found

    def _closing(self, message: int) -> str:
        ended = self.until(message)
        if isinstance(ended, Refusal):
            return ""
        near, _ = ended.near(message)
        last = max((piece.stop for piece in near.pieces if piece.owner == message), default=None)
        return "" if last is None else literal_from(near, last)

    def _closing_behind_stop(self, message: int) -> str:
        ended, prompt = self.until(message), self.prompt(message)
        pattern = self.stops.pattern()
        if isinstance(ended, Refusal) or pattern is None:
            return ""
        near, base = ended.near(message)
        behind = prompt.size - base if isinstance(prompt, Rendering) else near.size
        last = max((piece.stop for piece in near.pieces if piece.owner == message), default=max(0, behind))
        found = pattern.search(near.text, last)
        return literal_from(near, found.end()) if found else ""

    def opening(self, message: int) -> str | None:
        """Template text at the end of P(message), from the last text of the record on; None without a prompt."""
        prompt = self.prompt(message)
        if isinstance(prompt, Refusal):
            return None
        near, _ = prompt.near(message)
        last = max((piece.stop for piece in near.pieces if piece.expression is not None), default=0)
        return near.text[last:]

    def check(self) -> None:
        """Compare with plain Jinja: F, one prompt and one answer, and all that use a segment in new surroundings.

        A difference says that segments depend on more than was known of their surroundings. Nothing was made of them
        yet: the conversation can be gone through again.
        """
        speaking = [k for k, message in enumerate(self.messages) if message.role is Role.ASSISTANT]
        chosen = speaking[crc32(repr(self.shape).encode()) % len(speaking)] if speaking else -1
        self._compare(self.view, self.whole, len(self.messages), False)
        for index, rendering in self._prompts.items():
            if index == chosen or self._is_new(rendering):
                self._compare(self.view, rendering, index, True)
        for index, rendering in self._ends.items():
            if (index == chosen or self._is_new(rendering)) and rendering is not self.whole:
                self._compare(self.view, rendering, index + 1, False)
        for view, rendering in self._probed:
            if self._is_new(rendering):
                self._compare(view, rendering, len(view.conversation.messages), False)

    def _is_new(self, rendering: Rendering | Refusal) -> bool:
        """Whether a rendering is put together in a way that was never compared."""
        if not isinstance(rendering, ComposedRendering):
            return False
        return not self._renderer.segments.are_confirmed(rendering.doubts)

    def _compare(self, view: RecordView, rendering: Rendering | Refusal, count: int, prompt: bool) -> None:
        renderer = self._renderer
        if isinstance(rendering, Refusal):
            return
        if renderer.plain_if_any(view, count, prompt) != rendering.text:
            if self._is_new(rendering) or not isinstance(rendering, ComposedRendering):
                renderer.segments.refine()
            raise renderer.unlike(self.view)  # for good where such a use was confirmed: records before may be wrong
        if isinstance(rendering, ComposedRendering):
            renderer.segments.confirm(rendering.doubts)


def _is_about(question: Question, index: int) -> bool:
    """Whether a question is about one of the messages from this index on."""
    for part in question[1:]:
        inner: Any = part
        while isinstance(inner, tuple) and inner and inner[0] == "apply":
            inner = inner[3]
        path = root(inner) if isinstance(inner, tuple) and inner and inner[0] in ("field", "const", "json") else inner
        if isinstance(path, tuple) and path and isinstance(path[0], int) and path[0] >= index:
            return True
    return False
