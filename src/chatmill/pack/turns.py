"""The outline of one conversation: head, messages, steps and turns as token spans, read from its runs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from chatmill.core.kinds import Part, RoleCode, part_of, role_of
from chatmill.core.tokens import Tokens

Span = tuple[int, int]
"""First token and one past the last, counted in the conversation."""

LEADING = frozenset({RoleCode.NONE, RoleCode.SYSTEM, RoleCode.DEVELOPER})
"""Roles of the head; a later system message is an ordinary message."""
REPLYING = frozenset({RoleCode.ASSISTANT, RoleCode.TOOL})


class Step(NamedTuple):
    """A message after the head, or an assistant message with the tool results after it, never split while it fits.

    Several assistant messages are one step when all but the last call a tool: their results come later.
    """

    role: RoleCode
    """Of its first message."""
    start: int
    content: int
    """First token after the header of its first message (its `end` when there is nothing else)."""
    answer: int
    """End of the part that is no tool result; the results are `answer .. end`."""
    end: int
    calls: bool = False
    """Whether it is an assistant message that calls a tool."""

    @property
    def is_reply(self) -> bool:
        """Whether it is part of an answer."""
        return self.role in REPLYING


@dataclass(frozen=True, slots=True)
class Exchange:
    """What comes before an assistant answers (user messages, as a rule), and the steps of the answer."""

    asked: list[Step]
    steps: list[Step]
    """Empty only in a last turn without an answer."""

    @property
    def lead(self) -> Span:
        """What comes before the answer; empty where the conversation begins with one."""
        start = (self.asked or self.steps)[0].start
        return start, self.asked[-1].end if self.asked else start

    @property
    def end(self) -> int:
        """One past the last token."""
        return (self.steps or self.asked)[-1].end


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A conversation of `length` tokens: `0 .. head`, the messages, `tail .. length`."""

    head: int
    """End of the head: document start, system and developer messages, tool definitions."""
    tail: int
    """Start of the tail: the document end, which belongs to no message."""
    length: int
    messages: tuple[Step, ...]
    """Each as a step of its own; they cover `head .. tail` without gaps."""

    def steps(self, limit: int) -> list[Step]:
        """Return all messages as steps, in order.

        Assistant messages that belong together but are longer than `limit` tokens together are split.
        """
        steps: list[Step] = []
        at = 0
        while at < len(self.messages):
            first = self.messages[at]
            last = at
            while self.messages[last].calls and self._role(last + 1) is RoleCode.ASSISTANT:
                last += 1
            if self.messages[last].end - first.start > limit:
                last = at
            answer = self.messages[last].answer
            at = last + 1
            while first.role in REPLYING and self._role(at) is RoleCode.TOOL:
                at += 1
            steps.append(first._replace(answer=answer, end=self.messages[at - 1].end))
        return steps

    def turns(self, limit: int) -> list[Exchange]:
        """Return all messages as turns, in order."""
        turns: list[Exchange] = []
        for step in self.steps(limit):
            if not turns or (turns[-1].steps and not step.is_reply):
                turns.append(Exchange([], []))
            (turns[-1].steps if step.is_reply else turns[-1].asked).append(step)
        return turns

    def _role(self, index: int) -> RoleCode | None:
        return self.messages[index].role if index < len(self.messages) else None


class _KindRun(NamedTuple):
    role: RoleCode
    part: Part
    message: int
    start: int
    end: int


def outline(tokens: Tokens, index: int) -> Outline:
    """Return the outline of one conversation of a batch."""
    a, b = tokens.document_runs[index : index + 2].tolist()
    borders = pairwise((tokens.run_offsets[a : b + 1] - tokens.offsets[index]).tolist())
    columns = zip(tokens.run_kinds[a:b].tolist(), tokens.run_messages[a:b].tolist(), borders, strict=True)
    runs = [_KindRun(role_of(kind), part_of(kind), m, start, end) for kind, m, (start, end) in columns if end > start]
    first = next((i for i, run in enumerate(runs) if run.role not in LEADING), len(runs))
    last = len(runs)
    while last > first and runs[last - 1].role is RoleCode.NONE:
        last -= 1
    groups: list[list[_KindRun]] = []
    for run in runs[first:last]:
        # Tokens of no message (a document start between turns) open the message after them.
        if groups and (groups[-1][-1].role is RoleCode.NONE or _continues(run, groups[-1][-1])):
            groups[-1].append(run)
        else:
            groups.append([run])
    length = int(tokens.lengths[index])
    return Outline(
        head=runs[first].start if first < len(runs) else length,
        tail=runs[last].start if last < len(runs) else length,
        length=length,
        messages=tuple(map(_message, groups)),
    )


def _continues(run: _KindRun, before: _KindRun) -> bool:
    return run.message == before.message and (run.message >= 0 or run.role is before.role)


def _message(runs: list[_KindRun]) -> Step:
    spoken = (run.role for run in runs if run.role not in (RoleCode.NONE, RoleCode.IMAGE))
    role = next(spoken, RoleCode.USER)  # a message that is nothing but a picture
    start, end = runs[0].start, runs[-1].end
    after = (run.start for run in runs if run.role is not RoleCode.NONE and run.part is not Part.HEADER)
    calls = role is RoleCode.ASSISTANT and any(run.part is Part.TOOL_CALL for run in runs)
    return Step(role, start, next(after, end), start if role is RoleCode.TOOL else end, end, calls)
