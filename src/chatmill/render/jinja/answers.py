"""The answers of a conversation, from lists of outputs: what P(i), A(i) and F have in common is never looked at again.

Renderings are compared as lists of numbers. Where they part, the `rules` look at a window of a few outputs.
What they find depends on these outputs and on a few questions about texts, so that it is remembered like a turn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from chatmill.core.kinds import Part, RoleCode
from chatmill.core.native.replayer import APART, Ended, FoundAnswers, Renderings
from chatmill.render.jinja.as_sampled import SampledAnswers, is_cut, not_cut
from chatmill.render.jinja.expressions import Notes
from chatmill.render.jinja.labels import Said
from chatmill.render.jinja.looks import Looks
from chatmill.render.jinja.questions import shifted
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.renderer import Refusal, TemplateRunner
from chatmill.render.jinja.rendering import Rendering, begins_with, literal_from, note_emptiness, until_character
from chatmill.render.jinja.replay import Request
from chatmill.render.jinja.rules import (
    Answer,
    Generation,
    NeedsNext,
    NeedsPrompt,
    Rules,
    added_by,
    is_continued,
    probe,
    renderings_of,
)
from chatmill.render.jinja.segments import Cursor, common, relative_key
from chatmill.render.jinja.stops import StopTokens
from chatmill.render.jinja.tries import Output

PLAIN = Said()
LEFT_OUT = "the template leaves the reasoning of this answer out"
UNDECIDED = "undecided"
"""Windows are alike, and end before the answer does."""
Found = TypeVar("Found")


class Answers:
    """The renderings of one conversation that the rules speak of, and the answers in them."""

    def __init__(
        self,
        renderer: TemplateRunner,
        view: RecordView,
        stops: StopTokens,
        known: tuple[Renderings, FoundAnswers] | None = None,
        as_sampled: SampledAnswers | None = None,
    ) -> None:
        """`known` are the renderings by which answers are found, if they are made already.

        `as_sampled` is asked for answers that do not follow their prompt in history; without it these have no proof.
        """
        self.renderer, self.view, self.stops = renderer, view, stops
        self._as_sampled = as_sampled
        self._sampled: dict[int, str] = {}
        """Answers that are as they are sampled, and what opens them in their prompts."""
        self.leaves_history = False
        """Whether an answer does not follow its prompt in history."""
        self.opens_reasoning = False
        """Whether such a prompt opens reasoning, so that the answer may be known as it is sampled."""
        self._made: dict[Request, list[Output] | Refusal] = {}
        self._found: dict[int, tuple[Answer[Cursor], bool]] = {}
        """The answers of messages in A(i), and whether their keys decide them."""
        self._apart: dict[int, list[Output]] = {}
        """Answers before which A(i) is not P(i): P(i) with their own turn."""
        self._openings: dict[int, tuple[str, bool]] = {}
        self._count = len(view.roles)
        self._is_local = True
        """Whether all that was looked at is in the windows of `replay.h`."""
        view.check_arguments()
        self._remember()
        self._render(known)

    def _remember(self) -> None:
        """Have what is known now of the template be what answers are found by."""
        self._looks = Looks(self.renderer, self.view)
        self.remembered = self._looks.remembered

    def _render(self, known: tuple[Renderings, FoundAnswers] | None) -> None:
        """Make all renderings that answers are found by."""
        renderer, speaking = self.renderer, self.view.trained
        self._probes: dict[int, list[int]] = {}
        """What may follow an answer, by its message."""
        probes = probe(self.view, speaking) if renderer.needs_next else None
        if probes is not None:
            self._probes = dict(zip(speaking, probes.tolist(), strict=True))
        listed, answers = renderings_of(speaking, self._count, probes, with_apart=renderer.needs_apart)
        requests = [(size, bool(prompt), request) for size, prompt, request in listed.tolist()]
        self._requests = {request: number for number, request in enumerate(requests)}
        self._renderings: Renderings | None = None
        self._is_whole_shown = False
        self._shown: frozenset[int] = frozenset()
        """Messages whose A(i), or what trains them in its place, is known to leave nothing out."""
        self._parted: dict[int, int] = {}
        """Messages that are known to be apart, and the renderings that train them."""
        known = known or renderer.known(self.view, listed, answers, self._looks)
        if known is None:
            if isinstance(self.until(self._count - 1), Refusal):  # no answer will be asked for
                return
            left = [request for request in requests if request not in self._made and request[2] != APART]
            self._made.update(zip(left, renderer.many(self.view, left), strict=True))
            self._remember()
            known = renderer.known(self.view, listed, answers, self._looks)
        if known is not None:
            self._renderings, answers_found = known
            self._is_whole_shown = answers_found.hidden_in_whole == -1
            rows = dict(zip(speaking, map(answers_found.row, range(len(speaking))), strict=True))
            self._shown = frozenset(i for i, row in rows.items() if row.hidden == -1)
            self._parted = {i: row.apart for i, row in rows.items() if row.apart >= 0}

    def _decided(self, look: Callable[[], Found]) -> tuple[Found, bool]:
        """Return what is found, and whether the windows and classes by which `replay.h` makes keys decide it."""
        was_keyed, was_local = self.view.is_keyed, self._is_local
        self.view.is_keyed = self._is_local = True
        result = look()
        is_decided = self.view.is_keyed and self._is_local
        self.view.is_keyed, self._is_local = self.view.is_keyed and was_keyed, self._is_local and was_local
        return result, is_decided

    def _outputs(self, count: int, prompt: bool, probe: int = -1) -> list[Output] | Refusal:
        key = (count, prompt, probe)
        outputs = self._made.get(key)
        if outputs is None:
            number = self._requests.get(key, -1)
            if self._renderings is not None and number >= 0 and self._renderings.ended(number) == Ended.KNOWN:
                outputs = self._renderings.outputs(number)
            else:
                outputs = self.renderer.many(self.view, [key])[0]
            self._made[key] = outputs
        return outputs

    def prompt(self, index: int) -> list[Output] | Refusal:
        """Return P(index)."""
        return self._outputs(index, True)

    def until(self, index: int) -> list[Output] | Refusal:
        """Return A(index): all messages up to this one, whatever its role."""
        return self._outputs(index + 1, False)

    def trained(self, index: int) -> list[Output]:
        """Return the outputs that train an answer where F does not have it: A(index), or P(index) and its own turn."""
        outputs = self._apart[index] if index in self._apart else self.until(index)
        assert not isinstance(outputs, Refusal)
        return outputs

    def is_as_sampled(self, index: int) -> bool:
        """Return whether an answer is what a model writes after its prompt, and not what history has."""
        return index in self._sampled

    def opener(self, index: int) -> str:
        """Return what the prompt of such an answer opens reasoning with."""
        return self._sampled[index]

    def is_apart(self, index: int) -> bool:
        """Return whether A(index) does not have an answer after its own prompt, so that it is trained elsewhere."""
        return index in self._apart

    def why_apart(self, index: int) -> Answer[Cursor]:
        """Return why A(index) does not have an answer after its prompt, and what trains it."""
        prompt, ended = self.prompt(index), self.until(index)
        assert not isinstance(prompt, Refusal)
        assert not isinstance(ended, Refusal)
        refusal = self._answer_in(index, prompt, ended, is_shown=True)
        way_out = "`expand: turns` and `expand: tree` train it after its prompt"
        return refusal._replace(detail=f"{refusal.detail}; {way_out}")

    def whole(self) -> list[Output]:
        """Return F, or raise the template's own refusal."""
        outputs = self.until(self._count - 1)
        if isinstance(outputs, Refusal):
            raise self.renderer.refused(outputs)
        return outputs

    def answer(self, index: int, longer: list[Output] | None = None) -> Answer[Cursor]:
        """Return the answer of an assistant message, and where it is in A(index) or in a longer rendering."""
        if index not in self._found:
            self._found[index] = self._decided(partial(self._answer, index))
        answer = self._found[index][0]
        ended = None if longer is None or answer.reason else self.trained(index)
        if index in self._sampled and longer is not None and longer is not ended:
            return answer._replace(is_there=False)  # history does not have it
        if longer is None or ended is None or longer is ended:
            return answer
        same = common(ended, longer)
        if same > answer.first + answer.end.entry and not answer.is_appended:
            return answer._replace(is_there=True)
        return self._in_longer(index, answer, ended, longer, max(0, same - 1))

    def decided(self, index: int) -> tuple[Answer[Cursor], tuple[str, str] | None] | None:
        """Return an answer if nothing but its key decides it, and what stands before it if that is so decided too.

        That is what the turn has before the answer, and its generation prompt. None if more decides the answer.
        """
        answer = self.answer(index)
        if not self._found[index][1] or answer.is_quoting:
            return None
        stands, is_decided = (None, True) if answer.reason else self._decided(partial(self._standing, index))
        return (answer, stands if is_decided else None) if self._looks.version >= 0 else None

    def _standing(self, index: int) -> tuple[str, str]:
        return self.header(index) or "", self.opening(index)

    def decided_in_longer(self, index: int, longer: list[Output], *, is_near: bool) -> Answer[Cursor] | None:
        """Return an answer in the outputs of a later one, or in F, if keys decide it; None if more does.

        One is the key of what these have where A(index) ends. That of the answer is the other one if it `is_near`.
        """
        self.answer(index)
        answer, is_decided = self._decided(lambda: self.answer(index, longer))
        is_decided = is_decided and (self._found[index][1] if is_near else not answer.is_there)
        return answer if is_decided and self._looks.version >= 0 else None

    def _answer(self, index: int) -> Answer[Cursor]:
        """Return an answer as history has it; as it is sampled, where history does not have it."""
        answer, rule = self._answer_in_history(index), self._as_sampled
        is_parted = answer.reason == "prompt_not_in_history"
        self.leaves_history = self.leaves_history or is_parted
        if rule is None or not (is_parted or (not answer.reason and self._loses_reasoning(index, rule))):
            return answer
        sampled = self._answer_as_sampled(index, rule)
        if is_parted:
            return sampled or answer
        if sampled is None or sampled.reason:
            self.leaves_history = True
            return Answer(index, "prompt_not_in_history", LEFT_OUT) if rule.is_strict else answer
        return sampled

    def _loses_reasoning(self, index: int, rule: SampledAnswers) -> bool:
        """Return whether history leaves out the reasoning of an answer, and the rule is asked before history."""
        if not rule.is_first:
            return False
        self.view.is_keyed = False
        window = self.renderer.segments.window(self.trained(index), 0, self.view)
        return rule.is_hidden(self.view.conversation.messages[index], index, window.rendering)

    def _answer_as_sampled(self, index: int, rule: SampledAnswers) -> Answer[Cursor] | None:
        """Return what a model writes after P(index); why that is not known; None where P(index) opens no reasoning."""
        prompt, ended = self.prompt(index), self.until(index)
        if isinstance(prompt, Refusal) or isinstance(ended, Refusal):
            return None
        self._is_local = self.view.is_keyed = False
        before, history = (self.renderer.segments.window(one, 0, self.view).rendering for one in (prompt, ended))
        turn = rule.turn(self.view.conversation.messages[index], index, before, history)
        self.opens_reasoning = self.opens_reasoning or turn is not None
        if turn is None or isinstance(turn, Answer):
            return turn
        if turn.opener and any(opener not in ("", turn.opener) for opener in self._sampled.values()):
            return Answer(index, "prompt_not_in_history", "the prompts of this record open reasoning in different ways")
        parts = tuple((text, None if e is None else shifted(e, -index)) for text, e in turn.parts)
        made = [*prompt, (self.renderer.segments.number(parts), index)]
        text = self.renderer.segments.window(made, 0, self.view).rendering.text
        if not is_cut(self.renderer, self.view, index, turn, history.text, text):
            return Answer(index, "prompt_not_in_history", not_cut(before, history))
        hidden = self._looks.hidden_in(ended, index)
        if hidden:
            return Answer(index, "not_shown", hidden)
        there = self._answer_in(index, prompt, made, is_shown=True)
        if there.reason:
            return there
        self._apart[index], self._sampled[index] = made, turn.opener
        return there._replace(is_there=False)

    def _answer_in_history(self, index: int) -> Answer[Cursor]:
        prompt, ended = self.prompt(index), self.until(index)
        if isinstance(prompt, Refusal):
            return Answer(index, "no_prompt", prompt.message)
        if isinstance(ended, Refusal):
            return Answer(index, "template_refused", ended.message)
        is_shown = index in self._shown
        if index in self._parted and self._renderings is not None:
            apart = self._renderings.outputs(self._parted[index])
            there = self._answer_in(index, prompt, apart, is_shown=is_shown)
            if not there.reason:
                self._apart[index] = apart
                return there._replace(is_there=False)
            is_shown = False
        answer = self._answer_in(index, prompt, ended, is_shown=is_shown)
        if answer.reason != "prompt_not_in_history":
            return answer
        own_turn = self.renderer.segments.with_own_turn(prompt, ended, index)
        if own_turn is None:
            return answer
        self._is_local = False
        self.renderer.needs_apart = True
        there = self._answer_in(index, prompt, own_turn, is_shown=False)
        if there.reason:
            return answer if there.reason == answer.reason else there
        self._apart[index] = own_turn
        return there._replace(is_there=False)

    def _answer_in(self, index: int, prompt: list[Output], ended: list[Output], *, is_shown: bool) -> Answer[Cursor]:
        """Return the answer of a message in outputs that may begin with its prompt."""
        facts = self.renderer.segments.facts
        shared = range(common(prompt, ended) - 1, -1, -1)
        first = next((at for at in shared if facts[ended[at][0]].owners), 0)
        windows = prompt[first:], ended[first:]
        key = ("answer", self.said(index), *(relative_key(window, index, facts) for window in windows))
        opening = None
        answer: Answer[Cursor] = self.remembered(key, index, partial(self._looked, index, *windows))
        if answer.reason == "prompt":
            opening = self.opening(index)
            key = (*key, opening)
            answer = self.remembered(key, index, partial(self._looked, index, *windows, opening=opening))
        if answer.reason == "probe":
            answer = self._with_next(index, key, first, prompt, ended, opening)
        hidden = "" if is_shown else self._looks.hidden_in(ended, index)
        if hidden and answer.reason != "prompt_not_in_history":
            return Answer(index, "not_shown", hidden)
        return answer._replace(message=index, first=first)

    def _in_longer(
        self, index: int, answer: Answer[Cursor], ended: list[Output], longer: list[Output], start: int
    ) -> Answer[Cursor]:
        """Return where an answer is in a longer rendering, from windows that grow until that is decided."""
        size, end, by = 1, answer.first + answer.end.entry, answer.first - start
        while True:
            mine, theirs = ended[start : start + 1 + size], longer[start : start + 1 + size]
            is_whole = start + 1 + size >= len(ended) if answer.is_appended else start + size >= end
            is_end = start + 1 + size >= len(longer)
            stop = answer.stop, answer.is_appended, answer.before_stop
            stop_and_generations = (*stop, answer.generations) if is_whole else ()
            to = index if is_whole else mine[0][1]
            windows = [relative_key(window, to, self.renderer.segments.facts) for window in (mine, theirs)]
            key = ("longer", stop_and_generations, by if is_whole else 0, is_whole, is_end, *windows)
            look = partial(self._compared, answer if is_whole else None, by, mine, theirs, is_end)
            there = self.remembered(key, to, look)
            if there == UNDECIDED:
                size *= 2
                self._is_local = False
                continue
            if there is None:
                return answer._replace(is_there=False)
            return answer._replace(generations=there, first=start, is_there=True)

    def _compared(
        self,
        answer: Answer[Cursor] | None,
        by: int,
        mine: list[Output],
        theirs: list[Output],
        is_end: bool,
        notes: Notes,
    ) -> tuple[Generation[Cursor], ...] | str | None:
        """Compare windows of A(i) and of a longer rendering; if all of an answer is in them, `by` is where."""
        segments = self.renderer.segments
        ended, longer = segments.window(mine, 0, self.view), segments.window(theirs, 0, self.view)
        for window in (ended, longer):
            note_emptiness(window.rendering, notes)
        shorter = ended.rendering
        if answer is not None and not answer.is_appended:
            shorter = until_character(shorter, ended.at(answer.end._replace(entry=answer.end.entry + by)))
        if not begins_with(longer.rendering, shorter, notes):
            is_short = not is_end and begins_with(shorter, longer.rendering, notes)
            return UNDECIDED if is_short else None
        if answer is None:
            return UNDECIDED
        added = answer.before_stop + answer.stop if answer.is_appended else ""
        if not literal_from(longer.rendering, len(shorter.text)).startswith(added):
            return None

        def move(find: Callable[[int], Cursor], more: int, place: Cursor) -> Cursor:
            place = place._replace(entry=place.entry + by)
            return place if place.entry < 0 else find(ended.at(place) + more)

        return answer.moved(partial(move, longer.place, 0), partial(move, longer.place_behind, len(added))).generations

    def _with_next(
        self, index: int, key: Any, first: int, prompt: list[Output], ended: list[Output], opening: str | None
    ) -> Answer[Cursor]:
        """Look again, with what the template writes before a next message."""
        self.renderer.needs_next = True
        if index not in self._probes:
            self._is_local = False
            self._probes = {index: probe(self.view, [index])[0].tolist()}
        probes = [number for number in self._probes[index] if number >= 0]
        made = [(self._outputs(index + 2, False, number), number) for number in probes]
        windows = [
            (outputs[self._start_of(index, outputs, first, ended) :], number)
            for outputs, number in made
            if not isinstance(outputs, Refusal)
        ]
        keys = tuple(relative_key(outputs, index, self.renderer.segments.facts) for outputs, _ in windows)

        def look(notes: Notes) -> Answer[Cursor]:
            renderings = [
                self.renderer.segments.window(outputs, 0, self.view.probed(index + 2, number)).rendering
                for outputs, number in windows
            ]
            return self._looked(index, prompt[first:], ended[first:], notes, with_next=renderings, opening=opening)

        answer: Answer[Cursor] = self.remembered((*key, keys), index, look)
        return answer

    def _start_of(self, index: int, outputs: list[Output], first: int, ended: list[Output]) -> int:
        """Return where outputs have text of a message first; if nowhere, where A(i) is no prompt any more."""
        facts = self.renderer.segments.facts
        places = (at for at, (number, base) in enumerate(outputs) if index - base in facts[number].owners)
        return next(places, first if outputs[:first] == ended[:first] else 0)

    def said(self, index: int) -> Said:
        """Return what an assistant message says, by its fields of Harmony."""
        if self.view.is_plain:
            return PLAIN
        message = self.view.conversation.messages[index]
        if message.channel is None and message.recipient is None:
            return PLAIN
        questions = [("equals", ("field", (index, "channel")), name) for name in ("analysis", "commentary", "final")]
        if message.channel is not None and not self.renderer.tries.is_keyed(questions):
            self.view.is_keyed = False
        part = Part.CONTENT if message.recipient is None else Part.TOOL_CALL
        part = Part.REASONING if message.channel == "analysis" else part
        return Said(part, is_continued(message))

    def _looked(
        self,
        index: int,
        prompt: list[Output],
        ended: list[Output],
        notes: Notes,
        with_next: list[Rendering] | None = None,
        opening: str | None = None,
    ) -> Answer[Cursor]:
        """Find the answer by the rules, in windows of P(i) and A(i)."""
        before, window = (self.renderer.segments.window(outputs, 0, self.view) for outputs in (prompt, ended))
        note_emptiness(window.rendering, notes)
        rules = Rules(self.view.conversation.messages[index], self.stops, notes, with_next=with_next, opening=opening)
        try:
            answer = rules.answer(index, before.rendering, window.rendering)
        except NeedsNext:
            return Answer(0, "probe")
        except NeedsPrompt:
            return Answer(0, "prompt")
        find_end = window.place if answer.is_appended else window.place_behind
        return answer.moved(window.place, find_end)._replace(message=0, is_there=not answer.reason)

    def hidden_in(self, outputs: list[Output], last: int) -> str:
        """Return what outputs leave out of the tools and the messages up to the last; nothing where they show all."""
        facts = self.renderer.segments.facts
        is_shown = self._is_whole_shown and last == self._count - 1 and last not in self._apart
        if last in self._sampled and outputs is self._apart[last]:  # what a model writes has all that history has
            history = self.until(last)
            outputs = outputs if isinstance(history, Refusal) else history
        hidden = "" if is_shown else self._looks.hidden_in(outputs, last)
        if not hidden and self.view.has_tools and not any(facts[number].shows_tools for number, _ in outputs):
            return "tools"
        return hidden

    def opening(self, index: int) -> str:
        """Return the generation prompt of a message, if the template wrote all of it; else nothing.

        If the template opens no turn after an assistant's message, the turn is the one that message is in.
        """
        if index not in self._openings:
            self._openings[index] = self._decided(partial(self._opening, index))
        opening, is_decided = self._openings[index]
        self._is_local = self._is_local and is_decided
        return opening

    def _opening(self, index: int) -> str:
        prompt = self.prompt(index)
        before = self.until(index - 1)
        added: str | None = None
        if not isinstance(prompt, Refusal) and not isinstance(before, Refusal):
            same = common(prompt, before)
            windows = (prompt[same:], before[same:])
            keys = (relative_key(window, index, self.renderer.segments.facts) for window in windows)
            added = self.remembered(("opening", *keys), index, partial(self._added, windows))
        if not added and index > 0 and self.view.roles[index - 1] is RoleCode.ASSISTANT:
            self._is_local = False
            return self.opening(index - 1)
        return added or ""

    def header(self, index: int) -> str | None:
        """Return what A(index) has in the turn of a message before its answer; else its generation prompt, if any."""
        if index not in self._found or self._found[index][0].reason or index in self._sampled:
            return self.opening(index) or None
        answer, ended = self._found[index][0], self.trained(index)
        at, part, offset = answer.first + answer.begin.entry, *answer.begin[1:]
        parts = self.renderer.segments.facts[ended[min(at, len(ended) - 1)][0]].parts
        if at == len(ended):  # the answer is empty, and its stop is appended
            part, offset = len(parts) - 1, len(parts[-1][0] or "")
        elif parts[part][1] is not None and part > 0:  # right before a text of the message
            part, offset = part - 1, len(parts[part - 1][0] or "")
        literal, expression = parts[part]
        return (literal or "")[:offset] if expression is None else ""

    def _added(self, windows: tuple[list[Output], list[Output]], notes: Notes) -> str | None:
        prompt, before = (self.renderer.segments.window(window, 0, self.view).rendering for window in windows)
        for window in (prompt, before):
            note_emptiness(window, notes)
        return added_by(prompt, before, notes)
