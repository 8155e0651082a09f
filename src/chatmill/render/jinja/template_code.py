"""Writes the code of templates so that everything they do passes the environment, which counts it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, has_safe_repr
from markupsafe import Markup

from chatmill.render.jinja.limits import ITEM_BYTES, MAX_SOURCE, MAX_TOKENS, TEXT_BYTES, LimitError
from chatmill.render.jinja.operations import OF_OTHERS, OF_TEXTS, SMALL

NODES_A_STEP = 8
"""Pieces of a body that count as one more step of each turn."""
CHANGING = frozenset(
    {"add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "insert", "pop", "popitem"}
    | {"remove", "reverse", "rotate", "setdefault", "sort", "symmetric_difference_update", "update"}
)
"""Methods that Jinja refuses when they are called, as they change what they belong to: in a branch they may stand."""
KINDS = (str, Markup, bytes, int, float, list, tuple, dict, range)
REFUSED = frozenset(
    {name for kind in KINDS for name in dir(kind) if not name.startswith("_")} - OF_TEXTS.keys() - OF_OTHERS.keys()
) - (CHANGING | {"imag", "real", "numerator", "denominator", "start", "stop", "step"})
"""Methods of Python's values that templates do not have."""
LITERALS = {nodes.List: TEXT_BYTES, nodes.Tuple: TEXT_BYTES, nodes.Dict: 4 * TEXT_BYTES, nodes.Pair: 10 * ITEM_BYTES}
MADE_BY = {**LITERALS, nodes.For: 6 * TEXT_BYTES, nodes.Macro: 12 * TEXT_BYTES, nodes.CallBlock: 12 * TEXT_BYTES}
"""Bytes of what a piece of a body makes each time."""


class CountingGenerator(CodeGenerator):
    """Writes loops that count their turns, and operators whose values are weighed first."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802
        """Have all bodies counted that may run more than once."""
        for kind in (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block):
            for one in list(node.find_all(kind)):
                self._count_turns(one)
        node.set_environment(self.environment)
        super().visit_Template(node, frame)

    @staticmethod
    def _count_turns(node: Any) -> None:
        """Have each turn of a body counted, by the size of the body."""
        steps, made = _weight(node.body)
        if isinstance(node, nodes.For):
            test = 0 if node.test is None else 1 + _weight([node.test])[0]
            node.iter = _own_call("counted", [node.iter, nodes.Const(test)], node)
        turn = _own_call("turned", [nodes.Const(steps), nodes.Const(made)], node)
        node.body = [nodes.ExprStmt(turn).set_lineno(node.lineno), *node.body]

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:  # noqa: D102, N802
        if isinstance(node.node, nodes.EnvironmentAttribute):  # our own: no call of the template
            self._write_call(node.node.name, node.args, frame)
            return
        if isinstance(node.node, nodes.Getattr) and node.node.attr in REFUSED:
            self.fail(f"the method {node.node.attr!r} is not supported: no chat template needs it", node.lineno)
        super().visit_Call(node, frame, forward_caller=forward_caller)

    def visit_Filter(self, node: nodes.Filter, frame: Frame) -> None:  # noqa: D102, N802
        if node.name == "random":
            self.fail("the filter 'random' is not supported: the same input must give the same bytes", node.lineno)
        super().visit_Filter(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: D102, N802
        self.write("environment.concat((")
        for part in node.nodes:
            self._write_call("text_of", [part], frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: D102, N802
        operands = [node.expr, *(step.expr for step in node.ops)]
        if not any(step.op in ("in", "notin") for step in node.ops):
            if len(operands) == 2 and any(map(_is_light, operands)):
                super().visit_Compare(node, frame)
                return
            self.write("(")
            for operand, symbol in zip(operands, [*(SYMBOLS[step.op] for step in node.ops), ")"], strict=True):
                self._weighed(operand, frame)
                self.write(f" {symbol} ")
            return
        if len(node.ops) > 1:
            self.fail("a chain of comparisons with 'in' is not supported: join them with 'and'", node.lineno)
        self.write("(not " if node.ops[0].op == "notin" else "(")
        self._write_call("is_in", operands, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: D102, N802
        if isinstance(node.arg, nodes.Slice):
            borders = (node.arg.start, node.arg.stop, node.arg.step)
            self._write_call("sliced", [node.node, *(border or nodes.Const(None) for border in borders)], frame)
        elif _is_light(node.arg):
            super().visit_Getitem(node, frame)
        else:
            self.write("environment.getitem(")
            self.visit(node.node, frame)
            self.write(", ")
            self._weighed(node.arg, frame)
            self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: D102, N802
        self.write("{")
        for pair in node.items:
            self._weighed(pair.key, frame)
            self.write(": ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("}")

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier, frame: Frame) -> None:  # noqa: D102, N802
        self.fail("{% autoescape %} is not supported: a chat template writes text, not HTML", node.lineno)

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("environment.text_of(")

    def _weighed(self, node: nodes.Expr, frame: Frame) -> None:
        if _is_light(node):
            self.visit(node, frame)
        else:
            self._write_call("weighed", [node], frame)

    def _write_call(self, name: str, arguments: Sequence[nodes.Expr], frame: Frame) -> None:
        self.write(f"environment.{name}(")
        for argument in arguments:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")


SYMBOLS = {"eq": "==", "ne": "!=", "gt": ">", "gteq": ">=", "lt": "<", "lteq": "<="}


def _own_call(name: str, arguments: list[Any], near: nodes.Node) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)
    call.set_lineno(near.lineno)
    return call


def _is_light(node: nodes.Node) -> bool:
    """Return whether an expression gives something small that takes no time to compare, whatever the other side is."""
    if isinstance(node, nodes.Tuple | nodes.List):
        return all(map(_is_light, node.items))
    if isinstance(node, nodes.Neg):
        return _is_light(node.node)
    if isinstance(node, nodes.Const):
        return not isinstance(node.value, str) or len(node.value) <= SMALL
    return isinstance(node, nodes.Compare | nodes.Test | nodes.Not)


def _weight(body: Iterable[nodes.Node]) -> tuple[int, int]:
    """Return how many steps a body adds to each of its turns, and the bytes of what it makes by itself."""
    count = made = 0
    left = list(body)
    while left:
        node = left.pop()
        count += 1
        made += MADE_BY.get(type(node), 0)
        if isinstance(node, nodes.List | nodes.Tuple):
            made += ITEM_BYTES * len(node.items)
        left += node.iter_child_nodes()
    return count // NODES_A_STEP, made


def refuse_long_source(source: str, tokens: Iterable[Any]) -> None:
    """Refuse a template that would take long to compile."""
    if len(source) > MAX_SOURCE:
        raise LimitError(f"it is longer than {MAX_SOURCE:,} characters")
    if sum(1 for _ in tokens) > MAX_TOKENS:
        raise LimitError(f"it has more than {MAX_TOKENS:,} names, signs and texts")


def compute_plain_constants_alone(environment: jinja2.Environment) -> None:
    """Have Jinja compute constants while it compiles only where Python writes all that is in them as plain values.

    A function or an iterator has its place in memory in its text, which would stand in the code of the template.
    """
    for name in ("getattr", "getitem"):
        setattr(environment, name, _giving_plain_values(getattr(environment, name)))
    environment.filters = {name: _giving_plain_values(filter_) for name, filter_ in environment.filters.items()}


def _giving_plain_values(operation: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(operation)
    def operated(*arguments: Any, **named: Any) -> Any:
        value = operation(*arguments, **named)
        if not has_safe_repr(value):
            raise nodes.Impossible
        return value

    return operated
