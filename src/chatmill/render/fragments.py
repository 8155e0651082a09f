"""Fragments: the items of single messages, for rows that are put together message by message.

The items of a row are those of its messages, one behind the other, where every message begins with a control token, or
goes on with a piece of text in which both messages have text of the record. Fragments are made once and shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from enum import Enum

from chatmill.render.jinja.expressions import Notes, root
from chatmill.render.jinja.labels import Span
from chatmill.render.jinja.message_rows import Group, Lesson
from chatmill.render.jinja.rows import Row
from chatmill.render.row_items import Ids, TextPart, TokenRules, cuts_of, items_of

MAX_FRAGMENTS = 50_000


class Joint(Enum):
    """How a fragment follows another one."""

    NONE = 0
    """Not as it is: its items depend on the other one."""
    NEW = 1
    """It begins with a control token, or with a piece of its own."""
    CONTINUED = 2
    """Its first text goes on with the last piece of the other one."""


class Fragment:
    """The items of one message; the same object for all conversations that have it."""

    __slots__ = ("_continued", "breaks", "first_texts", "items", "last_texts", "shown")

    def __init__(self, items: list[Ids | TextPart], spans: Sequence[Span]) -> None:
        """`spans` are what the items were made of."""
        self.items = items
        self.shown = frozenset(root(span.expression) for span in spans if span.expression is not None)
        """The fields whose texts it has."""
        self.breaks = spans[0].breaks
        self.first_texts = _leading(spans)
        self.last_texts = tuple(reversed(_leading(spans[::-1])))
        self._continued: Fragment | None = None

    def continued(self) -> Fragment:
        """The same without a new piece at its beginning."""
        if self._continued is None:
            first, *others = self.items
            assert isinstance(first, TextPart)
            self._continued = copy(self)
            self._continued.items = [first._replace(opens=False), *others]
        return self._continued


def _leading(spans: Sequence[Span]) -> tuple[str, ...]:
    """The template texts before the first text of the record."""
    count = next((k for k, span in enumerate(spans) if span.expression is not None), len(spans))
    return tuple(span.text for span in spans[:count])


class Fragments:
    """All fragments of one template."""

    def __init__(self, rules: TokenRules) -> None:
        """None yet."""
        self._rules = rules
        self._known: dict[tuple[Lesson, int, tuple[int, ...]], Fragment | None] = {}
        self._joints: dict[tuple[Fragment, Fragment], Joint] = {}

    def of(self, groups: Sequence[Group]) -> tuple[Fragment, ...] | None:
        """The fragments of a row; None where its items are not those of its messages."""
        if len(self._known) > MAX_FRAGMENTS:
            self._known, self._joints = {}, {}
        found: list[Fragment] = []
        for group in groups:
            key = group[:3]
            if key not in self._known:
                self._known[key] = self._made(group)
            fragment = self._known[key]
            joint = self._joint(found[-1], fragment) if found and fragment else Joint.NEW
            if fragment is None or joint is Joint.NONE:
                return None
            found.append(fragment.continued() if joint is Joint.CONTINUED else fragment)
        return tuple(found)

    def _made(self, group: Group) -> Fragment | None:
        spans, notes = group.spans(), Notes()
        items = items_of(Row(tuple(spans), ()), self._rules, notes)
        of_others = any(
            span.expression is not None and (root(span.expression) or (None,))[0] not in (group.message, "tools")
            for span in spans
        )
        if notes.answers or not items or of_others:  # it depends on more than its own message and shape
            return None
        return Fragment(items, spans)

    def _joint(self, before: Fragment, fragment: Fragment) -> Joint:
        key = (before, fragment)
        found = self._joints.get(key)
        if found is None:
            found = self._joints[key] = self._joint_of(*key)
        return found

    def _joint_of(self, before: Fragment, fragment: Fragment) -> Joint:
        rules = self._rules
        if fragment.breaks and rules.prefix is None and not rules.stripping:
            return Joint.NEW
        own = cuts_of(fragment.first_texts, rules.pattern)
        joined = cuts_of((*before.last_texts, *fragment.first_texts), rules.pattern)
        number = len(before.last_texts)
        moved = [cut._replace(number=cut.number + number) for cut in own]
        if moved != list(joined[len(joined) - len(own) :]):  # a control token lies across the border
            return Joint.NONE
        if own and own[0].is_control:
            return Joint.NONE if rules.stripping.get(own[0].text, (False, False))[0] else Joint.NEW
        ends_in_text = isinstance(before.items[-1], TextPart) and isinstance(fragment.items[0], TextPart)
        simple = rules.prefix is None and not rules.stripping
        return Joint.CONTINUED if ends_in_text and simple else Joint.NONE
