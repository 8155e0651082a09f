"""Runs templates whose loops over messages are remembered turn by turn."""

from __future__ import annotations

from datetime import date
from functools import lru_cache
from types import CodeType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import Frame
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import safe_range

from chatmill.render.jinja.loops import hook_loops
from chatmill.render.jinja.positions import Position, Unfollowed
from chatmill.render.jinja.sandbox import OF_MAPPINGS, _refuse_underscore
from chatmill.render.jinja.traced import joined, note_exact, plain_text
from chatmill.render.jinja.traced_values import length_of
from chatmill.render.jinja.tracing_sandbox import TracingSandbox, _TracingGenerator
from chatmill.render.jinja.turn_run import TurnRun
from chatmill.render.jinja.views import LoopView, MessagesView, MessageView, PositionRange, Space


class _HookedGenerator(_TracingGenerator):
    """Writes calls of `run_loop`, and slices that may have borders which are positions."""

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:  # noqa: N802
        if isinstance(node.node, nodes.EnvironmentAttribute) and node.node.name in ("run_loop", "break_loop"):
            self.write(f"environment.{node.node.name}(")
            for argument in node.args:
                self.visit(argument, frame)
                self.write(", ")
            self.write(")")
            return
        super().visit_Call(node, frame, forward_caller)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.sliced(")
        self.visit(node.node, frame)
        for border in (node.arg.start, node.arg.stop, node.arg.step):
            self.write(", ")
            if border is None:
                self.write("None")
            else:
                self.visit(border, frame)
        self.write(")")


class HookedSandbox(TracingSandbox):
    """Renders a template with messages that are views, in a `TurnRun`."""

    code_generator_class = _HookedGenerator
    run: TurnRun

    def __init__(self, today: date | None = None) -> None:
        """`today` as for `PlainSandbox`."""
        super().__init__(today)
        self.filters["length"] = self.filters["count"] = _length
        self.globals |= {"namespace": self._space, "range": _range}

    def template(self, source: str) -> jinja2.Template:
        """A template that runs here."""
        code = _hooked_code(source)
        return self.template_class.from_code(self, code, self.make_globals(None), None)

    def run_loop(self, site: int, iterable: Any, values: tuple[Any, ...], body: Any) -> str:
        """Run a loop: over messages turn by turn, over anything else as Jinja does."""
        if type(iterable) in (MessagesView, PositionRange):
            return self.run.run_loop(site, iterable, values, body)
        written = []
        turn = self.run.turn
        for item, loop in LoopContext(self.counted(iterable), self.undefined):
            written.append(body(item, loop, *values))
            if turn.breaks:
                turn.breaks = False
                break
        return joined(written)

    def break_loop(self) -> str:
        """End the loop that runs behind this turn."""
        self.run.turn.breaks = True
        return ""

    def sliced(self, obj: Any, start: Any, stop: Any, step: Any) -> Any:
        """The operator `[start:stop:step]`."""
        if type(obj) is MessagesView:
            return obj[slice(*(one if type(one) is Position else self.border(one) for one in (start, stop, step)))]
        return obj[slice(*map(self.border, (start, stop, step)))]

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: D102
        if type(obj) is MessageView and attribute not in OF_MAPPINGS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is Space or type(obj) is LoopView:
            if not attribute.startswith("_"):
                try:
                    return getattr(obj, attribute)
                except AttributeError:
                    pass
            return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:  # noqa: D102
        if type(obj) is MessagesView:
            try:
                return obj[argument]
            except (IndexError, TypeError):
                return self.undefined(obj=obj, name=argument)
        if type(obj) is MessageView:
            note_exact(argument)
            key = plain_text(argument) if isinstance(argument, str) else argument
            return (
                obj[key] if key in obj else self.getattr(obj, key) if key in OF_MAPPINGS else self.undefined(name=key)
            )
        return super().getitem(obj, argument)

    def call(self, context: Context, callable_: Any, *arguments: Any, **named: Any) -> Any:  # noqa: D102
        owner = getattr(callable_, "__self__", None)
        is_range = callable_ is _range and any(type(one) is Position for one in arguments)
        if type(owner) in (MessageView, LoopView) or callable_ == self._space or is_range:
            self._step(10)
            named.pop("_block_vars", None)
            named.pop("_loop_vars", None)
            return callable_(*arguments, **named)
        return super().call(context, callable_, *arguments, **named)

    def _space(self, *arguments: Any, **named: Any) -> Space:
        values = dict(*arguments, **named)
        for name in values:
            _refuse_underscore(name)
        return self.run.make_space(values)

    @staticmethod
    def _tojson(value: Any, *arguments: Any, **named: Any) -> str:
        if type(value) in (MessagesView, MessageView):
            raise Unfollowed("messages are written as JSON")
        return TracingSandbox._tojson(value, *arguments, **named)


def _length(value: Any) -> int:
    return value.length() if type(value) is MessagesView else length_of(value)


def _range(*borders: Any) -> Any:
    if not any(type(one) is Position for one in borders):
        return safe_range(*borders)
    start, stop, step = (0, borders[0], 1) if len(borders) == 1 else (*borders, 1)[:3]
    return PositionRange(start, stop, int(step))


@lru_cache(maxsize=128)
def _hooked_code(source: str) -> CodeType:
    """A template's code, which takes long to write and depends on nothing but its text."""
    environment = HookedSandbox()
    tree = environment.parse(source)
    hook_loops(tree, environment)
    code = environment._generate(tree, None, None)
    return environment._compile(code, "<template>")
