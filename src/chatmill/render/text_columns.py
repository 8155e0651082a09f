"""Where the text of an expression lies in the columns of a batch, and which string operations are applied to it."""

from __future__ import annotations

from typing import Any, NamedTuple

from chatmill.core.native.document_layout import Origin
from chatmill.render.jinja.expressions import Expression

_LISTED = ("json", (("ensure_ascii", False),))
"""How tool definitions are written in their column."""

Operations = tuple[tuple[str, tuple[Any, ...]], ...]
"""String operations in the order they are applied."""


class TextColumn(NamedTuple):
    """Where a text comes from."""

    origin: Origin
    message: int
    call: int
    operations: Operations


def column_of(expression: Expression, arguments_are_text: bool) -> TextColumn | None:
    """Return the column, message, call and operations of an expression; None where it has no column."""
    if expression[:2] == _LISTED and expression[2][0] == "tools" and len(expression[2]) == 2:
        return TextColumn(Origin.TOOL, 0, expression[2][1], ())
    operations: list[tuple[str, tuple[Any, ...]]] = []
    while expression[0] == "apply":
        operations.append((expression[1], expression[2]))
        expression = expression[3]
    if expression[0] != "field" or expression[1][0] == "tools":
        return None
    path = expression[1]
    applied = tuple(reversed(operations))
    if path[1] in ("extra", "parts"):
        return None
    if path[1] != "call":
        return TextColumn(Origin[path[1].upper()], path[0], 0, applied)
    if path[3] == "arguments" and not arguments_are_text:
        return None
    return TextColumn(Origin[f"CALL_{path[3].upper()}"], path[0], path[2], applied)
