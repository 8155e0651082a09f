"""Which messages of a conversation a list of outputs leaves something out of."""

from __future__ import annotations

from chatmill.render.jinja.expressions import Notes
from chatmill.render.jinja.look_memory import LookMemory
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.segments import Segments, relative_key
from chatmill.render.jinja.shown import not_shown
from chatmill.render.jinja.tries import Output


class HiddenTexts:
    """Looks at lists of outputs of one conversation."""

    def __init__(self, view: RecordView, segments: Segments, memory: LookMemory) -> None:
        """`memory` has what was found before."""
        self._view, self._segments, self._memory = view, segments, memory

    def find(self, outputs: list[Output], index: int) -> str:
        """Return the first field that outputs leave out of the messages up to one; nothing where they show all."""
        shown: list[list[Output]] = [[] for _ in self._view.roles]
        facts = self._segments.facts
        for number, base in outputs:
            for owner in facts[number].owners:
                shown[base + owner].append((number, base))
        for message in range(index + 1):
            field = self.of_message(shown[message], message)
            if field:
                return f"messages[{message}].{field}"
        return ""

    def of_message(self, outputs: list[Output], message: int) -> str:
        """Return the field that some outputs leave out of a message; nothing where they show all of it."""
        view, memory, classes = self._view, self._memory, self._memory.classes
        relative = relative_key(outputs, message, self._segments.facts)
        key = None if classes is None else (relative, classes[message])
        known = None if key is None else memory.kept(key)
        if known is not None:
            return str(known.found)

        def look(notes: Notes) -> str:
            pieces = self._segments.window(outputs, 0, view).rendering.pieces
            return not_shown([piece for piece in pieces if piece.owner == message], view, message, notes)

        was_keyed, view.is_keyed = view.is_keyed, True
        field: str = memory.remembered(("shown", memory.run.shapes[message], relative), message, look)
        if key is not None and view.is_keyed:
            memory.keep(key, field)
        view.is_keyed = view.is_keyed and was_keyed
        return field
