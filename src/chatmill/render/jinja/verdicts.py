"""What compiled code asks of outputs of one conversation: whether they show all of a message, or differ for good."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chatmill.render.jinja.expressions import Notes
from chatmill.render.jinja.look_memory import LookMemory
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.renderer import Renderer
from chatmill.render.jinja.rendering import begins_with, note_emptiness
from chatmill.render.jinja.segments import relative_key
from chatmill.render.jinja.shown import HiddenTexts
from chatmill.render.jinja.tries import Output


class RecordVerdicts:
    """Replies as for `Ask.SHOWN`, as one conversation gives them."""

    def __init__(self, renderer: Renderer, view: RecordView) -> None:
        """What is known now of the template is what they are found by."""
        self.memory = LookMemory(renderer, view)
        self.hidden = HiddenTexts(view, renderer.segments, self.memory)
        self._segments, self._view = renderer.segments, view

    def is_hidden(self, message: int, outputs: list[Output]) -> int:
        """Whether outputs leave out something of a message."""
        return self._verdict(lambda: self.hidden.of_message(outputs, message) != "")

    def is_parted(self, prompt: Sequence[Output], ended: Sequence[Output]) -> int:
        """Whether outputs of P(i) and A(i) differ, whatever follows: neither text begins with the other."""

        def look(notes: Notes) -> bool:
            one, other = (self._segments.window(outputs, 0, self._view).rendering for outputs in (prompt, ended))
            for rendering in (one, other):
                note_emptiness(rendering, notes)
            return not begins_with(one, other, notes) and not begins_with(other, one, notes)

        base = ended[0][1]
        windows = (relative_key(outputs, base, self._segments.facts) for outputs in (prompt, ended))
        key = ("parted", *windows)
        return self._verdict(lambda: self.memory.remembered(key, base, look))

    def _verdict(self, look: Callable[[], bool]) -> int:
        """Return 1 where something is so, and 2 more where the classes of messages do not decide it."""
        view = self._view
        was_keyed, view.is_keyed = view.is_keyed, True
        verdict = int(look())
        is_decided = view.is_keyed and self.memory.version >= 0
        view.is_keyed = view.is_keyed and was_keyed
        return verdict if is_decided else verdict + 2
