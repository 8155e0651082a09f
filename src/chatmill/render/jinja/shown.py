"""What a rendering leaves out of a message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from chatmill.render.jinja.expressions import Expression, Notes, Path, ask, root
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.rendering import Piece
from chatmill.render.jinja.stops import REASONING_MARK

HARMLESS = frozenset({"strip", "lstrip", "rstrip", "replace", "json_string", "repr", "removeprefix", "removesuffix"})
"""Operations on a text that show all of it but white space, or show it in another spelling."""


def not_shown(pieces: Iterable[Piece], view: RecordView, k: int, notes: Notes) -> str:
    """Return the field of message `k` that pieces of a rendering leave out; nothing where they show all of it."""
    shown: dict[Path, list[Expression]] = {}
    for piece in pieces:
        if piece.expression is not None:
            shown.setdefault(root(piece.expression), []).append(piece.expression)
    message = view.conversation.messages[k]
    if _hidden_text(message.content, (k, "content"), shown, view, notes):
        return "content"
    for j, call in enumerate(message.tool_calls):
        if _hidden_text(call.name, (k, "call", j, "name"), shown, view, notes):
            return f"tool_calls[{j}].name"
        arguments = (k, "call", j, "arguments")
        if any(path[:4] == arguments for path in shown):
            continue
        question = ("has_arguments", arguments)
        if notes.note(question, ask(question, view.field)):
            return f"tool_calls[{j}].arguments"
    return ""


def _hidden_text(text: str, path: Path, shown: Mapping[Path, list[Expression]], view: RecordView, notes: Notes) -> bool:
    """Return whether a text is not shown whole; white space, and reasoning inside a content, may be missing."""
    expressions = shown.get(path, [])
    if any(_is_harmless(expression, view, notes) for expression in expressions):
        return False
    if _has_all_between(expressions, view, notes):
        return False
    stripped: Expression = ("apply", "strip", (None,), ("field", path))
    if not text.strip():
        notes.note(("filled", stripped), False)
        return False
    notes.note(("filled", stripped), True)
    return not any(_drops_reasoning(expression) for expression in expressions)


def _is_harmless(expression: Expression, view: RecordView, notes: Notes) -> bool:
    """Return whether an expression shows all of its text; so does the only part of a text that is split or cut."""
    while expression[0] == "apply":
        _, name, arguments, inner = expression
        if name == "cut":  # of nothing, where the text is short
            same = ("same", expression, inner)
            if notes.note(same, ask(same, view.field)) is not True:
                return False
        elif name == "part":
            question = ("parts", inner, *arguments[:3])
            if notes.note(question, ask(question, view.field)) != 1:
                return False
        elif name not in HARMLESS:
            return False
        expression = inner
    return True


def _has_all_between(expressions: Sequence[Expression], view: RecordView, notes: Notes) -> bool:
    """Return whether expressions show all that is left of a text in which a template replaces something."""
    left = list(expressions)
    seen: dict[tuple[Expression, str, int], set[int]] = {}
    while left:
        expression = left.pop()
        while expression[0] == "apply" and expression[1] in HARMLESS:
            expression = expression[3]
        if expression[0] != "apply":
            return True
        if expression[1] != "between":
            continue
        _, _, (old, count, index), inner = expression
        indices = seen.setdefault((inner, old, count), set())
        if index not in indices:
            indices.add(index)
            if _are_all(indices, inner, (old, count), view, notes):
                left.append(inner)
    return False


def _are_all(indices: set[int], inner: Expression, how: tuple[str, int], view: RecordView, notes: Notes) -> bool:
    """Return whether the other texts between what is replaced are empty, or nothing but white space."""
    question = ("parts", inner, "split", how, ())
    texts = range(notes.note(question, ask(question, view.field)))
    for index in texts:
        if index not in indices:
            filled = ("filled", ("apply", "strip", (None,), ("apply", "between", (*how, index), inner)))
            if notes.note(filled, ask(filled, view.field)):
                return False
    return True


def _drops_reasoning(expression: Expression) -> bool:
    """Return whether a text is what is left of a content behind the mark that ends its reasoning."""
    while expression[0] == "apply":
        if expression[1] == "part" and REASONING_MARK.search(str(expression[2][1])):
            return True
        expression = expression[3]
    return False
