"""Fragments: stretches of a sequence. Most sequences are one; those put together have one for each message, shared.

The items of a sequence are those of its messages, one behind the other, where every message begins with a control token
or where a model starts to write. The fragments of messages are made once and shared by all sequences that have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from chatmill.core.native.sequence_layout import Origin
from chatmill.render.jinja.expressions import Notes, root
from chatmill.render.jinja.labels import Span
from chatmill.render.jinja.message_sequences import Group, Lesson
from chatmill.render.jinja.turn_sequences import TextSequence
from chatmill.render.sequence_items import Ids, TextPart, TokenRules, cuts_of, items_of
from chatmill.render.text_places import Operations, place_of

MAX_FRAGMENTS = 50_000


class Fragment:
    """Items that follow each other in a sequence."""

    def __init__(self, items: list[Ids | TextPart]) -> None:
        """All items of a sequence, or those of one of its messages."""
        self.items = items

    @cached_property
    def showings(self) -> dict[tuple[Origin, int], list[Operations]]:
        """The contents and reasoning that it shows, by column and message, and what is done to them each time."""
        shown: dict[tuple[Origin, int], list[Operations]] = {}
        for item in self.items:
            if isinstance(item, TextPart) and item.expression is not None:
                place = place_of(item.expression, arguments_are_text=True)
                if place is not None and place.origin in (Origin.CONTENT, Origin.REASONING):
                    shown.setdefault((place.origin, place.message), []).append(place.operations)
        return shown


class _MessageFragment(Fragment):
    """The items of one message; the same object for all conversations that have it."""

    def __init__(self, items: list[Ids | TextPart], spans: Sequence[Span]) -> None:
        """`spans` are what the items were made of."""
        super().__init__(items)
        self.breaks = spans[0].breaks
        self.first_texts = _leading(spans)
        self.last_texts = tuple(reversed(_leading(spans[::-1])))


def _leading(spans: Sequence[Span]) -> tuple[str, ...]:
    """The template texts before the first text of the record."""
    count = next((k for k, span in enumerate(spans) if span.expression is not None), len(spans))
    return tuple(span.text for span in spans[:count])


class Fragments:
    """The fragments of all messages that one template has written."""

    def __init__(self, rules: TokenRules) -> None:
        """None yet."""
        self._rules = rules
        self._known: dict[tuple[Lesson, int, tuple[int, ...]], _MessageFragment | None] = {}
        self._follows: dict[tuple[_MessageFragment, _MessageFragment], bool] = {}

    def of(self, groups: Sequence[Group]) -> tuple[Fragment, ...] | None:
        """The fragments of a sequence; None where its items are not those of its messages."""
        if len(self._known) > MAX_FRAGMENTS:
            self._known, self._follows = {}, {}
        found: list[_MessageFragment] = []
        for group in groups:
            key = group[:3]
            if key not in self._known:
                self._known[key] = self._made(group)
            fragment = self._known[key]
            if fragment is None or (found and not self._may_follow(found[-1], fragment)):
                return None
            found.append(fragment)
        return tuple(found)

    def _made(self, group: Group) -> _MessageFragment | None:
        spans, notes = group.spans(), Notes()
        items = items_of(TextSequence(tuple(spans), ()), self._rules, notes)
        of_others = any(
            span.expression is not None
            and (root(span.expression) or (None,))[0] not in (group.message, "tools", "options")
            for span in spans
        )
        if notes.replies or not items or of_others:  # it depends on more than its own message and shape
            return None
        return _MessageFragment(items, spans)

    def _may_follow(self, before: _MessageFragment, fragment: _MessageFragment) -> bool:
        """Whether the items of two messages in a sequence are those of each of them."""
        key = (before, fragment)
        found = self._follows.get(key)
        if found is None:
            found = self._follows[key] = self._begins_by_itself(before, fragment)
        return found

    def _begins_by_itself(self, before: _MessageFragment, fragment: _MessageFragment) -> bool:
        """Whether neither a token nor a piece of text lies across the border of two messages."""
        rules = self._rules
        if fragment.breaks and rules.prefix is None and not rules.stripping:
            return True
        own = cuts_of(fragment.first_texts, rules.pattern)
        if not own or not own[0].is_control or rules.stripping.get(own[0].text, (False, False))[0]:
            return False
        joined = cuts_of((*before.last_texts, *fragment.first_texts), rules.pattern)
        number = len(before.last_texts)
        return [cut._replace(number=cut.number + number) for cut in own] == list(joined[len(joined) - len(own) :])
