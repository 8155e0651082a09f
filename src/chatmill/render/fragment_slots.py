"""Token slots of labelled fragments: fixed ids and places for texts, by what comes before them in a document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from chatmill.render.document_items import TokenRules, items_of
from chatmill.render.jinja.answer_cache import AnswerLookup
from chatmill.render.jinja.expressions import Notes, root
from chatmill.render.jinja.label_table import LabelTable
from chatmill.render.jinja.labels import NOBODY, TOOLS, Span
from chatmill.render.jinja.paths import count_common
from chatmill.render.jinja.questions import shifted_question
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.stretch_table import Numbered, StretchTable

Entry = tuple[int, int]
"""A label or its slots, and the message that its paths count from."""
NO_SLOTS = -1
"""In place of the number of slots where there are none."""


class FragmentSlots:
    """The slots of all labelled fragments of one template."""

    def __init__(self, rules: TokenRules, *, arguments_are_text: bool) -> None:
        """Begin without any."""
        self._rules = rules
        self.table = StretchTable(arguments_are_text=arguments_are_text)
        self._known: dict[tuple[LabelTable | None, int, int], tuple[int, int]] = {}
        self._carries = Numbered(rules.first)
        self._moved: dict[tuple[int, int], int] = {}

    def next_slots(self, labels: LabelTable, label: int, carry: int, by: int) -> tuple[int, int]:
        """Return the slots of a label, and what it leaves to the next one.

        Args:
            labels: The labels of the template.
            label: One of them.
            carry: What the label before it in the document leaves to it.
            by: How many messages that one counts from before this one's.
        """
        carry = self._moved_carry(carry, by)
        found = self._known.get((labels, label, carry))
        if found is None:
            found = self._known[labels, label, carry] = self._slots(labels.spans[label], carry, Notes())
        return found

    def last_slots(self, carry: int) -> int:
        """Return the slots that end a document after what is left to them."""
        key = (None, NO_SLOTS, carry)
        if key not in self._known:
            last, _ = items_of((), self._rules, Notes(), self._carries[carry], ends=True)
            self._known[key] = self.table.add(last) if last else NO_SLOTS, carry
        return self._known[key][0]

    def _moved_carry(self, carry: int, by: int) -> int:
        if not by or not self._carries[carry].literals:
            return carry
        number = self._moved.get((carry, by))
        if number is None:
            number = self._moved[carry, by] = self._carries.number(self._carries[carry].moved(by))
        return number

    def _slots(self, spans: Iterable[Span], carry: int, notes: Notes) -> tuple[int, int]:
        items, left = items_of(tuple(spans), self._rules, notes, self._carries[carry])
        slots = self.table.add(items) if items else NO_SLOTS
        return slots, self._carries.number(left)

    # ---- vocabularies whose tokens depend on the texts next to them

    def by_texts(
        self, documents: Sequence[Sequence[Entry]], labels: LabelTable, view: RecordView, lookup: AnswerLookup
    ) -> list[list[Entry]]:
        """Return the slots of documents of one record, where its texts decide them."""
        if self._rules.looks_back:
            return [[self._as_one(entries, labels, view)] for entries in documents]
        rows: list[list[Entry]] = []
        earlier: list[tuple[Sequence[Entry], list[Entry]]] = []
        """The first document and the last one, each with the carries and slots of its labels."""
        for entries in documents:
            same, of = max(((count_common(one, entries), at) for at, (one, _) in enumerate(earlier)), default=(0, 0))
            found = earlier[of][1][:same] if same else []
            carry, before = (found[-1][0], entries[same - 1][1]) if same else (0, 0)
            for label, base in entries[same:]:
                carry = self._moved_carry(carry, base - before)
                look = partial(self._slots_by_texts, label, carry, labels, view, base)
                messages = [base + owner if owner != TOOLS else TOOLS for owner in self._owners(labels, label)]
                slots, carry = lookup.remembered_of_messages(("slots", label, carry), messages, look)
                before = base
                found.append((carry, slots))
            row = [(slots, base) for (_, slots), (_, base) in zip(found, entries, strict=True) if slots >= 0]
            last = self.last_slots(carry)
            if last >= 0:
                row.append((last, before))
            rows.append(row)
            earlier = [*earlier[:1], (entries, found)]
        return rows

    @staticmethod
    def _owners(labels: LabelTable, label: int) -> list[int]:
        """Return the messages that a label has texts of, counted from its own; and `TOOLS`."""
        owners: list[int] = []
        for span in labels.spans[label]:
            if span.expression is None or span.expression[0] == "const":
                continue
            owner = root(span.expression)[0]
            owner = owner if isinstance(owner, int) else TOOLS
            if owner not in owners:
                owners.append(owner)
        return owners

    def _slots_by_texts(
        self, label: int, carry: int, labels: LabelTable, view: RecordView, base: int, notes: Notes
    ) -> tuple[int, int]:
        spans = labels.spans[label]
        texts = [span.text for span in labels.spans_at(label, base, view)]
        own_notes = Notes()
        found = self._slots(
            [span._replace(text=text) for span, text in zip(spans, texts, strict=True)], carry, own_notes
        )
        notes.add({shifted_question(question, base): reply for question, reply in own_notes.replies.items()})
        return found

    def _as_one(self, entries: Sequence[Entry], labels: LabelTable, view: RecordView) -> Entry:
        """Return a whole document as one fragment."""
        spans = [span for label, base in entries for span in labels.spans_at(label, base, view)]
        spans = [span._replace(message=NOBODY) if span.message < 0 else span for span in spans]
        items, _ = items_of(spans, self._rules, Notes(), self._rules.first, ends=True)
        return self.table.add(items), 0
