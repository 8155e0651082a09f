"""What rules find in outputs of one conversation, remembered for the next.

A look depends on outputs and on replies of messages: it is kept in a trie of the questions, as turns are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chatmill.render.jinja.expressions import Notes
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.renderer import TemplateRunner
from chatmill.render.jinja.rendering import begins_with, note_emptiness
from chatmill.render.jinja.segments import relative_key
from chatmill.render.jinja.shown import not_shown
from chatmill.render.jinja.tries import Look, Node, Output, UnnotedError
from chatmill.render.jinja.turn import Replies, Turn


class Looks:
    """What is known of one conversation's template, as this conversation asks for it."""

    def __init__(self, renderer: TemplateRunner, view: RecordView) -> None:
        """Have the classes of the conversation's messages be numbered."""
        self._renderer, self._view, self._segments = renderer, view, renderer.segments
        self._replies = Replies(view, len(view.roles), renderer.tries.shapes)
        classes = renderer.classes(view)
        self.version = -1 if classes is None else classes.version
        """Of the classes; -1 if they are not known, or not any more."""

    def remembered(self, key: Any, index: int, look: Callable[[Notes], Any]) -> Any:
        """Return what was found for the same outputs and replies; else look, and remember it."""
        tries = self._renderer.tries
        table = tries.table("looks")
        turn = Turn(self._replies, index, None, True)
        node: Any = table.get(key)
        while node.__class__ is Node:
            node = node.children.get(node.ask(turn))
        if node is None:
            notes = Notes()
            result = look(notes)
            if getattr(result, "is_quoting", False):
                self._view.is_keyed = False
                return result
            self._replies.turn = turn
            for question, reply in notes.replies.items():
                self._replies.note(question, reply)
            del self._replies.turn
            try:
                node = tries.learn(table, key, turn.trace, Look(result))
            except UnnotedError:  # right for this record, and for no other
                self._renderer.unnoted += 1
                self._view.is_keyed = False
                return result
            current = self._renderer.classes(self._view)
            if current is None or current.version != self.version:  # the question was new, and makes other classes
                self.version = -1
        if not node.is_keyed:
            self._view.is_keyed = False
        return node.found

    def hidden_in(self, outputs: list[Output], index: int) -> str:
        """Return the first field that outputs leave out of the messages up to one; nothing where they show all."""
        shown: list[list[Output]] = [[] for _ in self._view.roles]
        for number, base in outputs:
            for owner in self._segments.facts[number].owners:
                shown[base + owner].append((number, base))
        for message in range(index + 1):
            field = self._hidden_of(message, shown[message])
            if field:
                return f"messages[{message}].{field}"
        return ""

    def _hidden_of(self, message: int, outputs: list[Output]) -> str:
        """Return the field that some outputs leave out of a message; nothing where they show all of it."""

        def look(notes: Notes) -> str:
            pieces = self._segments.window(outputs, 0, self._view).rendering.pieces
            return not_shown([piece for piece in pieces if piece.owner == message], self._view, message, notes)

        relative = relative_key(outputs, message, self._segments.facts)
        field: str = self.remembered(("shown", self._replies.shapes[message], relative), message, look)
        return field

    # ---- for compiled code

    def is_hidden(self, message: int, outputs: list[Output]) -> int:
        """Return whether outputs leave out something of a message; a reply as for `Ask.SHOWN`."""
        return self._verdict(lambda: self._hidden_of(message, outputs) != "")

    def is_parted(self, prompt: list[Output], ended: list[Output]) -> int:
        """Return whether outputs of P(i) and A(i) differ, whatever follows: neither text begins with the other."""

        def look(notes: Notes) -> bool:
            one, other = (self._segments.window(outputs, 0, self._view).rendering for outputs in (prompt, ended))
            for rendering in (one, other):
                note_emptiness(rendering, notes)
            return not begins_with(one, other, notes) and not begins_with(other, one, notes)

        base = ended[0][1]
        windows = (relative_key(outputs, base, self._segments.facts) for outputs in (prompt, ended))
        key = ("parted", *windows)
        return self._verdict(lambda: self.remembered(key, base, look))

    def _verdict(self, look: Callable[[], bool]) -> int:
        """Return 1 where something is so, and 2 more where the classes of messages do not decide it."""
        view = self._view
        was_keyed, view.is_keyed = view.is_keyed, True
        verdict = int(look())
        is_decided = view.is_keyed and self.version >= 0
        view.is_keyed = view.is_keyed and was_keyed
        return verdict if is_decided else verdict + 2
