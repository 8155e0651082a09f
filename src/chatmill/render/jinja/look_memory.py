"""What rules have found in outputs of one conversation, remembered for the next.

A look depends on outputs and on replies of messages: it is kept in a trie of the questions, as turns are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chatmill.render.jinja.expressions import Notes
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.renderer import Renderer
from chatmill.render.jinja.tries import Look, Node, UnnotedError
from chatmill.render.jinja.turn import Replies, Turn


class LookMemory:
    """What is known of one conversation's template, as this conversation asks for it."""

    def __init__(self, renderer: Renderer, view: RecordView) -> None:
        """Have the classes of the conversation's messages be numbered."""
        self._renderer, self._view = renderer, view
        self.run = Replies(view, len(view.roles), renderer.tries.shapes)
        classes = renderer.classes(view)
        self.version = -1 if classes is None else classes.version
        """Of the classes; -1 if they are not known, or not any more."""

    def remembered(self, key: Any, index: int, look: Callable[[Notes], Any]) -> Any:
        """Return what was found for the same outputs and replies; else look, and remember it."""
        tries = self._renderer.tries
        table = tries.table("looks")
        turn = Turn(self.run, index, None, True)
        node: Any = table.get(key)
        while node.__class__ is Node:
            node = node.children.get(node.ask(turn))
        if node is None:
            notes = Notes()
            result = look(notes)
            if getattr(result, "is_quoting", False):
                self._view.is_keyed = False
                return result
            self.run.turn = turn
            for question, reply in notes.replies.items():
                self.run.note(question, reply)
            del self.run.turn
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
