"""The stretches of one template: labelled segments as items, by what comes before them in a document."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from chatmill.render.document_items import TokenRules, items_of
from chatmill.render.jinja.expressions import Notes
from chatmill.render.jinja.labels import NOBODY, Span
from chatmill.render.jinja.questions import shifted_question
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.segments import common
from chatmill.render.jinja.turn_documents import Entry, Labels
from chatmill.render.stretch_table import Numbered, StretchTable

Remembered = Callable[[Any, int, Callable[[Notes], Any]], Any]
"""Gives what was found for a key and the replies of a record; else looks, and remembers it."""


class Stretches:
    """Numbers stretches, and keeps their items."""

    def __init__(self, rules: TokenRules, *, arguments_are_text: bool) -> None:
        """Begin without any."""
        self._rules = rules
        self.table = StretchTable(arguments_are_text=arguments_are_text)
        self._known: dict[tuple[Labels | None, int, int], tuple[int, int]] = {}
        self._carries = Numbered(rules.first)
        self._moved: dict[tuple[int, int], int] = {}

    def of(
        self, documents: Sequence[Sequence[Entry]], labels: Labels, view: RecordView, remembered: Remembered
    ) -> list[list[Entry]]:
        """Return the stretches of documents of labelled segments; what two of them begin with is found once."""
        if self._rules.looks_back:
            return [[self._as_one(entries, labels, view)] for entries in documents]
        rows: list[list[Entry]] = []
        earlier: list[tuple[Sequence[Entry], list[tuple[int, int]]]] = []  # the first and the last, and their states
        by_texts = self._rules.depends_on_texts
        for entries in documents:
            same, of = max(((common(one, entries), at) for at, (one, _) in enumerate(earlier)), default=(0, 0))
            states = earlier[of][1][:same] if same else []  # what is left to the next, and the stretch, -1 for none
            carry, before = (states[-1][0], entries[same - 1][1]) if same else (0, 0)
            for label, base in entries[same:]:
                if by_texts:
                    carry = self._moved_carry(carry, base - before)
                    look = partial(self._items, label, carry, labels, view=view, base=base)
                    number, carry = remembered(("items", label, carry), base, look)
                else:
                    number, carry = self.step(labels, label, carry, base - before)
                before = base
                states.append((carry, number))
            entries_made = [
                (number, base) for (_, number), (_, base) in zip(states, entries, strict=True) if number >= 0
            ]
            last = self.end(carry)
            rows.append([*entries_made, (last, before)] if last >= 0 else entries_made)
            earlier = [*earlier[:1], (entries, states)]
        return rows

    def step(self, labels: Labels, label: int, carry: int, by: int) -> tuple[int, int]:
        """Return the stretch of a label, -1 for none, after what is so many messages before it; and what it leaves."""
        carry = self._moved_carry(carry, by)
        step = self._known.get((labels, label, carry))
        if step is None:
            step = self._known[labels, label, carry] = self._items(label, carry, labels, Notes())
        return step

    def end(self, carry: int) -> int:
        """Return the stretch that ends a document; -1 for none."""
        key = (None, -1, carry)
        if key not in self._known:
            last, _ = items_of((), self._rules, Notes(), self._carries[carry], ends=True)
            self._known[key] = self.table.add(last) if last else -1, carry
        return self._known[key][0]

    def _moved_carry(self, carry: int, by: int) -> int:
        if not by or not self._carries[carry].literals:
            return carry
        number = self._moved.get((carry, by))
        if number is None:
            number = self._moved[carry, by] = self._carries.number(self._carries[carry].moved(by))
        return number

    def _items(
        self, label: int, carry: int, labels: Labels, notes: Notes, view: RecordView | None = None, base: int = 0
    ) -> tuple[int, int]:
        """Return the number of a stretch, -1 where it has no items, and what it leaves to the next."""
        spans: Iterable[Span] = labels.spans[label]
        if view is not None:
            texts = [span.text for span in labels.spans_at((label, base), view)]
            spans = [span._replace(text=text) for span, text in zip(spans, texts, strict=True)]
        replies = Notes()
        items, left = items_of(tuple(spans), self._rules, replies, self._carries[carry])
        notes.add({shifted_question(question, base): reply for question, reply in replies.replies.items()})
        return self.table.add(items) if items else -1, self._carries.number(left)

    def _as_one(self, entries: Sequence[Entry], labels: Labels, view: RecordView) -> Entry:
        """Return a whole document as one stretch."""
        spans = [span for entry in entries for span in labels.spans_at(entry, view)]
        spans = [span._replace(message=NOBODY) if span.message < 0 else span for span in spans]
        items, _ = items_of(spans, self._rules, Notes(), self._rules.first, ends=True)
        return self.table.add(items), 0
