"""All labelled fragments of one template: what every character of a fragment is, by where the fragment stands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from chatmill.render.jinja.expressions import evaluate
from chatmill.render.jinja.labels import NOBODY, Segment, Span, TokenTexts, spans_of
from chatmill.render.jinja.questions import shifted
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.tries import SegmentFacts


class LabelTable:
    """Distinct labelled fragments of a template, numbered in order of first use."""

    def __init__(self, tokens: TokenTexts) -> None:
        """`tokens` are those that labels look for."""
        self._tokens = tokens
        self._numbers: dict[tuple[Any, ...], int] = {}
        self.spans: list[tuple[Span, ...]] = []

    def intern(self, facts: SegmentFacts, key: tuple[Any, ...]) -> int:
        """Return the number of a labelled fragment; `key` is its id and what `Segment` holds besides its parts."""
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.spans)
            self.spans.append(spans_of(Segment(facts.parts, *key[1:]), self._tokens))
        return number

    def spans_at(self, label: int, base: int, view: RecordView) -> Iterator[Span]:
        """Yield the spans of a label for a message, with their texts and messages; -1 for no message."""
        for span in self.spans[label]:
            expression = None if span.expression is None else shifted(span.expression, base)
            text = span.text
            if expression is not None and expression[0] != "const":
                text = evaluate(expression, view.field)
            message = -1 if span.message == NOBODY else span.message + base
            yield Span(text, expression, span.kind, message, span.breaks)
