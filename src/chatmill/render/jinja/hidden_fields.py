"""Finds the fields of messages that a rendering leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from chatmill.render.jinja.answer_branches import ShownMessages, seen_from
from chatmill.render.jinja.answer_cache import AnswerLookup
from chatmill.render.jinja.expressions import Expression, Notes, Path, ask, root
from chatmill.render.jinja.operations import OF_TEXTS
from chatmill.render.jinja.paths import Path as RenderingPath
from chatmill.render.jinja.paths import Paths
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.renderer import TemplateRunner
from chatmill.render.jinja.rendering import Piece
from chatmill.render.jinja.stops import REASONING_MARK
from chatmill.render.jinja.tries import Output

SHOWING_ALL = frozenset(name for name, row in OF_TEXTS.items() if row.shows_all) | {"json_string", "repr"}
"""Operations on a text that show all of it but white space, or show it in another spelling."""


class HiddenFields:
    """What renderings of one conversation leave out of its messages.

    All messages are looked at in F once. A path that leaves F shows most messages as F does: only those are looked at
    again of which F has a text behind the place where the path leaves it, or of which the path has a text of its own.
    """

    def __init__(self, renderer: TemplateRunner, view: RecordView, paths: Paths, lookup: AnswerLookup) -> None:
        """Look at nothing yet."""
        self._renderer = renderer
        self._view = view
        self._paths = paths
        self._lookup = lookup
        self._facts = renderer.segments.facts
        self._count = len(view.roles)
        self._places: list[list[int]] | None = None
        """The places in F that have text of each message."""
        self._behind: list[int] = []
        """The last place in F that has text of a message or of one before it; -1 where none has."""
        self.shown: ShownMessages | None = None
        """What F has of each message, where that is at hand."""
        self._in_whole: dict[int, str] | None = None
        """Fields that F leaves out, by their messages; None as long as nobody has looked."""

    def places(self) -> list[list[int]]:
        """Return the places in F that have text of each message."""
        if self._places is None:
            self._places = self._find_places()
            last = -1
            for places in self._places:
                if places and places[-1] > last:
                    last = places[-1]
                self._behind.append(last)
        return self._places

    def _find_places(self) -> list[list[int]]:
        facts = self._facts
        found: list[list[int]] = [[] for _ in range(self._count)]
        for place, (segment, base) in enumerate(self._paths.whole):
            for owner in facts[segment].owners:
                found[base + owner].append(place)
        return found

    def in_whole(self) -> dict[int, str]:
        """Return the fields that F leaves out, by their messages."""
        if self._in_whole is None:
            self._in_whole = self._find_in_whole()
        return self._in_whole

    def _find_in_whole(self) -> dict[int, str]:
        hidden: dict[int, str] = {}
        for message in range(self._count):
            if self.shown is None:
                field = self._field_of(message, self._outputs_of(message))
            else:
                field = self._lookup.field_left_out(message, self.shown.seen[message], self._look, self._outputs_of)
            if field:
                hidden[message] = field
        return hidden

    def _outputs_of(self, message: int) -> list[Output]:
        """Return the fragments of F that have text of a message."""
        whole = self._paths.whole
        return [whole[place] for place in self.places()[message]]

    def find(self, path: RenderingPath, last: int) -> str:
        """Return the first field that a path leaves out of the messages up to one; nothing where it shows all."""
        in_whole = self.in_whole()
        shown = self._shown_otherwise(path, last)
        if not shown and not in_whole:
            return ""
        hidden = {message: field for message, field in in_whole.items() if message <= last}
        for message, outputs in shown.items():
            field = self._field_of(message, outputs)
            hidden.pop(message, None)
            if field:
                hidden[message] = field
        if not hidden:
            return ""
        message = min(hidden)
        return f"messages[{message}].{hidden[message]}"

    def _shown_otherwise(self, path: RenderingPath, last: int) -> dict[int, list[Output]]:
        """Return the fragments of all messages up to one that a path may show in another way than F."""
        shared, own = path
        if not own and shared == len(self._paths.whole):
            return {}
        places = self.places()
        whole = self._paths.whole
        shown: dict[int, list[Output]] = {}
        message = last
        while message >= 0 and self._behind[message] >= shared:
            if places[message] and places[message][-1] >= shared:
                shown[message] = [whole[place] for place in places[message] if place < shared]
            message -= 1
        for segment, base in own:
            for owner in self._facts[segment].owners:
                message = base + owner
                if message > last:
                    continue
                if message not in shown:
                    shown[message] = [whole[place] for place in places[message]]
                shown[message].append((segment, base))
        return shown

    def _field_of(self, message: int, outputs: list[Output]) -> str:
        """Return the field that fragments leave out of a message; nothing where they show all of it.

        What other messages have in these fragments does not matter.
        """
        return self._lookup.field_left_out(message, seen_from(message, outputs), self._look, lambda _: outputs)

    def _look(self, message: int, outputs_of: Callable[[int], list[Output]], notes: Notes) -> str:
        pieces = self._renderer.segments.window(outputs_of(message), 0, self._view).rendering.pieces
        return not_shown([piece for piece in pieces if piece.owner == message], self._view, message, notes)


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
        elif name not in SHOWING_ALL:
            return False
        expression = inner
    return True


def _has_all_between(expressions: Sequence[Expression], view: RecordView, notes: Notes) -> bool:
    """Return whether expressions show all that is left of a text in which a template replaces something."""
    left = list(expressions)
    seen: dict[tuple[Expression, str, int], set[int]] = {}
    while left:
        expression = left.pop()
        while expression[0] == "apply" and expression[1] in SHOWING_ALL:
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
