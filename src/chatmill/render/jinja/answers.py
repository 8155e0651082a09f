"""The answers of a conversation, from lists of outputs: what P(i), A(i) and F have in common is never looked at again.

Renderings are compared as lists of numbers. Where they part, the rules of `turns` look at a window of a few outputs.
What they find depends on these outputs and on a few questions about texts, so that it is remembered like a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from chatmill.core.conversation import Role
from chatmill.core.kinds import Part
from chatmill.render.jinja.expressions import Notes
from chatmill.render.jinja.labels import Said
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.renderer import Refusal, Renderer
from chatmill.render.jinja.rendering import Rendering, begins_with, until_character
from chatmill.render.jinja.segments import Place, common, relative_key
from chatmill.render.jinja.shown import not_shown
from chatmill.render.jinja.stops import StopTokens
from chatmill.render.jinja.tries import Look, Node, Output
from chatmill.render.jinja.turn_run import Turn, TurnRun
from chatmill.render.jinja.turns import Turns, is_continued, next_views

PLAIN = Said()


class Found(NamedTuple):
    """The answer of a message, and where it is in a list of outputs; or why there is none."""

    message: int
    reason: str = ""
    detail: str = ""
    is_general: bool = True
    stop: str = ""
    is_appended: bool = False
    """The stop is not in A(i): the next message's header would write it."""
    is_there: bool = False
    """Whether the outputs that were looked at have the answer behind its own prompt, character by character."""
    begin: Place = Place(0, 0, 0)
    stop_begin: Place = Place(0, 0, 0)
    end: Place = Place(0, 0, 0)


UNDECIDED = "undecided"
"""Windows are alike, and end before the answer does."""


class Answers:
    """The renderings of one conversation that the rules speak of, and the answers in them."""

    def __init__(self, renderer: Renderer, view: RecordView, stops: StopTokens) -> None:
        """Nothing is rendered yet."""
        self.renderer, self.view, self.stops = renderer, view, stops
        self.messages = view.conversation.messages
        self._prompts: dict[int, list[Output] | Refusal] = {}
        self._ends: dict[int, list[Output] | Refusal] = {}
        self._hidden: dict[int, tuple[str, str] | None] = {}
        self._found: dict[int, Found] = {}
        self._run = TurnRun(view, len(self.messages), renderer.tries, lambda **_: None)
        self._shown: tuple[list[Output], dict[int, list[int]]] = ([], {})

    def is_keyed(self) -> bool:
        """Whether all that was asked of texts is part of every record's key."""
        return self.view.is_keyed

    def prompt(self, index: int) -> list[Output] | Refusal:
        """Return P(index)."""
        if index not in self._prompts:
            self._prompts[index] = self.renderer.outputs(self.view, index, True)
        return self._prompts[index]

    def until(self, index: int) -> list[Output] | Refusal:
        """Return A(index): all messages up to this one, whatever its role."""
        if index not in self._ends:
            self._ends[index] = self.renderer.outputs(self.view, index + 1, False)
        return self._ends[index]

    def whole(self) -> list[Output]:
        """Return F, or raise the template's own refusal."""
        found = self.until(len(self.messages) - 1)
        if isinstance(found, Refusal):
            raise self.renderer.refused(found)
        return found

    def speaking(self) -> Iterator[int]:
        """Yield the assistant messages."""
        return (i for i, message in enumerate(self.messages) if message.role is Role.ASSISTANT)

    def answer(self, index: int, longer: list[Output] | None = None) -> Found:
        """Return the answer of an assistant message, and where it is in A(index) or in a longer rendering."""
        found = self._found.get(index)
        if found is None:
            found = self._found[index] = self._answer(index)
        ended = self._ends.get(index, [])
        if longer is None or found.reason or longer is ended or isinstance(ended, Refusal):
            return found
        same = common(ended, longer)
        if same > found.end.entry and not found.is_appended:
            return found
        return self._in_longer(index, found, ended, longer, max(0, same - 1))

    def _answer(self, index: int) -> Found:
        prompt, ended = self.prompt(index), self.until(index)
        if isinstance(prompt, Refusal):
            return Found(index, "no_prompt", prompt.message, prompt.is_general)
        if isinstance(ended, Refusal):
            return Found(index, "template_refused", ended.message, ended.is_general)
        first = common(prompt, ended) - 1
        while first > 0 and not self.renderer.segments[ended[first][0]].owners:
            first -= 1
        first = max(0, first)
        key = self._key(index, prompt[first:], ended[first:])
        found: Found = self.remembered(key, index, partial(self._looked, index, first, prompt, ended))
        if found.reason == "probe":
            found = self._with_next(index, key, first, prompt, ended)
        hidden = self.hidden(ended, index)
        if hidden is not None and found.reason != "prompt_not_in_history":
            return Found(index, *hidden, is_general=hidden[0] != "origin_lost")
        return _moved(found, index, first)

    def _in_longer(self, index: int, found: Found, ended: list[Output], longer: list[Output], start: int) -> Found:
        """Return where an answer is in a longer rendering, from windows that grow until that is decided."""
        size = 1
        while True:
            mine, theirs = ended[start : start + 1 + size], longer[start : start + 2 + 2 * size]
            is_whole = start + 1 + size >= len(ended) if found.is_appended else start + size >= found.end.entry
            is_end = start + 2 + 2 * size >= len(longer)
            places = [found.begin, found.stop_begin, found.end] if is_whole else []
            own = [place._replace(entry=place.entry - start) for place in places]
            windows = (relative_key(one, index, self.renderer.segments) for one in (mine, theirs))
            key = ("longer", found.stop, found.is_appended, tuple(own), is_end, *windows)
            there = self.remembered(key, index, partial(self._compared, found, own, mine, theirs, is_end))
            if there == UNDECIDED:
                size *= 2
                continue
            if there is None:
                return found._replace(is_there=False)
            begin, stop, end = (place._replace(entry=place.entry + start) for place in there)
            return found._replace(begin=begin, stop_begin=stop, end=end)

    def _compared(
        self,
        found: Found,
        own: list[Place],
        mine: list[Output],
        theirs: list[Output],
        is_end: bool,
        notes: Notes,
    ) -> tuple[Place, Place, Place] | str | None:
        """Compare windows of A(i) and of a longer rendering; `own` are the places of the answer, if they have all of it."""
        segments = self.renderer.segments
        ended, longer = segments.window(mine, 0, self.view), segments.window(theirs, 0, self.view)
        shorter = ended.rendering
        stop = len(shorter.text)
        if own and not found.is_appended:
            stop = ended.at(own[1])
            shorter = until_character(shorter, ended.at(own[2]))
        if not begins_with(longer.rendering, shorter, notes):
            is_short = not is_end and begins_with(shorter, longer.rendering, notes)
            return UNDECIDED if is_short else None
        if not own:
            return UNDECIDED
        if found.is_appended and not longer.rendering.text.startswith(found.stop, stop):
            return None
        begin = own[0] if own[0].entry < 0 else longer.place(ended.at(own[0]))
        return begin, longer.place(stop), longer.place_behind(stop + len(found.stop))

    def _with_next(self, index: int, key: Any, first: int, prompt: list[Output], ended: list[Output]) -> Found:
        """Look again, with what the template writes before a next message."""
        views = list(next_views(self.view, index))
        next_outputs = [self.renderer.outputs(view, index + 2, False) for view in views]
        self.view.is_keyed = self.view.is_keyed and all(view.is_keyed for view in views)
        windows = [
            None if isinstance(one, Refusal) else one[first:] if one[:first] == ended[:first] else one
            for one in next_outputs
        ]
        keys = tuple(None if one is None else relative_key(one, index, self.renderer.segments) for one in windows)
        renderings = [
            None if one is None else self.renderer.segments.window(one, 0, view).rendering
            for one, view in zip(windows, views, strict=True)
        ]
        return self.remembered(  # type: ignore[no-any-return]
            (*key, keys),
            index,
            lambda notes: self._looked(index, first, prompt, ended, notes, renderings),
        )

    def _key(self, index: int, *lists: Sequence[Output]) -> tuple[Any, ...]:
        said = self.said(index)
        return ("answer", said, *(relative_key(one, index, self.renderer.segments) for one in lists))

    def said(self, index: int) -> Said:
        """Return what an assistant message says, by its fields of Harmony."""
        message = self.messages[index]
        if message.channel is None and message.recipient is None:
            return PLAIN
        asked = [("equals", ("field", (index, "channel")), name) for name in ("analysis", "commentary", "final")]
        if message.channel is not None and not self.renderer.tries.is_keyed(asked):
            self.view.is_keyed = False
        part = Part.CONTENT if message.recipient is None else Part.TOOL_CALL
        part = Part.REASONING if message.channel == "analysis" else part
        return Said(part, is_continued(message), message.channel == "final")

    def remembered(self, key: Any, index: int, look: Callable[[Notes], Any]) -> Any:
        """Return what was found for the same outputs and replies; else look, and remember it."""
        tries = self.renderer.tries
        table = tries.table("looks")
        turn = Turn(self._run, index, None, True, [])
        node: Any = table.get(key)
        while node.__class__ is Node:
            node = node.children.get(node.ask(turn))
        if node is None:
            notes = Notes()
            found = look(notes)
            if not getattr(found, "is_general", True):
                self.view.is_keyed = False
                return found
            self._run.turn = turn.record()
            for question, reply in notes.replies.items():
                self._run.note(question, reply)
            node = tries.learn(table, key, turn.trace, Look(found))
        if not node.is_keyed:
            self.view.is_keyed = False
        return node.found

    def _looked(
        self,
        index: int,
        first: int,
        prompt: list[Output],
        ended: list[Output],
        notes: Notes,
        with_next: list[Rendering | None] | None = None,
    ) -> Found:
        """Find the answer by the rules, in windows of the outputs; entries are counted from the first of them."""
        segments, view = self.renderer.segments, self.view
        window = segments.window(ended[first:], 0, view)
        turns = _WindowTurns(self.renderer, view, self.stops, notes)
        turns.show(index, segments.window(prompt[first:], 0, view).rendering, window.rendering, with_next)
        try:
            answer = turns.answer(index)
        except _NeedsNext:
            return Found(0, "probe")
        if answer.reason:
            return Found(0, answer.reason, answer.detail, answer.is_general)
        begin = window.place(answer.begin)
        if answer.appended:
            return Found(0, "", "", True, answer.stop, True, True, begin)
        places = begin, window.place(answer.stop_begin), window.place_behind(answer.stop_begin + len(answer.stop))
        return Found(0, "", "", True, answer.stop, False, True, *places)

    def hidden(self, outputs: list[Output], index: int, *, tools: bool = False) -> tuple[str, str] | None:
        """Return what outputs leave out of the messages up to one, as a reason and a detail."""
        before, entries = self._shown
        same = common(before, outputs)
        segments = self.renderer.segments
        changed = set()
        for number, base in before[same:]:
            changed |= {base + owner for owner in segments[number].owners}
        for message in changed:
            entries[message] = [entry for entry in entries[message] if entry < same]
        for entry, (number, base) in enumerate(outputs[same:], same):
            for owner in segments[number].owners:
                entries.setdefault(base + owner, []).append(entry)
                changed.add(base + owner)
        self._shown = (outputs, entries)
        for message in changed:
            self._hidden.pop(message, None)
        for number, _ in outputs:
            if segments[number].lost:
                return "origin_lost", f"text {segments[number].lost[:40]!r} cannot be followed back"
        for message in range(index + 1):
            if message not in self._hidden:
                self._hidden[message] = self._hidden_in([outputs[entry] for entry in entries.get(message, [])], message)
            if self._hidden[message] is not None:
                return self._hidden[message]
        if tools and self.view.conversation.tools and not any(segments[number].shows_tools for number, _ in outputs):
            return "not_shown", "tools"
        return None

    def _hidden_in(self, outputs: list[Output], message: int) -> tuple[str, str] | None:
        """Return what some outputs leave out of a message."""
        segments = self.renderer.segments
        shape = self._run.shapes[message]
        key = ("shown", shape, relative_key(outputs, message, segments))

        def look(notes: Notes) -> tuple[str, str] | tuple[()]:
            rendering = segments.window(outputs, 0, self.view).rendering
            own = tuple(piece for piece in rendering.pieces if piece.owner == message)
            found = not_shown(rendering._replace(pieces=own), self.view, [message], notes, tools=False)
            return (found and (found[0], found[1].replace(f"messages[{message}]", "messages[{}]"))) or ()

        found = self.remembered(key, message, look)
        return (found[0], found[1].replace("messages[{}]", f"messages[{message}]")) if found else None

    def opening(self, index: int) -> str:
        """Return the generation prompt of a message: what P(index) ends with that is of no message."""
        prompt = self.prompt(index)
        if isinstance(prompt, Refusal):
            return ""
        texts: list[str] = []
        for number, base in reversed(prompt):
            facts = self.renderer.segments[number]
            if base >= 0 or facts.owners or facts.shows_tools:
                break
            texts.append("".join(literal or "" for literal, _ in facts.parts))
        return "".join(reversed(texts))


class _NeedsNext(Exception):  # noqa: N818
    """The rules ask what the template writes before a next message."""


class _WindowTurns(Turns):
    """The rules, on windows of renderings."""

    def __init__(self, renderer: Renderer, view: RecordView, stops: StopTokens, notes: Notes) -> None:
        super().__init__(renderer, view, stops, None)
        self.notes = notes

    def show(self, index: int, prompt: Rendering, ended: Rendering, with_next: list[Rendering | None] | None) -> None:
        """Have the renderings of one message be these windows."""
        self._prompts[index], self._ends[index], self._nexts = prompt, ended, with_next

    def _hidden(self, ended: Rendering, index: int) -> None:
        return None

    def _with_next(self, index: int) -> Iterator[Rendering | Refusal]:
        if self._nexts is None:
            raise _NeedsNext
        return (one for one in self._nexts if one is not None)


def _moved(found: Found, index: int, first: int) -> Found:
    """Return what was found for a message, with entries that are counted from the first output of all."""
    places = [place._replace(entry=place.entry + first) for place in (found.begin, found.stop_begin, found.end)]
    return found._replace(message=index, begin=places[0], stop_begin=places[1], end=places[2])
