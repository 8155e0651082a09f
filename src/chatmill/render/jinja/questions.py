"""Questions and expressions as a turn has them: messages count from its own."""

from __future__ import annotations

from typing import Any

from chatmill.render.jinja.expressions import Expression, Path, Question, root

HOLE = "hole"
"""The expression of text that a loop inside the turn has written."""
_EXPRESSIONS = frozenset({"field", "const", "apply", "json", "text", HOLE})
OF_MESSAGES = frozenset({"role", "shape"})
"""Questions whose subject is the address of a message."""
POSITIONAL = frozenset({"compare", "remainder", "position", "state", "loop", "!make", "!set"})
"""Questions and events that name no message."""


class Unfollowed(Exception):  # noqa: N818 - no error: the conversation is then written as a whole
    """A turn of a loop reads something that cannot be remembered."""


def shifted_path(path: Path, by: int) -> Path:
    """Return a path of the message that many places further on; addresses from either end stay."""
    return (path[0] + by, *path[1:]) if type(path[0]) is int else path


def shifted(expression: Expression, by: int) -> Expression:
    """Return an expression over the message that many places further on."""
    operation = expression[0]
    if operation == "apply":
        return (*expression[:3], shifted(expression[3], by))
    if operation == HOLE:
        return expression
    return (*expression[:-1], shifted_path(expression[-1], by))


def holds_hole(expression: Expression) -> bool:
    """Whether an expression is made of what a loop has written."""
    while expression[0] == "apply":
        expression = expression[3]
    return bool(expression[0] == HOLE)


def shifted_question(question: Question, by: int) -> Question:
    """Return a question about the message that many places further on."""
    kind = question[0]
    if kind in POSITIONAL:
        return question
    if kind in OF_MESSAGES:
        return (kind, shifted_address(question[1], by), *question[2:])
    if kind == "equal":
        return (kind, shifted_address(question[1], by), shifted_address(question[2], by))
    count = 2 if kind == "same" else 1
    subjects = []
    for subject in question[1 : 1 + count]:
        if subject[0] in _EXPRESSIONS:
            if holds_hole(subject):
                raise Unfollowed("a question about what a loop has written")
            subjects.append(shifted(subject, by))
        else:
            subjects.append(shifted_path(subject, by))
    return (kind, *subjects, *question[1 + count :])


def at_own(question: Question, own: int = 0) -> Question:
    """Return a question about one message, asked of the message at `own`."""
    if question[0] in OF_MESSAGES:
        return (question[0], own, *question[2:])
    subject = question[1]
    moved = _at(subject, own) if subject[0] in _EXPRESSIONS else (own, *subject[1:])
    return (question[0], moved, *question[2:])


def _at(expression: Expression, own: int) -> Expression:
    if expression[0] == "apply":
        return (*expression[:3], _at(expression[3], own))
    return (*expression[:-1], (own, *expression[-1][1:]))


def paths_of(question: Question) -> list[Path]:
    """Return the paths that a question about texts or values is about."""
    paths: list[Path] = []
    for subject in question[1 : 3 if question[0] == "same" else 2]:
        if subject[0] in _EXPRESSIONS:
            paths.append(root(subject))
        else:
            paths.append(subject)
    return paths


def shifted_address(address: Any, by: int) -> Any:
    """Return the address of the message that many places further on."""
    return address + by if type(address) is int else address
