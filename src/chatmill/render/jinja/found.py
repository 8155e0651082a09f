"""What is found of an answer: where it is in a list of outputs, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from chatmill.render.jinja.segments import Cursor


class Found(NamedTuple):
    """The answer of a message, and where it is in a list of outputs; or why there is none."""

    message: int
    reason: str = ""
    detail: str = ""
    first: int = 0
    """The output that places are counted from."""
    stop: str = ""
    is_appended: bool = False
    """The stop is not in A(i): the next message's header would write it."""
    is_there: bool = False
    """Whether the outputs that were looked at have the answer after its own prompt, character by character."""
    begin: Cursor = Cursor(0, 0, 0)
    stop_begin: Cursor = Cursor(0, 0, 0)
    end: Cursor = Cursor(0, 0, 0)
    pauses: tuple[tuple[Cursor, Cursor, Cursor], ...] = ()
    """As `turns.Pause`: where a stop inside the answer begins and ends, and where the answer goes on."""

    @property
    def is_quoting(self) -> bool:
        """Whether the detail quotes the record: it is remembered for no other one."""
        return self.reason in ("no_prompt", "template_refused", "content_after_result")


UNDECIDED = "undecided"
"""Windows are alike, and end before the answer does."""


def cursors_of(found: Found) -> list[Cursor]:
    """Return all places of an answer."""
    return [found.begin, found.stop_begin, found.end, *(place for pause in found.pauses for place in pause)]


def with_cursors(found: Found, places: Sequence[Cursor]) -> Found:
    """Return an answer that is at other places, in the order of `cursors_of`."""
    pauses = tuple((places[n], places[n + 1], places[n + 2]) for n in range(3, len(places), 3))
    return found._replace(begin=places[0], stop_begin=places[1], end=places[2], pauses=pauses)
