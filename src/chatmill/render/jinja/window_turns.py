"""The rules of `turns` on windows of renderings: a few outputs around the place where P(i) and A(i) part."""

from __future__ import annotations

from collections.abc import Iterator

from chatmill.render.jinja.expressions import Notes
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.renderer import Refusal, Renderer
from chatmill.render.jinja.rendering import Rendering
from chatmill.render.jinja.stops import StopTokens
from chatmill.render.jinja.turns import Turns


class NeedsNext(Exception):  # noqa: N818
    """The rules ask what the template writes before a next message."""


class NeedsPrompt(Exception):  # noqa: N818
    """The rules ask for the generation prompt."""


class WindowTurns(Turns):
    """The rules, on windows of renderings."""

    def __init__(self, renderer: Renderer, view: RecordView, stops: StopTokens, notes: Notes) -> None:
        """Nothing is shown yet; what is asked of texts goes to `notes`."""
        super().__init__(renderer, view, stops, None)
        self.notes = notes

    def show(
        self,
        index: int,
        prompt: Rendering,
        ended: Rendering,
        with_next: list[Rendering | None] | None,
        opening: str | None,
    ) -> None:
        """Have the renderings of one message be these windows."""
        self._prompts[index], self._ends[index], self._nexts, self._opening = prompt, ended, with_next, opening

    def generation_prompt(self, index: int) -> str:
        """Return what was asked for."""
        if self._opening is None:
            raise NeedsPrompt
        return self._opening

    def _with_own_turn(self, index: int) -> None:
        return None

    def _hidden(self, ended: Rendering, index: int) -> None:
        return None

    def _with_next(self, index: int) -> Iterator[Rendering | Refusal]:
        if self._nexts is None:
            raise NeedsNext
        return (one for one in self._nexts if one is not None)
