"""Finds the names that a template reads from outside: its options; and those of fields.

`jinja2.meta` calls a name undeclared that both branches of an `if` set. Here a name is read from outside where a way
leads to it on which nothing has set it.
"""

from __future__ import annotations

from collections.abc import Iterable

from jinja2 import nodes


def names_read(template: nodes.Template) -> frozenset[str]:
    """Names that a template reads where it has not set them itself on every way."""
    found = _Names(macro.name for macro in template.find_all(nodes.Macro))
    found.body(template.body, set())
    return frozenset(found.read)


def fields_read(template: nodes.Template) -> frozenset[str]:
    """Names of fields that a template may read: `x.name`, and every text in it (`x['name']`, `'name' in x`)."""
    by_dot = {node.attr for node in template.find_all(nodes.Getattr)}
    return frozenset(by_dot | {node.value for node in template.find_all(nodes.Const) if isinstance(node.value, str)})


class _Names:
    """Goes through statements in order, with the names that are surely set."""

    def __init__(self, macros: Iterable[str]) -> None:
        self.read: set[str] = set()
        self._macros = set(macros)

    def body(self, statements: Iterable[nodes.Node], known: set[str]) -> set[str]:
        """Read statements one after the other; what is set after them."""
        for statement in statements:
            known = self._statement(statement, known)
        return known

    def _statement(self, node: nodes.Node, known: set[str]) -> set[str]:
        match node:
            case nodes.Assign():
                self._expression(node.node, known)
                self._expression(node.target, known)
                return known | _targets(node.target)
            case nodes.AssignBlock():
                self.body(node.body, set(known))
                self._expression(node.filter, known)
                return known | _targets(node.target)
            case nodes.If():
                self._expression(node.test, known)
                ways = [self.body(node.body, set(known))]
                for other in node.elif_:
                    self._expression(other.test, known)
                    ways.append(self.body(other.body, set(known)))
                ways.append(self.body(node.else_, set(known)))
                return set.intersection(*ways)
            case nodes.For():
                self._expression(node.iter, known)
                inner = known | _targets(node.target) | {"loop"}
                self._expression(node.test, inner)
                self.body(node.body, set(inner))
                self.body(node.else_, set(known))
                return known
            case nodes.Macro():
                for default in node.defaults:
                    self._expression(default, known)
                given = {argument.name for argument in node.args} | {"caller", "varargs", "kwargs"}
                self.body(node.body, known | given | self._macros)  # it runs when those after it are there, too
                return known | {node.name}
            case nodes.CallBlock():
                self._expression(node.call, known)
                self.body(node.body, known | {argument.name for argument in node.args})
                return known
            case nodes.Output():
                for part in node.nodes:
                    self._expression(part, known)
                return known
            case nodes.Stmt() if hasattr(node, "body"):
                inner = set(known)
                for field, value in node.iter_fields(exclude=("body",)):
                    for one in value if isinstance(value, list) else [value]:
                        self._expression(one, inner)
                        if field == "targets":
                            inner |= _targets(one)
                self.body(node.body, inner)
                return known
        self._expression(node, known)
        return known

    def _expression(self, node: object, known: set[str]) -> None:
        if isinstance(node, nodes.Name):
            if node.ctx == "load" and node.name not in known:
                self.read.add(node.name)
        elif isinstance(node, nodes.Node):
            for child in node.iter_child_nodes():
                self._expression(child, known)


def _targets(node: object) -> set[str]:
    """The names that an assignment sets."""
    if isinstance(node, nodes.Name):
        return {node.name}
    return (
        {name for child in node.iter_child_nodes() for name in _targets(child)}
        if isinstance(node, nodes.Tuple)
        else set()
    )
