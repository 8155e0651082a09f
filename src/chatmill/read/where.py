"""Which records of a source are used: small expressions over their fields, which are parsed here and never run as code.

`reward >= 0.5 and not (info.error != null)`: comparisons, `and`, `or`, `not`, names of fields (with dots into objects),
numbers, texts, `true`, `false` and `null`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from chatmill.errors import ConfigError

WHERE = "where"
"""The reason of records in the ledger for which the expression of their source is not true."""
LONGEST = 1000
"""Characters of an expression: so many cannot nest too deeply."""
CONSTANTS: Mapping[str, Any] = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
ORDERED: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class Where(NamedTuple):
    """An expression, and the fields of records that it reads."""

    tree: ast.expr
    fields: frozenset[str]

    def value(self, record: Mapping[str, Any]) -> Any:
        """Return what the expression gives for a record."""
        return _value(self.tree, record)

    def accepts(self, record: object) -> bool:
        """Return whether it is true for a record; nothing but `true` is."""
        return isinstance(record, Mapping) and self.value(record) is True


@lru_cache(maxsize=64)
def parse_where(text: str) -> Where:
    """Read an expression, or a `ConfigError` that says what is wrong."""
    why = f"it has more than {LONGEST} characters" if len(text) > LONGEST else ""
    try:
        tree = ast.parse(text[:LONGEST].strip(), mode="eval").body
        _value(tree, {})  # looks at every part of it
    except _UnknownPartError as error:
        why = why or str(error)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        why = why or "it is not an expression"
    if why:
        raise ConfigError(
            f"{text[:LONGEST]!r} cannot be read: {why}. It may hold names of fields, numbers, texts in quotes, true, "
            "false, null, ==, !=, <, <=, >, >=, and, or, not, and parentheses: reward >= 0.5 and resolved == true"
        )
    return Where(tree, frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)) - set(CONSTANTS))


class _UnknownPartError(Exception):
    """An expression holds something else than it may."""


def _value(node: ast.expr, record: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value) if value is None or type(value) in (bool, int, float, str):
            return value
        case ast.Name(id=name):
            return CONSTANTS[name] if name in CONSTANTS else record.get(name)
        case ast.Attribute(value=inner, attr=name):
            holder = _value(inner, record)
            return holder.get(name) if isinstance(holder, Mapping) else None
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=number)) if type(number) in (int, float):
            return -number  # type: ignore[operator]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _value(operand, record) is not True
        case ast.BoolOp(op=op, values=values):
            parts = [_value(part, record) is True for part in values]
            return all(parts) if isinstance(op, ast.And) else any(parts)
        case ast.Compare(left=left, ops=ops, comparators=rest):
            sides = pairwise(_value(side, record) for side in (left, *rest))
            compared = [_compared(op, *pair) for op, pair in zip(ops, sides, strict=True)]
            return all(compared)
    raise _UnknownPartError(f"it holds {ast.unparse(node)[:40]!r}")


def _compared(op: ast.cmpop, left: Any, other: Any) -> bool:
    is_equal = _kind(left) == _kind(other) and bool(left == other)
    if isinstance(op, ast.Eq | ast.NotEq):
        return is_equal is isinstance(op, ast.Eq)
    if type(op) not in ORDERED:
        raise _UnknownPartError(f"it compares with {type(op).__name__.lower()}")
    return _kind(left) == _kind(other) in ("number", "text") and ORDERED[type(op)](left, other)


def _kind(value: object) -> str:
    """Return what can be compared with each other: true is no number, as in JSON."""
    if isinstance(value, bool):
        return "boolean"
    return "number" if isinstance(value, int | float) else "text" if isinstance(value, str) else type(value).__name__
