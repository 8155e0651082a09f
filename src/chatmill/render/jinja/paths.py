"""Which message an expression or a question is about, and the same one about another message."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from chatmill.render.jinja.expressions import Expression, Path, Question, root

TOOLS = -1
"""The owner of tool definitions, which belong to no message."""
UNREACHABLE: Expression = ("unreachable",)
_EXPRESSIONS = frozenset({"field", "const", "apply", "json", "text"})


@lru_cache(maxsize=1 << 16)
def owner_of(expression: Expression) -> int:
    """The message that a text is from, or `TOOLS`."""
    path = root(expression)
    if path is None:  # lost: whatever it is, it is from the first of its fields
        inner = expression
        while inner[0] == "apply":
            inner = inner[3]
        path = inner[1][0]
    return TOOLS if path[0] == "tools" else int(path[0])


def relative(expression: Expression, index: int) -> Expression:
    """An expression with a path relative to a message; `UNREACHABLE` where it is of a message that is not near."""
    path = root(expression)
    if path is None or path[0] == "tools":
        return UNREACHABLE if path is None else expression
    if not -2 <= path[0] - index <= 1:
        return UNREACHABLE
    return moved(expression, -index)


@lru_cache(maxsize=1 << 16)
def moved(expression: Expression, by: int) -> Expression:
    """An expression of the message that many places further on."""
    if expression[0] == "apply":
        return (*expression[:3], moved(expression[3], by))
    path = expression[-1]
    return expression if path[0] == "tools" else (*expression[:-1], (path[0] + by, *path[1:]))


@lru_cache(maxsize=1 << 16)
def moved_question(question: Question, by: int) -> Question:
    """A question about the message that many places further on."""
    return (question[0], *(_moved_part(part, by) for part in question[1:]))


def _moved_part(part: Any, by: int) -> Any:
    if not isinstance(part, tuple) or not part:
        return part
    if part[0] in _EXPRESSIONS:
        return moved(part, by)
    return (part[0] + by, *part[1:]) if _is_path(part) else part


def _is_path(part: tuple[Any, ...]) -> bool:
    return isinstance(part[0], int) and len(part) > 1 and isinstance(part[1], str)


def subjects_of(question: Question) -> Iterator[int]:
    """The messages that a question is about, or `TOOLS`."""
    for part in question[1:]:
        if isinstance(part, tuple) and part:
            path: Path | None = root(part) if part[0] in _EXPRESSIONS else part
            if path and path[0] == "tools":
                yield TOOLS
            elif path and _is_path(path):
                yield path[0]
