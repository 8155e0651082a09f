"""Finds the names that a template reads from outside: its options; and those of fields.

`jinja2.meta` calls a name undeclared that both branches of an `if` set. Here a name is read from outside where a way
leads to it on which nothing has set it.
"""

from __future__ import annotations

from collections.abc import Iterable

from jinja2 import nodes


def names_read(template: nodes.Template) -> frozenset[str]:
    """Names that a template reads where it has not set them itself on every way."""
    reader = _Names(macro.name for macro in template.find_all(nodes.Macro))
    reader.body(template.body, set())
    return frozenset(reader.read)


def fields_read(template: nodes.Template) -> frozenset[str]:
    """Names of fields that a template may read: `x.name`, and every text in it (`x['name']`, `'name' in x`)."""
    by_dot = {node.attr for node in template.find_all(nodes.Getattr)}
    return frozenset(by_dot | {node.value for node in template.find_all(nodes.Const) if isinstance(node.value, str)})


class _Names:
    """Goes through statements in order, with the names that are surely set."""

    def __init__(self, macros: Iterable[str]) -> None:
        self.read: set[str] = set()
        self._macros = set(macros)

    def body(self, statements: Iterable[nodes.Node], bound: set[str]) -> set[str]:
        """Read statements one after the other; what is set after them."""
        for statement in statements:
            bound = self._statement(statement, bound)
        return bound

    def _statement(self, node: nodes.Node, bound: set[str]) -> set[str]:
        match node:
            case nodes.Assign():
                self._expression(node.node, bound)
                self._expression(node.target, bound)
                return bound | _targets(node.target)
            case nodes.AssignBlock():
                self.body(node.body, set(bound))
                self._expression(node.filter, bound)
                return bound | _targets(node.target)
            case nodes.If():
                self._expression(node.test, bound)
                for other in node.elif_:
                    self._expression(other.test, bound)
                ways = [node.body, *(other.body for other in node.elif_), node.else_]
                return set.intersection(*(self.body(way, set(bound)) for way in ways))
            case nodes.For():
                self._expression(node.iter, bound)
                inner = bound | _targets(node.target) | {"loop"}
                self._expression(node.test, inner)
                self.body(node.body, set(inner))
                self.body(node.else_, set(bound))
                return bound
            case nodes.Macro():
                for default in node.defaults:
                    self._expression(default, bound)
                arguments = {argument.name for argument in node.args} | {"caller", "varargs", "kwargs"}
                self.body(node.body, bound | arguments | self._macros)  # it runs when those after it are there, too
                return bound | {node.name}
            case nodes.CallBlock():
                self._expression(node.call, bound)
                self.body(node.body, bound | {argument.name for argument in node.args})
                return bound
            case nodes.Stmt() if hasattr(node, "body"):
                inner = set(bound)
                for field, value in node.iter_fields(exclude=("body",)):
                    for child in value if isinstance(value, list) else [value]:
                        self._expression(child, inner)
                        if field == "targets":
                            inner |= _targets(child)
                self.body(node.body, inner)
                return bound
        self._expression(node, bound)
        return bound

    def _expression(self, node: object, bound: set[str]) -> None:
        if isinstance(node, nodes.Name):
            if node.ctx == "load" and node.name not in bound:
                self.read.add(node.name)
        elif isinstance(node, nodes.Node):
            for child in node.iter_child_nodes():
                self._expression(child, bound)


def _targets(node: object) -> set[str]:
    """Return the names that an assignment sets."""
    if isinstance(node, nodes.Name):
        return {node.name}
    return (
        {name for child in node.iter_child_nodes() for name in _targets(child)}
        if isinstance(node, nodes.Tuple)
        else set()
    )
