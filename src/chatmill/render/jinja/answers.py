"""The answers of a conversation: what P(i), A(i) and F have in common is never looked at again.

Renderings are compared as paths of fragments (`Paths`). Where two of them part, the `rules` look at the branches: a few
fragments of each. What they find is kept for all conversations with such branches (`AnswerLookup`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from chatmill.core.kinds import Part, RoleCode
from chatmill.core.native.replayer import Ended, Renderings
from chatmill.render.jinja.answer_branches import AnswerBranch, find_branches, find_shown
from chatmill.render.jinja.answer_cache import AnswerLookup
from chatmill.render.jinja.as_sampled import SampledAnswers, is_cut, not_cut
from chatmill.render.jinja.expressions import Notes
from chatmill.render.jinja.hidden_fields import HiddenFields
from chatmill.render.jinja.labels import Said
from chatmill.render.jinja.paths import Path, Paths
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
    list_renderings,
    make_probes,
)
from chatmill.render.jinja.segments import Cursor
from chatmill.render.jinja.stops import StopTokens
from chatmill.render.jinja.tries import Output
from chatmill.render.jinja.turn import ROOT

PLAIN = Said()
LEFT_OUT = "the template leaves the reasoning of this answer out"
UNDECIDED = "undecided"
"""Branches are alike, and end before the answer does."""
BEFORE, PROMPT, ENDED, NEXT = range(4)
"""The renderings of an answer, in the order of `list_renderings`: A(i - 1), P(i), A(i), and A(i) with each probe."""


class Answers:
    """The renderings of one conversation that the rules speak of, and the answers in them."""

    def __init__(
        self,
        renderer: TemplateRunner,
        view: RecordView,
        stops: StopTokens,
        as_sampled: SampledAnswers | None = None,
    ) -> None:
        """`as_sampled` is asked for answers that do not follow their prompt in history.

        Without it these have no proof.
        """
        self.renderer = renderer
        self.view = view
        self.stops = stops
        self._as_sampled = as_sampled
        self._sampled: dict[int, str] = {}
        """Answers that are as they are sampled, and what opens them in their prompts."""
        self.leaves_history = False
        """Whether an answer does not follow its prompt in history."""
        self.opens_reasoning = False
        """Whether such a prompt opens reasoning, so that the answer may be known as it is sampled."""
        self._made: dict[Request, Path | Refusal] = {}
        """Renderings by their requests."""
        self._paths_made: dict[int, Path] = {}
        """Renderings by their numbers among those that were made together."""
        self._found: dict[int, Answer[Cursor]] = {}
        """The answers of messages in A(i)."""
        self._apart: dict[int, Path] = {}
        """Answers before which A(i) is not P(i): P(i) with their own iteration."""
        self._openings: dict[int, str] = {}
        self._trained: dict[int, Path] = {}
        """What trains answers where F does not have them."""
        self._missing_until: dict[int, int] = {}
        """How much of F says that it does not have an answer."""
        self._leave_for_good: dict[int, bool] = {}
        """Whether such a path goes on otherwise than F where it leaves F, before its answer, whatever follows."""
        self._count = len(view.roles)
        view.check_arguments()
        self._render()
        self.lookup = AnswerLookup(renderer, view)
        self._hidden = HiddenFields(renderer, view, self.paths, self.lookup)
        self._branches: dict[int, AnswerBranch] = {}
        """Where the prompts and answers part that were made together."""
        self._branches_version = self.lookup.version
        if self._renderings is not None and view.is_plain:
            self._find_branches(self._renderings)

    def _find_branches(self, renderings: Renderings) -> None:
        """Find where all prompts and answers part that were made together."""
        renderer, view = self.renderer, self.view
        classes = renderer.classes_with_probes(view)
        if classes is None or not self._rows or classes.version != self.lookup.version:
            return
        facts = renderer.fragment_columns.read()
        shown = self._hidden.shown = find_shown(renderings, facts, self._count)
        lines = [(index, row + PROMPT, row + ENDED) for index, row in self._rows.items()]
        answers = np.array(lines, dtype=np.int64)
        record_key = renderer.record_key(view)
        self._branches = find_branches(renderings, answers, classes.numbers, facts, shown, record_key)
        # a look for hidden fields may ask something new, and then messages have other classes than the keys
        if self._as_sampled is None and not self._hidden.in_whole() and self.lookup.version == classes.version:
            self._find_known()

    def _find_known(self) -> None:
        """Find the answers whose branches are known."""
        for index, branch in self._branches.items():
            known: Answer[Cursor] | None = self.lookup.find(branch.key) if branch.is_like_whole else None
            if known is not None:
                # what `_replace` does, in a third of the time
                self._found[index] = Answer(index, *known[1:7], branch.first, known.is_there)

    def _render(self) -> None:
        """Make all renderings that answers are found by."""
        renderer = self.renderer
        speaking = self.view.trained
        self._probes: dict[int, list[int]] = {}
        """What may follow an answer, by its message."""
        probes = make_probes(self.view, speaking) if renderer.needs_next else None
        if probes is not None:
            self._probes = dict(zip(speaking, probes.tolist(), strict=True))
        listed, self._kinds = list_renderings(speaking, self._count, probes)
        self._rows = {index: row * self._kinds for row, index in enumerate(speaking)}
        """Where the renderings of each answer begin."""
        self._renderings: Renderings | None = renderer.known(self.view, listed)
        if self._renderings is not None:
            self.paths = Paths(self._renderings.whole)
            self._whole: Path | Refusal = self.paths.whole_path
            return

        # something is new: the whole conversation comes first, for where it is refused no answer is asked for
        (whole,) = renderer.many(self.view, [(self._count, False, -1)])
        self.paths = Paths([] if isinstance(whole, Refusal) else whole)
        self._whole = whole if isinstance(whole, Refusal) else self.paths.whole_path
        if isinstance(whole, Refusal):
            return
        self._renderings = renderer.learned(self.view, listed)
        if self._renderings is not None:
            return
        requests = [(size, bool(prompt), number) for size, prompt, number in listed.tolist()]
        for request, outputs in zip(requests, renderer.many(self.view, requests), strict=True):
            self._made[request] = outputs if isinstance(outputs, Refusal) else self.paths.path(outputs)

    def _of_answer(self, index: int, kind: int) -> Path | None:
        """Return a rendering of an answer that was made with all others."""
        row = self._rows.get(index)
        if row is None or self._renderings is None:
            return None
        number = row + kind
        path = self._paths_made.get(number)
        if path is None and self._renderings.ended(number) == Ended.KNOWN:
            path = self._paths_made[number] = Path(*self._renderings.leaves_whole(number))
        return path

    def _rendering(self, count: int, prompt: bool, probe: int = -1) -> Path | Refusal:
        """Return any rendering of the first messages."""
        key = (count, prompt, probe)
        path = self._made.get(key)
        if path is None:
            outputs = self.renderer.many(self.view, [key])[0]
            path = outputs if isinstance(outputs, Refusal) else self.paths.path(outputs)
            self._made[key] = path
        return path

    def prompt(self, index: int) -> Path | Refusal:
        """Return P(index)."""
        return self._of_answer(index, PROMPT) or self._rendering(index, True)

    def until(self, index: int) -> Path | Refusal:
        """Return A(index): all messages up to this one, whatever its role."""
        if index == self._count - 1:
            return self._whole
        return self._of_answer(index, ENDED) or self._rendering(index + 1, False)

    def trained(self, index: int) -> Path:
        """Return what trains an answer where F does not have it: A(index), or P(index) and its own iteration."""
        trained = self._trained.get(index)
        if trained is None:
            path = self._apart[index] if index in self._apart else self.until(index)
            assert not isinstance(path, Refusal)
            if index not in self._found:  # which may find it elsewhere
                return path
            trained = self._trained[index] = path
        return trained

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
        refusal = self._answer_in(index, prompt, ended)
        way_out = "`expand: turns` and `expand: tree` train it after its prompt"
        return refusal._replace(detail=f"{refusal.detail}; {way_out}")

    def whole(self) -> Path:
        """Return F, or raise the template's own refusal."""
        if isinstance(self._whole, Refusal):
            raise self.renderer.refused(self._whole)
        return self._whole

    def window(self, path: Path) -> Rendering:
        """Return a path as text."""
        return self.renderer.segments.window(self.paths.listed(path), 0, self.view).rendering

    # ---- answers in a longer rendering

    def answer(self, index: int, longer: Path | None = None) -> Answer[Cursor]:
        """Return the answer of an assistant message, and where it is in A(index) or in a longer rendering."""
        answer = self._found.get(index)
        if answer is None:
            answer = self._found[index] = self._answer(index)
        if longer is None or answer.reason:
            return answer
        branch = self._branches.get(index)
        if branch is not None and longer is self.paths.whole_path and index not in self._apart:
            is_in_whole = branch.shared > answer.first + answer.end.entry
            if is_in_whole and answer.is_there and not answer.is_appended:
                return answer
        ended = self.trained(index)
        if longer is ended:
            return answer
        if index in self._sampled:
            return answer._replace(is_there=False)  # history does not have it
        same = self.paths.common(ended, longer)
        if same > answer.first + answer.end.entry and not answer.is_appended:
            return answer if answer.is_there else answer._replace(is_there=True)
        return self._in_longer(index, answer, ended, longer, max(0, same - 1))

    def inside(self, indices: Sequence[int], last: int) -> list[Answer[Cursor]]:
        """Return those answers that the rendering which trains a later one has, too, and where they are in it.

        Most paths leave F at different places. Then one of them is F where they part, and whether the other one can be
        told from F there is found out once.
        """
        longer = self.trained(last)
        longer_shared = longer.shared
        found: list[Answer[Cursor]] = []
        for index in indices:
            shared = self.trained(index).shared
            if shared < longer_shared:
                is_missing = self._missing_until.get(index, longer_shared) < longer_shared
            elif shared > longer_shared and longer_shared < self._found[index].first:
                is_missing = self._leaves_for_good(last, longer_shared)
            else:
                is_missing = False
            if not is_missing:
                answer = self.answer(index, longer)
                if answer.is_there:
                    found.append(answer)
        return found

    def _leaves_for_good(self, index: int, same: int) -> bool:
        """Return whether the path of an answer goes on otherwise than F where it leaves F, before the answer."""
        parts = self._leave_for_good.get(index)
        if parts is None:
            path, answer = self.trained(index), self._found[index]
            parts = 0 < same < answer.first and same + 1 < self.paths.size(path)
            if parts:
                parts = self._compare(index, answer, path, self.paths.whole_path, same - 1, 1) is None
            self._leave_for_good[index] = parts
        return parts

    def _in_longer(self, index: int, answer: Answer[Cursor], ended: Path, longer: Path, start: int) -> Answer[Cursor]:
        """Return where an answer is in a longer rendering, from branches that grow until that is decided."""
        size = 1
        while True:
            there = self._compare(index, answer, ended, longer, start, size)
            if there == UNDECIDED:
                size *= 2
                continue
            if there is None:
                if longer is self.paths.whole_path and start + 1 + size < longer.shared:
                    self._missing_until[index] = start + 1 + size
                return answer._replace(is_there=False) if answer.is_there else answer
            return answer._replace(generations=there, first=start, is_there=True)

    def _compare(self, index: int, answer: Answer[Cursor], ended: Path, longer: Path, start: int, size: int) -> Any:
        """Compare branches of A(index) and of a longer rendering, as `_compare_branches` does, or remember it."""
        paths = self.paths
        stop = start + 1 + size
        mine, theirs = paths.part(ended, start, stop), paths.part(longer, start, stop)
        end, by = answer.first + answer.end.entry, answer.first - start
        is_whole = stop >= paths.size(ended) if answer.is_appended else start + size >= end
        is_end = stop >= paths.size(longer)
        generations = answer.generations if is_whole else ()
        what = (
            "longer",
            (answer.stop, answer.is_appended, answer.before_stop, generations) if is_whole else (),
            by if is_whole else 0,
            is_whole,
            is_end,
        )
        look = partial(self._compare_branches, answer if is_whole else None, by, mine, theirs, is_end)
        return self.lookup.remembered(what, index if is_whole else mine[0][1], (mine, theirs), look)

    def _compare_branches(
        self,
        answer: Answer[Cursor] | None,
        by: int,
        mine: list[Output],
        theirs: list[Output],
        is_end: bool,
        notes: Notes,
    ) -> tuple[Generation[Cursor], ...] | str | None:
        """Return where an answer is in a branch of a longer rendering; None where it is not there.

        Args:
            answer: The answer; None where it goes on behind the branch of A(i).
            by: How many fragments before the answer's own the branches begin.
            mine: The branch of A(i).
            theirs: That of the longer rendering.
            is_end: Whether the longer rendering ends with its branch.
            notes: Keeps what is asked of texts.
        """
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

    # ---- answers in A(i)

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
        rendering = self.window(self.trained(index))
        return rule.is_hidden(self.view.conversation.messages[index], index, rendering)

    def _answer_as_sampled(self, index: int, rule: SampledAnswers) -> Answer[Cursor] | None:
        """Return what a model writes after P(i); why that is not known; None where P(i) opens no reasoning."""
        prompt, ended = self.prompt(index), self.until(index)
        if isinstance(prompt, Refusal) or isinstance(ended, Refusal):
            return None
        self.view.is_keyed = False
        before, history = self.window(prompt), self.window(ended)
        turn = rule.turn(self.view.conversation.messages[index], index, before, history)
        self.opens_reasoning = self.opens_reasoning or turn is not None
        if turn is None or isinstance(turn, Answer):
            return turn
        if turn.opener and any(opener not in ("", turn.opener) for opener in self._sampled.values()):
            return Answer(index, "prompt_not_in_history", "the prompts of this record open reasoning in different ways")
        parts = tuple((text, None if e is None else shifted(e, -index)) for text, e in turn.parts)
        fragment = (self.renderer.segments.number(parts), index)
        made = self.paths.joined(prompt, self.paths.size(prompt), [fragment])
        if not is_cut(self.renderer, self.view, index, turn, history.text, self.window(made).text):
            return Answer(index, "prompt_not_in_history", not_cut(before, history))
        hidden = self._hidden.find(ended, index)
        if hidden:
            return Answer(index, "not_shown", hidden)
        there = self._answer_in(index, prompt, made, is_shown=True)
        if there.reason:
            return there
        self._apart[index], self._sampled[index] = made, turn.opener
        return there._replace(is_there=False)

    def _answer_in_history(self, index: int) -> Answer[Cursor]:
        """Return the answer in A(i), or in P(i) with its own iteration."""
        prompt, ended = self.prompt(index), self.until(index)
        if isinstance(prompt, Refusal):
            return Answer(index, "no_prompt", prompt.message)
        if isinstance(ended, Refusal):
            return Answer(index, "template_refused", ended.message)
        answer = self._answer_in(index, prompt, ended, self._known_branch(index))
        if answer.reason != "prompt_not_in_history":
            return answer
        own = self._with_own_iteration(prompt, ended, index)
        if own is None:
            return answer
        there = self._answer_in(index, prompt, own)
        if there.reason:
            return answer if there.reason == answer.reason else there
        self._apart[index] = own
        return there._replace(is_there=False)

    def _with_own_iteration(self, prompt: Path, ended: Path, index: int) -> Path | None:
        """Return P(index) and, in place of its generation prompt, what A(index) writes in the message's iteration.

        None if no loop over messages writes it, or if what comes right before it in A(index) is not what P(index) has.
        """
        paths, segments = self.paths, self.renderer.segments
        listed = paths.listed(ended)
        begin = next((place for place, (_, base) in enumerate(listed) if base == index), len(listed))
        if begin == len(listed) or any(base not in (index, ROOT) for _, base in listed[begin:]):
            return None
        before = paths.listed(prompt)
        while before and before[-1][1] == ROOT:
            before.pop()
        if segments.closing(before) != segments.closing(listed[:begin]):
            return None
        return paths.joined(prompt, len(before), listed[begin:])

    def _known_branch(self, index: int) -> AnswerBranch | None:
        """Return where P(i) and A(i) part, as long as its key is that of the classes which messages have now."""
        return self._branches.get(index) if self.lookup.version == self._branches_version else None

    def _answer_in(
        self, index: int, prompt: Path, ended: Path, branch: AnswerBranch | None = None, *, is_shown: bool = False
    ) -> Answer[Cursor]:
        """Return the answer of a message in a path that may begin with its prompt.

        Args:
            index: The message.
            prompt: P(i).
            ended: The path.
            branch: Where the two part, if the path is A(i): what is found without any other path is kept for it.
            is_shown: The path is known to leave nothing out.
        """
        paths, facts = self.paths, self.renderer.segments.facts
        first = paths.common(prompt, ended) - 1
        while first > 0 and not facts[paths.at(ended, first)[0]].owners:
            first -= 1
        first = max(first, 0)
        branches = (paths.part(prompt, first), paths.part(ended, first))
        what: tuple[Any, ...] = ("answer", self.said(index))
        answer: Answer[Cursor] = self.lookup.remembered(what, index, branches, partial(self._look, index, *branches))
        if not answer.reason and branch is not None and self.view.is_keyed and self._known_branch(index) is branch:
            self.lookup.keep(branch.key, answer)
        opening = None
        if answer.reason == "prompt":
            opening = self.opening(index)
            what = (*what, opening)
            look = partial(self._look, index, *branches, opening=opening)
            answer = self.lookup.remembered(what, index, branches, look)
        if answer.reason == "probe":
            answer = self._with_next(index, what, first, ended, branches, opening)
        if answer.reason != "prompt_not_in_history" and not is_shown:
            hidden = self._hidden.find(ended, index)
            if hidden:
                return Answer(index, "not_shown", hidden)
        # what `_replace` does, in a third of the time
        return Answer(index, *answer[1:7], first, answer.is_there)

    def _with_next(
        self,
        index: int,
        what: tuple[Any, ...],
        first: int,
        ended: Path,
        branches: tuple[list[Output], list[Output]],
        opening: str | None,
    ) -> Answer[Cursor]:
        """Look again, with what the template writes before a next message."""
        self.renderer.needs_next = True
        if index not in self._probes:
            self._probes = {index: make_probes(self.view, [index])[0].tolist()}
            self.lookup.load_classes()
        nexts: list[list[Output]] = []
        probes: list[int] = []
        for kind, probe in enumerate(self._probes[index], NEXT):
            if probe < 0:
                continue
            path = self._rendering_with_next(index, kind, probe)
            if not isinstance(path, Refusal):
                start = self._start_of(index, path, first, ended)
                nexts.append(self.paths.part(path, start))
                probes.append(probe)

        def look(notes: Notes) -> Answer[Cursor]:
            renderings = [
                self.renderer.segments.window(outputs, 0, self.view.probed(index + 2, probe)).rendering
                for outputs, probe in zip(nexts, probes, strict=True)
            ]
            return self._look(index, *branches, notes, with_next=renderings, opening=opening)

        answer: Answer[Cursor] = self.lookup.remembered((*what, "next"), index, (*branches, *nexts), look, probes)
        return answer

    def _rendering_with_next(self, index: int, kind: int, probe: int) -> Path | Refusal:
        """Return A(index) with a probe after it."""
        made = self._of_answer(index, kind) if self._kinds > NEXT else None
        return made or self._rendering(index + 2, False, probe)

    def _start_of(self, index: int, path: Path, first: int, ended: Path) -> int:
        """Return where a path has text of a message first; if nowhere, where A(i) is no prompt any more."""
        places = self._hidden.places()[index]
        if places and places[0] < path.shared:
            return places[0]
        facts = self.renderer.segments.facts
        for place, (number, base) in enumerate(path.own, path.shared):
            if index - base in facts[number].owners:
                return place
        return first if self.paths.common(path, ended) >= first else 0

    def said(self, index: int) -> Said:
        """Return what an assistant message says, by its fields of Harmony."""
        if self.view.is_plain:
            return PLAIN
        message = self.view.conversation.messages[index]
        if message.channel is None and message.recipient is None:
            return PLAIN
        questions = [("equals", ("field", (index, "channel")), name) for name in ("analysis", "commentary", "final")]
        if message.channel is not None and not self.renderer.is_keyed(questions):
            self.view.is_keyed = False
        part = Part.CONTENT if message.recipient is None else Part.TOOL_CALL
        part = Part.REASONING if message.channel == "analysis" else part
        return Said(part, is_continued(message))

    def _look(
        self,
        index: int,
        prompt: list[Output],
        ended: list[Output],
        notes: Notes,
        with_next: list[Rendering] | None = None,
        opening: str | None = None,
    ) -> Answer[Cursor]:
        """Find the answer by the rules, in branches of P(i) and A(i)."""
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

    def hidden_in(self, path: Path, last: int) -> str:
        """Return what a path leaves out of the tools and the messages up to the last; nothing where it shows all."""
        if last in self._sampled and path is self._apart[last]:  # what a model writes has all that history has
            history = self.until(last)
            path = path if isinstance(history, Refusal) else history
        hidden = self._hidden.find(path, last)
        if hidden or not self.view.has_tools:
            return hidden
        facts = self.renderer.segments.facts
        shows_tools = any(facts[number].shows_tools for number, _ in self.paths.listed(path))
        return "" if shows_tools else "tools"

    def messages_in(self, path: Path) -> set[int]:
        """Return the messages that a path has texts of."""
        facts = self.renderer.segments.facts
        return {base + owner for number, base in self.paths.listed(path) for owner in facts[number].owners}

    # ---- what stands before an answer

    def opening(self, index: int) -> str:
        """Return the generation prompt of a message, if the template wrote all of it; else nothing.

        If the template opens no iteration after an assistant's message, it is the one that message is in.
        """
        opening = self._openings.get(index)
        if opening is None:
            opening = self._openings[index] = self._opening(index)
        return opening

    def _opening(self, index: int) -> str:
        prompt = self.prompt(index)
        before = self._of_answer(index, BEFORE) or self.until(index - 1)
        added: str | None = None
        if not isinstance(prompt, Refusal) and not isinstance(before, Refusal):
            same = self.paths.common(prompt, before)
            branches = (self.paths.part(prompt, same), self.paths.part(before, same))
            added = self.lookup.remembered("opening", index, branches, partial(self._added, branches))
        if not added and index > 0 and self.view.roles[index - 1] is RoleCode.ASSISTANT:
            return self.opening(index - 1)
        return added or ""

    def _added(self, branches: tuple[list[Output], list[Output]], notes: Notes) -> str | None:
        prompt, before = (self.renderer.segments.window(branch, 0, self.view).rendering for branch in branches)
        for rendering in (prompt, before):
            note_emptiness(rendering, notes)
        return added_by(prompt, before, notes)

    def header(self, index: int) -> str | None:
        """Return what A(index) has in the iteration of a message before its answer; else its generation prompt."""
        answer = self._found.get(index)
        if answer is None or answer.reason or index in self._sampled:
            return self.opening(index) or None
        paths, ended = self.paths, self.trained(index)
        size = paths.size(ended)
        at, part, offset = answer.first + answer.begin.entry, *answer.begin[1:]
        parts = self.renderer.segments.facts[paths.at(ended, min(at, size - 1))[0]].parts
        if at == size:  # the answer is empty, and its stop is appended
            part, offset = len(parts) - 1, len(parts[-1][0] or "")
        elif parts[part][1] is not None and part > 0:  # right before a text of the message
            part, offset = part - 1, len(parts[part - 1][0] or "")
        literal, expression = parts[part]
        return (literal or "")[:offset] if expression is None else ""
