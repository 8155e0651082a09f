"""Plans: rows without their texts, kept flat, so that records of any mixture of shapes are written all at once.

A plan says of one row which fixed ids and which texts of a record follow each other. All plans of a template lie in
one table. Writing a batch is then a few selections from that table: no loop runs over shapes, messages or tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.row_layout import ItemTable, Origin
from chatmill.render.fragments import Fragment
from chatmill.render.jinja.expressions import Expression, Question
from chatmill.render.jinja.rows import Counts
from chatmill.render.row_items import Ids, TextPart

Ints = NDArray[np.int64]


_MESSAGE_FIELDS = {
    "content": Origin.CONTENT,
    "reasoning": Origin.REASONING,
    "name": Origin.NAME,
    "tool_call_id": Origin.TOOL_CALL_ID,
}
_CALL_FIELDS = {"name": Origin.CALL_NAME, "arguments": Origin.CALL_ARGUMENTS, "id": Origin.CALL_ID}

Operations = tuple[tuple[str, tuple[Any, ...]], ...]
"""String operations in the order they are applied."""


class Place(NamedTuple):
    """Where a text comes from."""

    origin: Origin
    message: int
    call: int
    operations: Operations


_LISTED = ("json", (("ensure_ascii", False),))
"""How tool definitions are written in their column."""


def place_of(expression: Expression, arguments_are_text: bool) -> Place | None:
    """The column, message, call and operations of an expression; None where it has no column."""
    if expression[:2] == _LISTED and expression[2][0] == "tools" and len(expression[2]) == 2:
        return Place(Origin.TOOL, 0, expression[2][1], ())
    operations: list[tuple[str, tuple[Any, ...]]] = []
    while expression[0] == "apply":
        operations.append((expression[1], expression[2]))
        expression = expression[3]
    if expression[0] != "field" or expression[1][0] == "tools":
        return None
    path = expression[1]
    applied = tuple(reversed(operations))
    if path[1] != "call":
        return Place(_MESSAGE_FIELDS[path[1]], path[0], 0, applied)
    if path[3] == "arguments" and not arguments_are_text:
        return None
    return Place(_CALL_FIELDS[path[3]], path[0], path[2], applied)


_COLUMNS: tuple[tuple[str, Any], ...] = (
    *(("is_ids", np.bool_), ("starts", np.int64), ("sizes", np.int64), ("kinds", np.uint8), ("owners", np.int32)),
    *(("origins", np.uint8), ("messages", np.int32), ("calls", np.int32), ("operations", np.int32)),
    *(("expressions", np.int32), ("opens", np.bool_)),
)
"""The columns of an item, and their types."""


_FIXED, _COMPUTED = int(Origin.FIXED), int(Origin.COMPUTED)  # NumPy takes plain numbers far quicker


class _FragmentLines(NamedTuple):
    """A fragment in the table."""

    items: list[tuple[Any, ...]]
    trimmed: list[TrimmedField]


class PlanTable:
    """Collects plans; `table` gives all of them as columns."""

    def __init__(self, *, arguments_are_text: bool) -> None:
        """An empty table."""
        self._arguments_are_text = arguments_are_text
        self._items: list[tuple[Any, ...]] = []
        self._firsts: list[int] = [0]
        self._ids: list[int] = []
        self._text = bytearray()
        self._known_ids: dict[tuple[int, ...], int] = {}
        self._known_texts: dict[str, int] = {}
        self.operations: list[Operations] = [()]
        self._operation_numbers: dict[Operations, int] = {(): 0}
        self.expressions: list[Expression] = []
        self._expression_numbers: dict[Expression, int] = {}
        self._fragments: dict[Fragment, _FragmentLines] = {}
        self._columns: dict[str, NDArray[Any]] = {}
        self._table: ItemTable | None = None

    def add(self, items: Sequence[Ids | TextPart]) -> int:
        """Keep a row; the number of its plan."""
        self._items += map(self._line, items)
        self._firsts.append(self._firsts[-1] + len(items))
        return len(self._firsts) - 2

    def add_fragments(self, fragments: Sequence[Fragment]) -> int:
        """Keep a row that is put together; the number of its plan."""
        for fragment in fragments:
            self._items += self._lines_of(fragment).items
        self._firsts.append(self._firsts[-1] + sum(len(fragment.items) for fragment in fragments))
        return len(self._firsts) - 2

    def trimmed_in(self, fragments: Sequence[Fragment]) -> list[TrimmedField]:
        """What `trimmed` gives for a row that is put together."""
        return [field for fragment in fragments for field in self._lines_of(fragment).trimmed]

    def _lines_of(self, fragment: Fragment) -> _FragmentLines:
        found = self._fragments.get(fragment)
        if found is None:
            items = [self._line(item) for item in fragment.items]
            found = self._fragments[fragment] = _FragmentLines(items, self.trimmed([fragment.items]))
        return found

    def _line(self, item: Ids | TextPart) -> tuple[Any, ...]:
        return self._ids_item(item) if isinstance(item, Ids) else self._text_item(item)

    def _ids_item(self, item: Ids) -> tuple[Any, ...]:
        start = self._known_ids.get(item.ids)
        if start is None:
            start = self._known_ids[item.ids] = len(self._ids)
            self._ids += item.ids
        return (True, start, len(item.ids), item.kind, item.message, 0, 0, 0, 0, 0, False)

    def _text_item(self, item: TextPart) -> tuple[Any, ...]:
        if item.expression is None or item.expression[0] == "const":
            start, size = self._fixed(item.text)
            return (False, start, size, item.kind, item.message, _FIXED, 0, 0, 0, 0, item.opens)
        place = place_of(item.expression, self._arguments_are_text)
        if place is None:
            number = self._number(self._expression_numbers, self.expressions, item.expression)
            return (False, 0, 0, item.kind, item.message, _COMPUTED, 0, 0, 0, number, item.opens)
        applied = self._number(self._operation_numbers, self.operations, place.operations)
        own = (int(place.origin), place.message, place.call, applied)
        return (False, 0, 0, item.kind, item.message, *own, 0, item.opens)

    def _fixed(self, text: str) -> tuple[int, int]:
        start, raw = self._known_texts.get(text), text.encode()
        if start is None:
            start = self._known_texts[text] = len(self._text)
            self._text += raw
        return start, len(raw)

    def trimmed(self, rows: Iterable[Sequence[Ids | TextPart]]) -> list[TrimmedField]:
        """Contents and reasoning that no row shows whole, with the operations of every showing, by rows."""
        shown: dict[tuple[Origin, int], dict[int, list[Operations]]] = {}
        for number, row in enumerate(rows):
            for item in row:
                if isinstance(item, TextPart) and item.expression is not None:
                    place = place_of(item.expression, self._arguments_are_text)
                    if place is not None and place.origin in (Origin.CONTENT, Origin.REASONING):
                        key = (place.origin, place.message)
                        shown.setdefault(key, {}).setdefault(number, []).append(place.operations)
        found = []
        for (origin, message), by_row in shown.items():
            if all(() not in showings for showings in by_row.values()):
                numbers = {tuple(map(self._operations_number, showings)) for showings in by_row.values()}
                found.append(TrimmedField(origin, message, tuple(sorted(numbers))))
        return found

    def _operations_number(self, operations: Operations) -> int:
        return self._number(self._operation_numbers, self.operations, operations)

    @staticmethod
    def _number(numbers: dict[Any, int], listed: list[Any], value: Any) -> int:
        found = numbers.get(value)
        if found is None:
            found = numbers[value] = len(listed)
            listed.append(value)
        return found

    @property
    def size(self) -> int:
        """Items of all plans; ids are counted too where there are many to an item."""
        return max(self._firsts[-1], len(self._ids) // 4)

    @property
    def table(self) -> ItemTable:
        """All plans as columns."""
        if self._table is None or len(self._table.firsts) < len(self._firsts):  # a row may have no items
            self._columns = self._columns_with_new()
            self._items = []
            self._table = ItemTable(
                firsts=np.array(self._firsts, dtype=np.int64),
                ids=np.array(self._ids, dtype=np.int32),
                text=np.frombuffer(bytes(self._text), dtype=np.uint8),
                **self._columns,
            )
        return self._table

    def _columns_with_new(self) -> dict[str, NDArray[Any]]:
        columns = zip(*self._items, strict=True) if self._items else [()] * len(_COLUMNS)
        new = {name: np.array(column, dtype=type_) for (name, type_), column in zip(_COLUMNS, columns, strict=True)}
        return {name: np.concatenate([self._columns[name], new[name]]) for name in new} if self._columns else new


class HiddenField(NamedTuple):
    """A text of a record that no row of it shows."""

    origin: Origin
    message: int


class TrimmedField(NamedTuple):
    """A text of a record that is shown after string operations alone."""

    origin: Origin
    message: int
    showings: tuple[tuple[int, ...], ...]
    """For each row that shows it otherwise, the numbers of the operations of the parts it shows."""


class RecordPlan(NamedTuple):
    """Everything about the records of one shape that give the same answers to what the template asks."""

    questions: tuple[Question, ...]
    rows: tuple[int, ...]
    """Their plans, a row each."""
    counts: Counts
    hidden: tuple[HiddenField, ...]
    trimmed: tuple[TrimmedField, ...]
    options: tuple[tuple[str, Any], ...]
