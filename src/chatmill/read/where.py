"""Which records of a source are used: small expressions over their fields, which are parsed here and never run as code.

`reward >= 0.5 and not (info.error != null)`: comparisons, `and`, `or`, `not`, names of fields (with dots into objects),
numbers, texts, `true`, `false` and `null`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from chatmill.errors import ConfigError

WHERE = "where"
"""The reason of records in the ledger for which the expression of their source is not true."""
LONGEST = 1000
"""Characters of an expression: so many cannot nest too deeply."""
Value = Callable[[Mapping[str, Any]], Any]
CONSTANTS: Mapping[str, Any] = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
ORDERED: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class Where(NamedTuple):
    """An expression: what it gives for a record, and the fields of records that it reads."""

    value: Value
    fields: frozenset[str]

    def accepts(self, record: object) -> bool:
        """Whether it is true for a record; nothing but `true` is."""
        return isinstance(record, Mapping) and self.value(record) is True


@lru_cache(maxsize=64)
def parse_where(text: str) -> Where:
    """Read an expression, or a `ConfigError` that says what is wrong."""
    if len(text) > LONGEST:
        raise _wrong(text[:LONGEST], f"it has more than {LONGEST} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _wrong(text, "it is not an expression") from None
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - set(CONSTANTS)
    return Where(_compiled(tree, text), frozenset(names))


def _wrong(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"{text!r} cannot be read: {why}. It may hold names of fields, numbers, texts in quotes, true, false, null, "
        "==, !=, <, <=, >, >=, and, or, not, and parentheses: reward >= 0.5 and resolved == true"
    )


def _compiled(node: ast.expr, text: str) -> Value:
    match node:
        case ast.Constant(value=value) if value is None or type(value) in (bool, int, float, str):
            return lambda record: value
        case ast.Name(id=name) if name in CONSTANTS:
            return lambda record: CONSTANTS[name]
        case ast.Name(id=name):
            return lambda record: record.get(name)
        case ast.Attribute(value=inner, attr=name):
            inside = _compiled(inner, text)
            return lambda record: _inside(inside(record), name)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)) if type(value) in (int, float):
            number: Any = value
            return lambda record: -number
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            negated = _compiled(operand, text)
            return lambda record: negated(record) is not True
        case ast.BoolOp(op=op, values=values):
            parts, is_all = [_compiled(part, text) for part in values], isinstance(op, ast.And)
            return lambda record: (all if is_all else any)(part(record) is True for part in parts)
        case ast.Compare(left=left, ops=ops, comparators=rest):
            sides = [_compiled(side, text) for side in (left, *rest)]
            checks = [_comparison(op, text) for op in ops]
            return lambda record: all(
                check(before(record), after(record))
                for check, before, after in zip(checks, sides[:-1], sides[1:], strict=True)
            )
    raise _wrong(text, f"it holds {ast.unparse(node)[:40]!r}")


def _inside(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None


def _comparison(op: ast.cmpop, text: str) -> Callable[[Any, Any], bool]:
    if isinstance(op, ast.Eq):
        return _equal
    if isinstance(op, ast.NotEq):
        return lambda left, other: not _equal(left, other)
    check = ORDERED.get(type(op))
    if check is None:
        raise _wrong(text, f"it compares with {type(op).__name__.lower()}")
    return lambda left, other: _kind(left) == _kind(other) in ("number", "text") and check(left, other)


def _kind(value: object) -> str:
    """What can be compared with each other: true is no number, as in JSON."""
    if isinstance(value, bool):
        return "boolean"
    return "number" if isinstance(value, int | float) else "text" if isinstance(value, str) else type(value).__name__


def _equal(left: Any, other: Any) -> bool:
    return _kind(left) == _kind(other) and bool(left == other)
