"""The text of renderings, from turns of the template's loops that are remembered: exact, and far quicker than Jinja.

What is new is run, remembered, and compared with plain Jinja; so is one in `COMPARED` renderings that have nothing new.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from zlib import crc32

import jinja2

from chatmill.render.jinja.expressions import evaluate
from chatmill.render.jinja.hooked_sandbox import HookedSandbox
from chatmill.render.jinja.kept_values import shifted
from chatmill.render.jinja.positions import Unfollowed
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.tries import Output, Tries, UnnotedError
from chatmill.render.jinja.turn_run import Refused, TurnRun

MAX_WAYS = 400_000
"""Questions and turns that are kept; beyond, everything is learned again."""
TRIED = 16
"""Renderings that cannot be followed turn by turn, after which a template that has few others is not tried again."""
COMPARED = 64

Code = Callable[[TurnRun], str]
"""Runs the template on the messages of a run."""


class RememberedTexts:
    """The texts of one template under fixed options."""

    def __init__(self, sandbox: HookedSandbox) -> None:
        """`sandbox` runs the template."""
        self._sandbox = sandbox
        self._tries = Tries()
        self.runs = self.unfollowed = 0
        """Renderings for which the template ran, and those that its turns do not make up."""

    @property
    def is_followed(self) -> bool:
        """Whether the loops of the template are followed turn by turn."""
        return self.unfollowed < TRIED or self.unfollowed * 4 < self.runs

    def text(
        self, view: RecordView, count: int, prompt: bool, code: Code, plain: Callable[[], str | None]
    ) -> str | None:
        """Return the text of the first messages; None where the template refuses them."""
        if not self.is_followed:
            return plain()
        if self._tries.size > MAX_WAYS:
            self._tries = Tries()
            view.turns.clear()  # they are of tries that are gone
        key = (prompt, bool(view.conversation.tools))
        run = TurnRun(view, count, self._tries, self._sandbox.undefined)
        try:
            outputs = run.replayed(key)
        except Refused:
            return plain()
        if outputs is None:
            return self._learned(view, count, key, code, plain)
        text = self._written(outputs, run)
        is_compared = crc32(f"{count} {prompt} {view.conversation.id} {run.shapes}".encode()) % COMPARED == 0
        if is_compared and (wanted := plain()) != text:
            self._give_up()
            return wanted
        return text

    def _learned(
        self, view: RecordView, count: int, key: Any, code: Code, plain: Callable[[], str | None]
    ) -> str | None:
        """Run the template, with the turns that are known left out; the text is that of plain Jinja."""
        self.runs += 1
        run = self._sandbox.run = TurnRun(view, count, self._tries, self._sandbox.undefined)
        wanted = plain()
        try:
            outputs = run.hooked(key, lambda: code(run))
            if self._written(outputs, run) != wanted:
                self._give_up()
        except (Unfollowed, jinja2.TemplateError, Refused) as error:
            if wanted is not None or isinstance(error, Unfollowed):
                self.unfollowed += 1
        except UnnotedError:
            self._give_up()
        return wanted

    def _written(self, outputs: list[Output], run: TurnRun) -> str:
        return "".join(
            literal if literal is not None else evaluate(shifted(expression, base), run.field)  # type: ignore[arg-type]
            for number, base in outputs
            for literal, expression in self._tries.segments[number].parts
        )

    def _give_up(self) -> None:
        """Something was read that was not noted: what was learned is worth nothing."""
        self._tries = Tries()
        self.unfollowed += TRIED + 4 * self.runs
