"""The rules by which the answer of a message is found: where it begins, where it goes on, and its stop.

P(i) is the rendering of the messages before i with the generation prompt, A(i) that of the messages up to i without
one. The answer of i is what A(i) has after P(i), up to and including its stop. Some templates write the messages
before i in another way once it is there (gpt-oss drops reasoning before calls): the answer then is what A(i) writes in
the turn of i after the generation prompt, and follows P(i) in a document of its own. See docs/masks.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Message, Role
from chatmill.render.jinja.expressions import Notes
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.rendering import Piece, Rendering, begins_with, difference, literal_from
from chatmill.render.jinja.stops import THINKING, StopTokens

PROBE_TEXT = "Next."


Place = TypeVar("Place")
Other = TypeVar("Other")


class Generation(NamedTuple, Generic[Place]):
    """What a model writes at one go."""

    begin: Place
    stop: Place
    """Where its stop begins."""
    end: Place
    """After the stop."""


class Answer(NamedTuple, Generic[Place]):
    """The answer of one assistant message, or the reason why there is none.

    A place is a character of a rendering, or a cursor in a list of outputs.
    """

    message: int
    reason: str = ""
    """Empty for an answer that is proved; else a code of docs/errors.md."""
    detail: str = ""
    stop: str = ""
    is_appended: bool = False
    """The stop is not in A(i): the next message's header would write it. The answer ends where A(i) does."""
    before_stop: str = ""
    """White space that the template writes before a stop that is appended."""
    generations: tuple[Generation[Place], ...] = ()
    """Mostly one; more if the template opens the assistant's turn again after a stop, and goes on."""
    first: int = 0
    """The output that cursors count from."""
    is_there: bool = False
    """Whether the outputs that were looked at have the answer after its own prompt, character by character."""

    @property
    def begin(self) -> Place:
        """Where the answer begins, after the whole of P(i)."""
        return self.generations[0].begin

    @property
    def end(self) -> Place:
        """Where it ends, after its stop."""
        return self.generations[-1].end

    @property
    def is_quoting(self) -> bool:
        """Whether the detail quotes the record: it is remembered for no other one."""
        return self.reason in ("no_prompt", "template_refused", "content_after_result")

    def moved(self, move: Callable[[Place], Other], move_end: Callable[[Place], Other]) -> Answer[Other]:
        """Return the answer at other places."""
        moved = tuple(Generation(move(a), move(b), move_end(c)) for a, b, c in self.generations)
        answer: Answer[Any] = self._replace(generations=())
        return answer._replace(generations=moved)


def is_continued(message: Message) -> bool:
    """Return whether an assistant's turn goes on after a message (of Harmony): what ends the message is no stop."""
    if message.tool_calls or message.channel not in ("analysis", "commentary"):
        return False
    return message.channel == "analysis" or message.recipient is None


class NeedsNext(Exception):  # noqa: N818
    """The rules ask what the template writes before a next message."""


class NeedsPrompt(Exception):  # noqa: N818
    """The rules ask for the generation prompt."""


class Rules:
    """The rules, on P(i) and A(i) or what is left of them behind what both begin with."""

    def __init__(
        self,
        message: Message,
        stops: StopTokens,
        notes: Notes,
        *,
        with_next: Sequence[Rendering] | None = None,
        opening: str | None = None,
    ) -> None:
        """Send what is asked of texts to `notes`.

        `with_next` are A(i) with messages that may follow, and `opening` is the generation prompt; both are not known
        at first.
        """
        self._is_continued = is_continued(message)
        self._stops, self._notes, self._with_next, self._opening = stops, notes, with_next, opening

    def answer(self, index: int, prompt: Rendering, ended: Rendering) -> Answer[int]:
        """Return the answer of message `index`; places count in `ended`."""
        if not begins_with(ended, prompt, self._notes):
            return Answer(index, "prompt_not_in_history", difference(prompt, ended))
        begin, pieces = len(prompt.text), [piece for piece in ended.pieces if piece.owner == index]
        if any(piece.start < begin < piece.stop for piece in pieces):
            return Answer(index, "prompt_not_in_history", "the generation prompt ends inside the message's own text")
        said, size = max([begin, *(piece.stop for piece in pieces)]), len(ended.text)
        generations_found: list[Generation[int]] = []
        stop = self._stop_behind(ended, index, said if self._is_continued else begin)
        while stop is not None:
            generations_found.append(Generation(begin, *stop.span()))
            again = self._behind_prompt(ended, stop.end())
            behind = None if again is None else self._stop_behind(ended, index, again)
            if again is None or behind is None:
                break
            begin, stop = again, behind
        if stop is not None and self._goes_on(pieces, stop.end()):
            rest = literal_from(ended, stop.end())[:40]
            return Answer(index, "goes_on_after_stop", f"{stop.group()!r} and then {rest!r}")
        generations = tuple(generations_found) or (Generation(begin, size, size),)
        for start, _, end in generations:
            unclosed = self._unclosed_reasoning(prompt, ended, start, end)
            if unclosed:
                return Answer(index, "reasoning_not_closed", unclosed)
        if stop is not None:
            return Answer(index, stop=stop.group(), generations=generations)
        foreign = self._foreign_text(ended, index, begin, said)
        if foreign is not None:
            return Answer(index, "content_after_result", f"{foreign[:40]!r} is inside the answer")
        appended = self._appended_stop(index, ended)
        if appended is None:
            return Answer(index, "no_stop", f"the template writes {literal_from(ended, said)[:40]!r} after the answer")
        blank, stop_text = appended
        return Answer(index, stop=stop_text, is_appended=True, before_stop=blank, generations=generations)

    def _goes_on(self, pieces: list[Piece], end: int) -> bool:
        """Return whether text of a message is after the stop of its answer; later records must agree."""
        behind = [piece for piece in pieces if piece.start >= end]
        return any(self._notes.filled(one.expression, one.start < one.stop) for one in behind)

    def _behind_prompt(self, ended: Rendering, at: int) -> int | None:
        """Return the end of a generation prompt that the template writes again after a stop; None without one."""
        literal = literal_from(ended, at)
        blank = len(literal) - len(literal.lstrip())
        if blank == len(literal):
            return None
        if self._opening is None:
            raise NeedsPrompt
        opening = self._opening.lstrip()
        return at + blank + len(opening) if opening and literal.startswith(opening, blank) else None

    def _unclosed_reasoning(self, prompt: Rendering, ended: Rendering, begin: int, end: int) -> str:
        """What is wrong where the prompt opens reasoning and the answer does not close it; later records must agree."""
        last = max((piece.stop for piece in prompt.pieces if piece.expression is not None), default=0)
        opening = prompt.text[last:].rstrip()
        mark = next((word for word in THINKING if opening.endswith(word)), None)
        if mark is None:
            return ""
        close = THINKING[mark]
        for piece in ended.pieces:
            if piece.stop <= begin or piece.start >= end:
                continue
            closes = close in ended.text[max(begin, piece.start) : min(end, piece.stop)]
            if piece.expression is not None:
                self._notes.note(("contains", piece.expression, close), closes)
            if closes:
                return ""
        return f"the prompt ends with {mark!r}, and no {close!r} follows"

    def _foreign_text(self, ended: Rendering, index: int, begin: int, behind: int) -> str | None:
        """Text of another message, or of the tools, that an answer goes on after; later records must agree."""
        for piece in ended.pieces:
            if piece.expression is None or piece.owner == index or not begin <= piece.start < behind:
                continue
            self._notes.filled(piece.expression, piece.start < piece.stop)
            if piece.start < piece.stop:
                return ended.text[piece.start : piece.stop]
        return None

    def _stop_behind(self, rendering: Rendering, index: int, at: int) -> re.Match[str] | None:
        """The first stop token in template text after a place, before any text that is not of message `index`."""
        pattern = self._stops.any_end() if self._is_continued else self._stops.pattern()
        for piece in rendering.pieces:
            if piece.expression is not None:
                if piece.start >= at and piece.start < piece.stop and piece.owner != index:
                    return None
                continue
            match = pattern.search(rendering.text, max(at, piece.start), piece.stop)
            if match is not None:
                return match
        return None

    def _appended_stop(self, index: int, ended: Rendering) -> tuple[str, str] | None:
        """The stop that the header of a next message writes, and the white space before it.

        None where there is none, or other text comes first.
        """
        if self._with_next is None:
            raise NeedsNext
        for rendering in self._with_next:
            starts = [piece.start for piece in rendering.pieces if piece.owner == index]
            if starts:  # the next message may change this one (GLM drops its reasoning), but not where it ends
                behind = starts[0]
            elif begins_with(rendering, ended, self._notes):
                behind = len(ended.text)
            else:
                continue
            stop = self._stop_behind(rendering, index, behind)
            if stop is not None:
                # Only text of the template counts: white space of the record differs from one to the next.
                blank = _blank_at_end(rendering.text[_end_of(rendering, index, behind, stop.start()) : stop.start()])
                size = len(ended.text)
                written = _blank_at_end(ended.text[_end_of(ended, index, size, size) :])
                return blank[len(written) :] if blank.startswith(written) else "", stop.group()
        return None


def _end_of(rendering: Rendering, index: int, otherwise: int, limit: int) -> int:
    """Return where the last text of a message ends, empty or not, before a character."""
    ends = (piece.stop for piece in rendering.pieces if piece.owner == index and piece.stop <= limit)
    return max(ends, default=otherwise)


def _blank_at_end(text: str) -> str:
    return text[len(text.rstrip()) :]


def added_by(prompt: Rendering, before: Rendering, notes: Notes) -> str | None:
    """Return what a prompt has after the same messages without one; None where that is not text of the template."""
    size = len(before.text)
    added = literal_from(prompt, size)
    return added if begins_with(prompt, before, notes) and size + len(added) == len(prompt.text) else None


def make_probes(view: RecordView, answers: Sequence[int]) -> NDArray[np.int64]:
    """Have a view hold what may follow its answers: a result where one calls a tool, and a question.

    Gives two numbers of probes for each answer, in this order; the second is -1 if there is one only.
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


def list_renderings(
    speaking: Sequence[int], count: int, probes: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], int]:
    """List the renderings that answers are found by, and return how many each answer has.

    A line has a number of messages, whether the generation prompt follows, and a probe or -1. Each answer has a line
    for A(i - 1), P(i) and A(i), and for A(i) with each of its probes. The last line is F.
    """
    column = np.array(speaking, dtype=np.int64).reshape(-1, 1)
    kinds = [(0, 0, -1), (0, 1, -1), (1, 0, -1)]
    if probes is not None:
        kinds += [(2, 0, -1)] * 2
    requests = np.tile(np.array(kinds, dtype=np.int64), (len(speaking), 1, 1))
    requests[:, :, 0] += column
    if probes is not None:
        requests[:, -2:, 2] = np.where(probes >= 0, probes, probes[:, :1])
    listed = requests.reshape(-1, 3)
    if not (len(speaking) and speaking[-1] == count - 1 and probes is None):  # else A(i) of the last answer is F
        listed = np.concatenate([listed, [(count, 0, -1)]])
    return listed, len(kinds)
