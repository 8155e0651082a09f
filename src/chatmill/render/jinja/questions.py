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


def moved(expression: Expression, address: Any) -> Expression:
    """Return an expression over the message at an address."""
    if expression[0] == "apply":
        return (*expression[:3], moved(expression[3], address))
    return (*expression[:-1], (address, *expression[-1][1:]))


def at_own(question: Question, own: int = 0) -> Question:
    """Return a question about one message, asked of the message at `own`."""
    kind, subject, *rest = question
    if kind in OF_MESSAGES:
        return (kind, own)
    return (kind, moved(subject, own) if subject[0] in _EXPRESSIONS else (own, *subject[1:]), *rest)


def holds_hole(expression: Expression) -> bool:
    """Return whether an expression is made of what a loop has written."""
    while expression[0] == "apply":
        expression = expression[3]
    return bool(expression[0] == HOLE)


def shifted_address(address: Any, by: int) -> Any:
    """Return the address of the message that many places further on; addresses from either end stay."""
    return address + by if type(address) is int else address


def shifted_path(path: Path, by: int) -> Path:
    """Return a path of the message that many places further on."""
    return (path[0] + by, *path[1:]) if type(path[0]) is int else path


def shifted(expression: Expression, by: int) -> Expression:
    """Return an expression over the message that many places further on."""
    operation = expression[0]
    if operation == "apply":
        return (*expression[:3], shifted(expression[3], by))
    return expression if operation == HOLE else (*expression[:-1], shifted_path(expression[-1], by))


def shifted_question(question: Question, by: int) -> Question:
    """Return a question about the message that many places further on."""
    kind = question[0]
    if kind in POSITIONAL:
        return question
    stop = 3 if kind in ("same", "equal") else 2
    return (kind, *[_shifted_subject(subject, by) for subject in question[1:stop]], *question[stop:])


def _shifted_subject(subject: Any, by: int) -> Any:
    if type(subject) is int:
        return subject + by
    if subject[0] not in _EXPRESSIONS:
        return shifted_path(subject, by)
    if holds_hole(subject):
        raise Unfollowed("a question about what a loop has written")
    return shifted(subject, by)


def paths_of(question: Question) -> list[Path]:
    """Return the paths that a question about texts or values is about."""
    subjects = question[1 : 3 if question[0] == "same" else 2]
    return [root(subject) if subject[0] in _EXPRESSIONS else subject for subject in subjects]
