"""Reasoning inside messages: taken out of contents as the published Qwen3 template does, singly and for columns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Message
from chatmill.core.messages import MessageColumns
from chatmill.core.native.find import positions_of
from chatmill.core.texts import Texts

THINK, THINK_END = "<think>", "</think>"
NEWLINE = ord("\n")
Ints = NDArray[np.int64]


def split_reasoning(message: Message) -> tuple[str, str]:
    """Reasoning and content as the published template sees them.

    Without reasoning of its own, a content that holds `</think>` is split: what stands between the last `<think>`
    before the first `</think>` and that mark is the reasoning, what stands after the last `</think>` is the content.
    """
    content = message.content
    if message.reasoning is not None:
        return message.reasoning, content
    if THINK_END not in content:
        return "", content
    pieces = content.split(THINK_END)
    return pieces[0].rstrip("\n").split(THINK)[-1].lstrip("\n"), pieces[-1].lstrip("\n")


class Answers(NamedTuple):
    """What assistant messages show; one entry for each of them."""

    shows: NDArray[np.bool_]
    """Whether the thinking block is shown, be it empty."""
    reasoning: Texts
    """Empty where none is shown."""
    texts: Texts
    is_empty: NDArray[np.bool_]
    """Whether there is no answer, not even a newline that is trimmed."""
    stripped: Ints
    """Characters that are not shown."""


def answers_of(messages: MessageColumns, late: NDArray[np.bool_], final: NDArray[np.bool_]) -> Answers:
    """The shown parts of assistant messages: `split_reasoning` for columns, and the trimming that follows it.

    The thinking block is shown of those that are `late` and have reasoning or are `final`. Of the others reasoning is
    left out, and the answer is not trimmed.
    """
    contents, reasoning = messages.contents, messages.reasoning
    answers, thoughts = contents, reasoning
    ends = positions_of(THINK_END.encode(), contents.data)
    before = np.searchsorted(ends, contents.starts)
    after = np.searchsorted(ends, contents.starts + contents.lengths - len(THINK_END), side="right")
    apart = (after > before) & ~messages.has_reasoning
    if apart.any():
        answers, thoughts = _taken_apart(messages, apart, ends[before[apart]], ends[after[apart] - 1])
    shows = late & (final | (thoughts.lengths > 0))
    thoughts, shown = thoughts.trimmed(NEWLINE), answers.trimmed(NEWLINE, end=False)
    thoughts = Texts(thoughts.data, thoughts.starts, np.where(shows, thoughts.lengths, 0))
    shown = Texts(shown.data, *np.where(shows, (shown.starts, shown.lengths), (answers.starts, answers.lengths)))
    stripped = contents.lengths + reasoning.lengths - thoughts.lengths - shown.lengths
    more = np.flatnonzero(apart | (~shows & (reasoning.lengths > 0)))  # of the others only newlines are gone
    for sign, texts in ((1, contents), (1, reasoning), (-1, thoughts), (-1, shown)):
        stripped[more] += sign * (texts.take(more).characters() - texts.lengths[more])
    return Answers(shows, thoughts, shown, answers.lengths == 0, stripped)


def _taken_apart(
    messages: MessageColumns, apart: NDArray[np.bool_], first_end: Ints, last_end: Ints
) -> tuple[Texts, Texts]:
    """Answers and reasoning of all, where some contents hold both; the first and last marks in these are given."""
    contents, which = messages.contents, np.flatnonzero(apart)
    begins = np.concatenate([[-1], positions_of(THINK.encode(), contents.data)])
    starts = contents.starts[which]
    unmarked = Texts(contents.data, starts, first_end - starts).trimmed_end(NEWLINE)
    stops = unmarked.starts + unmarked.lengths
    mark = begins[np.maximum(np.searchsorted(begins, stops - len(THINK), side="right") - 1, 0)]  # the last before it
    starts = np.where(mark >= starts, mark + len(THINK), starts)
    thoughts = Texts(contents.data, starts, stops - starts).trimmed(NEWLINE, end=False)
    after = last_end + len(THINK_END)
    rest = Texts(contents.data, after, contents.starts[which] + contents.lengths[which] - after)
    rest = rest.trimmed(NEWLINE, end=False)
    return contents.replaced(which, rest), messages.reasoning.replaced(which, thoughts)
