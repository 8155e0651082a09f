"""The answers of a conversation, from lists of outputs: what P(i), A(i) and F have in common is never looked at again.

Renderings are compared as lists of numbers. Where they part, the `rules` look at a window of a few outputs.
What they find depends on these outputs and on a few questions about texts, so that it is remembered like a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Message
from chatmill.core.kinds import Part, RoleCode
from chatmill.core.native.replayer import Ended, FoundAnswer, FoundAnswers, Renderings
from chatmill.render.jinja.expressions import Notes
from chatmill.render.jinja.found import UNDECIDED, Found, cursors_of, with_cursors
from chatmill.render.jinja.hidden_texts import HiddenTexts
from chatmill.render.jinja.labels import Said
from chatmill.render.jinja.look_memory import LookMemory
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.renderer import Refusal, Renderer
from chatmill.render.jinja.rendering import Rendering, begins_with, literal_from, note_emptiness, until_character
from chatmill.render.jinja.replay import Request
from chatmill.render.jinja.rules import NeedsNext, NeedsPrompt, Rules, added_by, is_continued, probe
from chatmill.render.jinja.segments import Cursor, common, relative_key
from chatmill.render.jinja.stops import StopTokens
from chatmill.render.jinja.tries import Output

PLAIN = Said()
NO_KEY = -1
"""In place of the number of a key."""


class Answers:
    """The renderings of one conversation that the rules speak of, and the answers in them."""

    def __init__(
        self,
        renderer: Renderer,
        view: RecordView,
        stops: StopTokens,
        known: tuple[Renderings, FoundAnswers] | None = None,
    ) -> None:
        """`known` are the renderings by which answers are found, where they are made already."""
        self.renderer, self.view, self.stops = renderer, view, stops
        self._made: dict[Request, list[Output] | Refusal] = {}
        self._found: dict[int, Found] = {}
        self._apart: dict[int, tuple[list[Output], Found]] = {}
        """Answers before which A(i) is not P(i): P(i) with their own turn, and what is wrong with A(i)."""
        self._openings: dict[int, str] = {}
        self._alike: dict[tuple[int, int], int] = {}
        self._count = len(view.roles)
        self._is_local = True
        """Whether all that was looked at is in the windows of `replay.h`."""
        view.check_arguments()
        self._remember()
        self._render(known)

    def _remember(self) -> None:
        """Have what is known now of the template be what answers are found by."""
        self._memory = LookMemory(self.renderer, self.view)
        self._hidden = HiddenTexts(self.view, self.renderer.segments, self._memory)
        self.remembered = self._memory.remembered

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation's messages."""
        return self.view.conversation.messages

    def _render(self, known: tuple[Renderings, FoundAnswers] | None) -> None:
        """Make all renderings that answers are found by."""
        is_trained, renderer = self.view.is_trained, self.renderer
        speaking = [i for i in self.speaking() if is_trained[i]]
        self._probes: dict[int, list[int]] = {}
        """What may follow an answer, by its message."""
        probes = probe(self.view, speaking) if renderer.needs_next else None
        if probes is not None:
            self._probes = dict(zip(speaking, probes.tolist(), strict=True))
        listed, answers = renderings_of(speaking, self._count, probes)
        requests, rows = [(size, bool(prompt), one) for size, prompt, one in listed.tolist()], answers.tolist()
        self._requests = {one: number for number, one in enumerate(requests)}
        self._renderings: Renderings | None = None
        self._is_whole_shown = False
        self._known: tuple[Renderings, FoundAnswers] | None = None
        self._numbers: dict[int, int] = {}
        """The places of answers in `FoundAnswers`, by message."""
        self._rows: dict[int, FoundAnswer] = {}
        """Of `FoundAnswers`, by message."""
        known = known or renderer.known(self.view, listed, answers, self._is_hidden)
        if known is None:
            if isinstance(self.until(self._count - 1), Refusal):  # no answer will be asked for
                return
            left = [one for one in requests if one not in self._made]
            self._made.update(zip(left, renderer.many(self.view, left), strict=True))
            self._remember()
            known = renderer.known(self.view, listed, answers, self._is_hidden)
        self._known, self._numbers = known, {row[0]: number for number, row in enumerate(rows)}
        if known is not None:
            self._renderings, found = known
            self._is_whole_shown = found.hidden_in_whole == -1
            if self._is_whole_shown:
                pairs = zip(rows, found.rows, strict=True)
                self._rows = {row[0]: one for row, one in pairs if one.hidden == -1 and one.key != NO_KEY}

    def _is_hidden(self, message: int, outputs: list[Output]) -> int:
        """Reply to `Ask.SHOWN`."""
        was_keyed, self.view.is_keyed = self.view.is_keyed, True
        is_hidden = bool(self._hidden.of_message(outputs, message))
        is_keyed = self.view.is_keyed and self._memory.classes is not None
        self.view.is_keyed = is_keyed and was_keyed
        return is_hidden + (0 if is_keyed else 2)

    def _outputs(self, count: int, prompt: bool, probe: int = -1) -> list[Output] | Refusal:
        key = (count, prompt, probe)
        found = self._made.get(key)
        if found is None:
            number = self._requests.get(key, -1)
            if self._renderings is not None and number >= 0 and self._renderings.ended(number) == Ended.KNOWN:
                found = self._renderings.outputs(number)
            else:
                found = self.renderer.many(self.view, [key])[0]
            self._made[key] = found
        return found

    def prompt(self, index: int) -> list[Output] | Refusal:
        """Return P(index)."""
        return self._outputs(index, True)

    def until(self, index: int) -> list[Output] | Refusal:
        """Return A(index): all messages up to this one, whatever its role."""
        return self._outputs(index + 1, False)

    def trained(self, index: int) -> list[Output]:
        """Return the outputs that train an answer where F does not have it: A(index), or P(index) and its own turn."""
        outputs = self._apart[index][0] if index in self._apart else self.until(index)
        assert not isinstance(outputs, Refusal)
        return outputs

    def why_apart(self, index: int) -> Found | None:
        """Return why A(index) does not have an answer after its prompt, and what trains it; None if A(index) has it."""
        if index not in self._apart:
            return None
        found = self._apart[index][1]
        way_out = "`expand: turns` and `expand: tree` train it after its prompt"
        return found._replace(message=index, detail=f"{found.detail}; {way_out}")

    def whole(self) -> list[Output]:
        """Return F, or raise the template's own refusal."""
        found = self.until(self._count - 1)
        if isinstance(found, Refusal):
            raise self.renderer.refused(found)
        return found

    def speaking(self) -> Iterator[int]:
        """Yield the assistant messages."""
        return (i for i, role in enumerate(self.view.roles) if role is RoleCode.ASSISTANT)

    def answer(self, index: int, longer: list[Output] | None = None) -> Found:
        """Return the answer of an assistant message, and where it is in A(index) or in a longer rendering."""
        found = self._own(index)
        if longer is None or found.reason:
            return found
        ended = self.trained(index)
        if longer is ended:
            return found
        same = self._same(ended, longer)
        if same > found.first + found.end.entry and not found.is_appended:
            return found._replace(is_there=True)
        return self._in_longer(index, found, ended, longer, max(0, same - 1))

    def in_whole(self, index: int) -> Found:
        """Return the same in F; what was found for an answer with the same key is not looked for again."""
        found = self._own(index)
        row = None if index in self._apart else self._row(index)
        if row is None:
            return self.answer(index, self.whole())
        return found if index == self._count - 1 else self._in_other(index, row, row.same, row.more, self.whole())

    def in_ended(self, index: int, last: int) -> Found | None:
        """Return an answer in the outputs that train a later one; None where it is not there."""
        row, replay, numbers = self._row(index), self.renderer.tries.replay, self._numbers
        if row is None or replay is None or self._known is None or index in self._apart or last in self._apart:
            found = self.answer(index, self.trained(last))
        else:
            same, more = replay.part(numbers[index], numbers[last], self._known)
            known = None if more == NO_KEY else self._memory.kept(_key_in_longer(row, same, more))
            if known is not None and not known.found.is_there:
                return None
            ended = self.trained(last)
            is_keyed = more != NO_KEY
            found = self._in_other(index, row, same, more, ended) if is_keyed else self.answer(index, ended)
        return found if found.is_there else None

    def _in_other(self, index: int, row: FoundAnswer, same: int, more: int, longer: list[Output]) -> Found:
        """Return an answer in a longer rendering, which is like A(index) up to `same`."""
        found = self._own(index)
        if found.reason or (same > row.first + found.end.entry and not found.is_appended):
            return found
        key = _key_in_longer(row, same, more)
        if key[0] != NO_KEY:
            return self._kept(key, row.first, index, lambda: self.answer(index, longer))
        not_there = self._kept(key, 0, index, lambda: self._unless_there(index, longer))
        return not_there if not_there.is_there else found._replace(is_there=False)

    def _row(self, index: int) -> FoundAnswer | None:
        """Return what compiled code says of an answer, as long as its classes hold."""
        return self._rows.get(index) if self._memory.classes is not None else None

    def _own(self, index: int) -> Found:
        """Return the answer of a message, and where it is in A(index)."""
        found = self._found.get(index)
        if found is None:
            row = self._row(index)
            if row is None:
                found = self._answer(index)
            else:
                found = self._kept(row.key, row.first, index, partial(self._answer, index))
            self._found[index] = found
        return found

    @property
    def version(self) -> int:
        """Of the classes that answers are told apart by; -1 where none are."""
        return self._memory.version

    def known_by_key(self, index: int) -> tuple[Found, tuple[str, str] | None] | None:
        """Return an answer, as nothing but its key decides it, and what stands before it where that is so decided too.

        That is what the turn has before the answer, and its generation prompt. None where more decides the answer.
        """
        row, found = self._row(index), self._own(index)
        if row is None or self._memory.kept(row.key) is None:
            return None
        if found.reason:
            return found, None
        stands = self.header(index) or "", self.opening(index)
        is_keyed = all(self._memory.kept((name, row.key)) is not None for name in ("header", "opening"))
        return found, stands if is_keyed else None

    def known_in_longer(self, index: int, last: int, key: tuple[int, int]) -> Found | None:
        """Return an answer in the rows of a later one, -1 for F, as a key decides it; None where more does."""
        if last < 0:
            self.in_whole(index)
        else:
            self.in_ended(index, last)
        row, known = self._row(index), self._memory.kept(key)
        if row is None or known is None:
            return None
        found: Found = known.found
        return found._replace(message=index, first=found.first + row.first)

    def _unless_there(self, index: int, longer: list[Output]) -> Found:
        """Look for an answer in a longer rendering; where it is not there, that says nothing about the answer."""
        there = self.answer(index, longer)
        if there.is_there:
            self._is_local = False
            return there
        return Found(index)

    def _kept(self, key: Any, first: int, index: int, look: Callable[[], Found]) -> Found:
        """Return what was found for a key, or look; places are kept as they are to `first`."""
        known = self._memory.kept(key)
        if known is not None:
            found: Found = known.found
            return found._replace(message=index, first=found.first + first)
        was_keyed, self.view.is_keyed, self._is_local = self.view.is_keyed, True, True
        found = look()
        is_kept = self.view.is_keyed and self._is_local and not found.is_quoting
        self.view.is_keyed = self.view.is_keyed and was_keyed
        if is_kept:
            self._memory.keep(key, found._replace(first=found.first - first))
        return found

    def _same(self, outputs: list[Output], longer: list[Output]) -> int:
        """Return how many outputs two renderings begin with alike."""
        key = (id(outputs), id(longer))  # both are kept as long as this is
        same = self._alike.get(key)
        if same is None:
            same = self._alike[key] = common(outputs, longer)
        return same

    def _answer(self, index: int) -> Found:
        prompt, ended = self.prompt(index), self.until(index)
        if isinstance(prompt, Refusal):
            return Found(index, "no_prompt", prompt.message)
        if isinstance(ended, Refusal):
            return Found(index, "template_refused", ended.message)
        found = self._answer_in(index, prompt, ended)
        if found.reason != "prompt_not_in_history":
            return found
        apart = self.renderer.segments.with_own_turn(prompt, ended, index)
        if apart is None:
            return found
        self._is_local = False
        there = self._answer_in(index, prompt, apart)
        if there.reason:
            return found if there.reason == found.reason else there
        self._apart[index] = apart, found
        return there._replace(is_there=False)

    def _answer_in(self, index: int, prompt: list[Output], ended: list[Output]) -> Found:
        """Return the answer of a message in outputs that may begin with its prompt."""
        first, facts = common(prompt, ended) - 1, self.renderer.segments.facts
        while first > 0 and not facts[ended[first][0]].owners:
            first -= 1
        first = max(0, first)
        mine, theirs = prompt[first:], ended[first:]
        key = self._key(index, mine, theirs)
        look = partial(self._looked, index, first, prompt, ended)
        found: Found = self.remembered(key, index, look)
        opening = None
        if found.reason == "prompt":
            opening = self.opening(index)
            key = (*key, opening)
            look = partial(self._looked, index, first, prompt, ended, opening=opening)
            found = self.remembered(key, index, look)
        if found.reason == "probe":
            found = self._with_next(index, key, first, prompt, ended, opening)
        hidden = self._hidden.find(ended, index)
        if hidden and found.reason != "prompt_not_in_history":
            return Found(index, "not_shown", hidden)
        return found._replace(message=index, first=first)

    def _in_longer(self, index: int, found: Found, ended: list[Output], longer: list[Output], start: int) -> Found:
        """Return where an answer is in a longer rendering, from windows that grow until that is decided."""
        size = 1
        while True:
            mine, theirs = ended[start : start + 1 + size], longer[start : start + 2 + 2 * size]
            end = found.first + found.end.entry
            is_whole = start + 1 + size >= len(ended) if found.is_appended else start + size >= end
            is_end = start + 2 + 2 * size >= len(longer)
            by = found.first - start
            to = index if is_whole else mine[0][1]
            windows = [relative_key(one, to, self.renderer.segments.facts) for one in (mine, theirs)]
            key = ("longer", found[4:] if is_whole else (), by if is_whole else 0, is_whole, is_end, *windows)
            look = partial(self._compared, found, by if is_whole else None, mine, theirs, is_end)
            there = self.remembered(key, to, look)
            if there == UNDECIDED:
                size *= 2
                self._is_local = False
                continue
            if there is None:
                return found._replace(is_there=False)
            return with_cursors(found, there)._replace(first=start, is_there=True)

    def _compared(
        self,
        found: Found,
        by: int | None,
        mine: list[Output],
        theirs: list[Output],
        is_end: bool,
        notes: Notes,
    ) -> list[Cursor] | str | None:
        """Compare windows of A(i) and of a longer rendering; `by` is where the answer is in them, if all of it is."""
        segments = self.renderer.segments
        own = [] if by is None else [place._replace(entry=place.entry + by) for place in cursors_of(found)]
        ended, longer = segments.window(mine, 0, self.view), segments.window(theirs, 0, self.view)
        for one in (ended, longer):
            note_emptiness(one.rendering, notes)
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
        if found.is_appended and not literal_from(longer.rendering, stop).startswith(found.stop):
            return None
        there = [longer.place(stop), longer.place_behind(stop + len(found.stop))]
        for number, place in enumerate((own[0], *own[3:])):
            find = longer.place_behind if number % 3 == 2 else longer.place  # after a stop, or before what begins
            there.insert(number and number + 2, place if place.entry < 0 else find(ended.at(place)))
        return there

    def _with_next(
        self, index: int, key: Any, first: int, prompt: list[Output], ended: list[Output], opening: str | None
    ) -> Found:
        """Look again, with what the template writes before a next message."""
        self.renderer.needs_next = True
        if index not in self._probes:
            self._is_local = False
            self._probes = {index: probe(self.view, [index])[0].tolist()}
        probes = [number for number in self._probes[index] if number >= 0]
        next_outputs = [self._outputs(index + 2, False, number) for number in probes]
        windows = [
            None if isinstance(one, Refusal) else one[self._start_of(index, one, first, ended) :]
            for one in next_outputs
        ]
        keys = tuple(None if one is None else relative_key(one, index, self.renderer.segments.facts) for one in windows)

        def look(notes: Notes) -> Found:
            views = [self.view.probed(index + 2, number) for number in probes]
            renderings = [
                None if one is None else self.renderer.segments.window(one, 0, view).rendering
                for one, view in zip(windows, views, strict=True)
            ]
            return self._looked(index, first, prompt, ended, notes, with_next=renderings, opening=opening)

        found: Found = self.remembered((*key, keys), index, look)
        return found

    def _start_of(self, index: int, outputs: list[Output], first: int, ended: list[Output]) -> int:
        """Return where outputs have text of a message first; if nowhere, where A(i) is no prompt any more."""
        facts = self.renderer.segments.facts
        own = (at for at, (number, base) in enumerate(outputs) if index - base in facts[number].owners)
        return next(own, first if outputs[:first] == ended[:first] else 0)

    def _key(self, index: int, *lists: Sequence[Output]) -> tuple[Any, ...]:
        said = self.said(index)
        return ("answer", said, *(relative_key(one, index, self.renderer.segments.facts) for one in lists))

    def said(self, index: int) -> Said:
        """Return what an assistant message says, by its fields of Harmony."""
        if self.view.is_plain:
            return PLAIN
        message = self.messages[index]
        if message.channel is None and message.recipient is None:
            return PLAIN
        asked = [("equals", ("field", (index, "channel")), name) for name in ("analysis", "commentary", "final")]
        if message.channel is not None and not self.renderer.tries.is_keyed(asked):
            self.view.is_keyed = False
        part = Part.CONTENT if message.recipient is None else Part.TOOL_CALL
        part = Part.REASONING if message.channel == "analysis" else part
        return Said(part, is_continued(message), message.channel == "final")

    def _looked(
        self,
        index: int,
        first: int,
        prompt: list[Output],
        ended: list[Output],
        notes: Notes,
        with_next: list[Rendering | None] | None = None,
        opening: str | None = None,
    ) -> Found:
        """Find the answer by the rules, in windows of the outputs; entries are counted from the first of them."""
        segments, view = self.renderer.segments, self.view
        window = segments.window(ended[first:], 0, view)
        note_emptiness(window.rendering, notes)
        before = segments.window(prompt[first:], 0, view).rendering
        rules = Rules(self.messages[index], self.stops, notes, with_next=with_next, opening=opening)
        try:
            answer = rules.answer(index, before, window.rendering)
        except NeedsNext:
            return Found(0, "probe")
        except NeedsPrompt:
            return Found(0, "prompt")
        if answer.reason:
            return Found(0, answer.reason, answer.detail)
        begin = window.place(answer.begin)
        if answer.appended:
            return Found(0, stop=answer.stop, is_appended=True, is_there=True, begin=begin)
        places = begin, window.place(answer.stop_begin), window.place_behind(answer.stop_begin + len(answer.stop))
        pauses = tuple((window.place(a), window.place_behind(b), window.place(c)) for a, b, c in answer.pauses)
        return Found(0, "", "", 0, answer.stop, False, True, *places, pauses)

    def hidden_in(self, outputs: list[Output], last: int) -> str:
        """Return what outputs leave out of the tools and the messages up to the last; nothing where they show all."""
        facts = self.renderer.segments.facts
        is_shown = self._is_whole_shown and last == self._count - 1 and last not in self._apart
        hidden = "" if is_shown else self._hidden.find(outputs, last)
        if not hidden and self.view.has_tools and not any(facts[number].shows_tools for number, _ in outputs):
            return "tools"
        return hidden

    def opening(self, index: int) -> str:
        """Return the generation prompt of a message, where the template wrote all of it; else nothing.

        Where the template opens no turn after an assistant's message, the turn is the one that message is in.
        """
        found = self._openings.get(index)
        if found is None:
            row = self._row(index)
            known = None if row is None else self._memory.kept(("opening", row.key))
            if known is not None:
                found = self._openings[index] = str(known.found)
                return found
            prompt = self.prompt(index)
            before = self.until(index - 1) if index else self.renderer.outputs(self.view, 0, False)
            added: str | None = None
            if not isinstance(prompt, Refusal) and not isinstance(before, Refusal):
                same = common(prompt, before)
                windows = (prompt[same:], before[same:])
                keys = (relative_key(one, index, self.renderer.segments.facts) for one in windows)
                look = partial(self._added, windows)
                added = self.remembered(("opening", *keys), index, look)
            is_part = not added and index > 0 and self.view.roles[index - 1] is RoleCode.ASSISTANT
            found = self._openings[index] = self.opening(index - 1) if is_part else added or ""
            if row is not None and not is_part and self.view.is_keyed:
                self._memory.keep(("opening", row.key), found)
        return found

    def header(self, index: int) -> str | None:
        """Return what A(index) has in the turn of a message before its answer; else its generation prompt, if any."""
        found = self._found.get(index)
        if found is None or found.reason:
            return self.opening(index) or None
        row = None if index in self._apart else self._row(index)
        known = None if row is None else self._memory.kept(("header", row.key))
        if known is not None:
            return str(known.found)
        header = self._header(found, self.trained(index))
        if row is not None:  # nothing but the windows of the key decides it
            self._memory.keep(("header", row.key), header)
        return header

    def _header(self, found: Found, ended: list[Output]) -> str:
        entry, part, offset = found.begin
        parts = self.renderer.segments.facts[ended[found.first + entry][0]].parts
        if parts[part][1] is not None and part > 0:  # right before a text of the message
            part, offset = part - 1, len(parts[part - 1][0] or "")
        literal, expression = parts[part]
        return (literal or "")[:offset] if expression is None else ""

    def _added(self, windows: tuple[list[Output], list[Output]], notes: Notes) -> str | None:
        prompt, before = (self.renderer.segments.window(one, 0, self.view).rendering for one in windows)
        for one in (prompt, before):
            note_emptiness(one, notes)
        return added_by(prompt, before, notes)


def _key_in_longer(row: FoundAnswer, same: int, more: int) -> tuple[int, int]:
    """Return what decides whether a longer rendering has an answer; one that parts long before it has not this one."""
    return row.key if max(same, 1) >= row.first else NO_KEY, more


def renderings_of(
    speaking: Sequence[int], count: int, probes: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the renderings that answers are found by, as in `Renderer.many`, F last; and which are those of answers.

    An answer has a message, and the numbers of A(i - 1), P(i), A(i), and of A(i) with its probes, -1 for none.
    """
    width, answers = 3 if probes is None else 5, len(speaking)
    own = np.array(speaking, dtype=np.int64).reshape(-1, 1)
    requests = np.zeros((answers, width, 3), dtype=np.int64)
    requests[:, :, 0] = own + (0, 0, 1, 2, 2)[:width]
    requests[:, 1, 1] = 1
    requests[:, :, 2] = -1
    numbers = np.full((answers, 6), -1, dtype=np.int64)
    numbers[:, :1] = own
    numbers[:, 1 : 1 + width] = np.arange(answers * width).reshape(-1, width)
    listed = requests.reshape(-1, 3)
    if probes is not None:
        requests[:, 3:, 2] = np.where(probes >= 0, probes, probes[:, :1])
        numbers[:, 4:][probes < 0] = -1
    is_whole = answers > 0 and speaking[-1] == count - 1
    if is_whole and probes is None:
        return listed, numbers
    if is_whole:
        numbers[-1, 3] = len(listed)
    return np.concatenate([listed, [(count, 0, -1)]]), numbers
