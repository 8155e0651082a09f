"""Which messages of a conversation a list of outputs leaves something out of."""

from __future__ import annotations

from typing import Any

from chatmill.render.jinja.expressions import Notes
from chatmill.render.jinja.look_memory import LookMemory
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.segments import Segments, common, relative_key
from chatmill.render.jinja.shown import not_shown
from chatmill.render.jinja.tries import Output


class HiddenTexts:
    """Looks at one list of outputs after the other: only what differs from the one before is looked at again."""

    def __init__(self, view: RecordView, segments: Segments, memory: LookMemory) -> None:
        """Nothing was looked at."""
        self._view, self._segments, self._memory = view, segments, memory
        self._outputs: list[Output] = []
        self._index = -1
        """The last message that was looked at."""
        self._of_message: list[list[Output]] = [[] for _ in view.roles]
        """For each message the outputs that have texts of it."""
        self._hidden: dict[int, tuple[str, str]] = {}
        """The messages of which something is left out."""

    def find(self, outputs: list[Output], index: int) -> tuple[str, str] | None:
        """Return what outputs leave out of the messages up to one, as a reason and a detail."""
        for message in self._changed(outputs, index):
            found = self.of_message(self._of_message[message], message)
            if found is not None:
                self._hidden[message] = found
            else:
                self._hidden.pop(message, None)
        if self._hidden and min(self._hidden) <= index:
            return self._hidden[min(self._hidden)]
        return None

    def _changed(self, outputs: list[Output], index: int) -> set[int]:
        """Go over to other outputs, and return the messages that these show in another way."""
        facts, same = self._segments.facts, common(self._outputs, outputs)
        changed = set(range(self._index + 1, index + 1))
        for number, base in reversed(self._outputs[same:]):
            for owner in facts[number].owners:
                self._of_message[base + owner].pop()
                changed.add(base + owner)
        for output in outputs[same:]:
            number, base = output
            for owner in facts[number].owners:
                self._of_message[base + owner].append(output)
                changed.add(base + owner)
        self._outputs, self._index = outputs, index
        return changed

    def of_message(self, outputs: list[Output], message: int) -> tuple[str, str] | None:
        """Return what some outputs leave out of a message."""
        view, memory, classes = self._view, self._memory, self._memory.classes
        relative: Any = relative_key(outputs, message, self._segments)
        known = None if classes is None else (relative, classes[message])
        found = None if known is None else memory.kept(known)
        if found is not None:
            return _at(found.found, message)

        def look(notes: Notes) -> tuple[str, str] | tuple[()]:
            rendering = self._segments.window(outputs, 0, view).rendering
            own = tuple(piece for piece in rendering.pieces if piece.owner == message)
            found = not_shown(rendering._replace(pieces=own), view, [message], notes, tools=False)
            return (found and (found[0], found[1].replace(f"messages[{message}]", "messages[{}]"))) or ()

        was_keyed, view.is_keyed = view.is_keyed, True
        result = memory.remembered(("shown", memory.run.shapes[message], relative), message, look)
        if known is not None and view.is_keyed:
            memory.keep(known, result)
        view.is_keyed = view.is_keyed and was_keyed
        return _at(result, message)


def _at(found: tuple[str, str] | tuple[()], message: int) -> tuple[str, str] | None:
    return (found[0], found[1].replace("messages[{}]", f"messages[{message}]")) if found else None
