"""Stretches of documents without their texts, as columns: fixed ids and texts, and which texts of a record follow.

A stretch is what one turn writes, under one labelling. All stretches of a template lie in one table, so that records of
any mixture of shapes are written at once. Writing a batch is a few selections from the table: no loop runs over shapes,
messages or tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import REPEATED
from chatmill.core.native.document_layout import ItemTable, Origin
from chatmill.render.document_items import Ids, TextPart
from chatmill.render.jinja.expressions import Expression
from chatmill.render.text_columns import Operations, column_of

_COLUMNS: tuple[tuple[str, Any], ...] = (
    *(("is_ids", np.bool_), ("starts", np.int64), ("sizes", np.int64), ("kinds", np.uint8), ("owners", np.int32)),
    *(("origins", np.uint8), ("messages", np.int32), ("calls", np.int32), ("operations", np.int32)),
    *(("expressions", np.int32), ("opens", np.bool_), ("forms", np.int32)),
)
"""The columns of an item, and their types."""
_Line = tuple[Any, ...]
"""An item as a line of the table: a value for each column."""
_FIXED, _COMPUTED = int(Origin.FIXED), int(Origin.COMPUTED)  # NumPy takes plain numbers far quicker


class StretchTable:
    """Collects stretches; `table` gives all of them as columns."""

    def __init__(self, *, arguments_are_text: bool) -> None:
        """An empty table."""
        self._arguments_are_text = arguments_are_text
        self._new: list[_Line] = []
        self._firsts: list[int] = [0]
        self._ids: list[int] = []
        self._text = bytearray()
        self._known_ids: dict[tuple[int, ...], int] = {}
        self._known_texts: dict[str, int] = {}
        self.operations: list[Operations] = [()]
        self._operation_numbers: dict[Operations, int] = {(): 0}
        self.expressions: list[Expression] = []
        self._expression_numbers: dict[Expression, int] = {}
        self._columns: dict[str, NDArray[Any]] = {}
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
            return (True, start, len(item.ids), item.kind, item.message, 0, 0, 0, 0, 0, False)
        if item.expression is None or item.expression[0] == "const":
            start, size = self._fixed(item.text)
            return (False, start, size, item.kind, item.message, _FIXED, 0, 0, 0, 0, item.opens)
        place = column_of(item.expression, self._arguments_are_text)
        if place is None:
            number = self._number(self._expression_numbers, self.expressions, item.expression)
            return (False, 0, 0, item.kind, item.message, _COMPUTED, 0, 0, 0, number, item.opens)
        applied = self._number(self._operation_numbers, self.operations, place.operations)
        source = (int(place.origin), place.message, place.call, applied)
        return (False, 0, 0, item.kind, item.message, *source, 0, item.opens)

    def _fixed(self, text: str) -> tuple[int, int]:
        start, raw = self._known_texts.get(text), text.encode()
        if start is None:
            start = self._known_texts[text] = len(self._text)
            self._text += raw
        return start, len(raw)

    @staticmethod
    def _number(numbers: dict[Any, int], listed: list[Any], value: Any) -> int:
        number = numbers.get(value)
        if number is None:
            number = numbers[value] = len(listed)
            listed.append(value)
        return number

    @property
    def size(self) -> int:
        """Items of all stretches; ids are counted too if there are many to an item."""
        return max(self._firsts[-1], len(self._ids) // 4)

    @property
    def table(self) -> ItemTable:
        """All stretches as columns."""
        if self._table is None or len(self._table.firsts) < len(self._firsts):  # a stretch may have no items
            self._columns = self._columns_with_new()
            self._new = []
            self._table = ItemTable(
                firsts=np.array(self._firsts, dtype=np.int64),
                ids=np.array(self._ids, dtype=np.int32),
                text=np.frombuffer(bytes(self._text), dtype=np.uint8),
                **self._columns,
            )
        return self._table

    def _columns_with_new(self) -> dict[str, NDArray[Any]]:
        columns = zip(*self._new, strict=True) if self._new else [()] * len(_COLUMNS)
        new = {name: np.array(column, dtype=type_) for (name, type_), column in zip(_COLUMNS, columns, strict=True)}
        return {name: np.concatenate([self._columns[name], new[name]]) for name in new} if self._columns else new
