"""Stretches of documents without their texts, as a table: fixed ids and texts, and which texts of a record follow.

A stretch is what one turn writes, under one labelling. All stretches of a template lie in one table, so that records of
any mixture of shapes are written at once. Writing a batch is a few selections from the table: no loop runs over shapes,
messages or tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

import numpy as np

from chatmill.core.kinds import REPEATED
from chatmill.core.native.document_layout import ITEM, ItemTable, Origin
from chatmill.render.document_items import Ids, TextPart
from chatmill.render.jinja.expressions import Expression
from chatmill.render.text_columns import Operations, column_of

T = TypeVar("T", bound=Hashable)
_Line = tuple[Any, ...]
"""An item as a line of the table, without its form."""
_FIXED, _COMPUTED = int(Origin.FIXED), int(Origin.COMPUTED)  # NumPy takes plain numbers far quicker


class Numbered(list[T]):
    """Different values, each with its place in the list for a number."""

    def __init__(self, *values: T) -> None:
        """Those that have numbers from the beginning."""
        super().__init__(values)
        self._numbers = {value: number for number, value in enumerate(values)}

    def number(self, value: T) -> int:
        """Return the number of a value; a new one gets the next."""
        number = self._numbers.setdefault(value, len(self))
        if number == len(self):
            self.append(value)
        return number


class StretchTable:
    """Collects stretches; `table` gives all of them."""

    def __init__(self, *, arguments_are_text: bool) -> None:
        """Begin with an empty table."""
        self._arguments_are_text = arguments_are_text
        self._new: list[_Line] = []
        self._firsts: list[int] = [0]
        self._ids: list[int] = []
        self._text = bytearray()
        self._known_ids: dict[tuple[int, ...], int] = {}
        self._known_texts: dict[str, int] = {}
        self.operations: Numbered[Operations] = Numbered(())
        self.expressions: Numbered[Expression] = Numbered()
        self._table: ItemTable | None = None
        self._forms: dict[_Line, int] = {}

    def add(self, items: Sequence[Ids | TextPart]) -> int:
        """Keep a stretch; its number."""
        for item in items:
            line = self._line(item)
            form = self._forms.setdefault(self._line(item._replace(kind=item.kind & ~REPEATED)), len(self._forms))
            self._new.append((*line, form))
        self._firsts.append(self._firsts[-1] + len(items))
        return len(self._firsts) - 2

    def _line(self, item: Ids | TextPart) -> _Line:
        if isinstance(item, Ids):
            start = self._known_ids.get(item.ids)
            if start is None:
                start = self._known_ids[item.ids] = len(self._ids)
                self._ids += item.ids
            return (start, len(item.ids), item.message, 0, 0, 0, 0, item.kind, _FIXED, True, False)
        if item.expression is None or item.expression[0] == "const":
            start, size = self._fixed(item.text)
            return (start, size, item.message, 0, 0, 0, 0, item.kind, _FIXED, False, item.opens)
        place = column_of(item.expression, self._arguments_are_text)
        if place is None:
            number = self.expressions.number(item.expression)
            return (0, 0, item.message, 0, 0, 0, number, item.kind, _COMPUTED, False, item.opens)
        applied = self.operations.number(place.operations)
        source = (place.message, place.call, applied, 0)
        return (0, 0, item.message, *source, item.kind, int(place.origin), False, item.opens)

    def _fixed(self, text: str) -> tuple[int, int]:
        start, raw = self._known_texts.get(text), text.encode()
        if start is None:
            start = self._known_texts[text] = len(self._text)
            self._text += raw
        return start, len(raw)

    @property
    def size(self) -> int:
        """Items of all stretches; ids are counted too if there are many to an item."""
        return max(self._firsts[-1], len(self._ids) // 4)

    @property
    def table(self) -> ItemTable:
        """All stretches."""
        table = self._table
        if table is None or len(table.firsts) < len(self._firsts):  # a stretch may have no items
            new = np.array(self._new, dtype=ITEM)
            self._new = []
            table = self._table = ItemTable(
                firsts=np.array(self._firsts, dtype=np.int64),
                items=new if table is None else np.concatenate([table.items, new]),
                ids=np.array(self._ids, dtype=np.int32),
                text=np.frombuffer(bytes(self._text), dtype=np.uint8),
            )
        return table
