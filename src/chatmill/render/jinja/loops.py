"""Finds the loops over messages in a template, and hands them to the environment: each body becomes a macro.

A loop whose iterable mentions the messages becomes

    {% macro turn7(message, loop, ns, enable_thinking, ... every other name that the body reads) %} BODY {% endmacro %}
    {{ environment.run_loop(7, ITERABLE, (ns, enable_thinking, ...), turn7) }}

A macro scopes `set` as the body of a loop does, so the text is the same; and everything the body can read is now handed
to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jinja2
from jinja2 import nodes

CONSTANTS = frozenset({"true", "false", "none", "True", "False", "None"})
OF_MACROS = frozenset({"caller", "varargs", "kwargs"})
"""Names that a macro reads and no one hands to it."""
TURN = "turn_"
"""The names of macros that bodies become begin with this."""


def hook_loops(template: nodes.Template, environment: jinja2.Environment) -> int:
    """Have the environment run the loops over messages; return how many there are."""
    hooks = _Hooks(template, environment)
    template.body = hooks.body(template.body)
    template.set_environment(environment)
    for node in template.find_all(nodes.Node):
        if getattr(node, "lineno", None) is None:
            node.lineno = 1
    return hooks.count


class _Hooks:
    """Goes through a template's statements, and replaces loops."""

    def __init__(self, template: nodes.Template, environment: jinja2.Environment) -> None:
        self._environment = environment
        self.count = 0
        macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
        self._macros = {
            name: _reads(macro.body) - {argument.name for argument in macro.args} for name, macro in macros.items()
        }
        self._aliases = _aliases(template)

    def body(self, statements: list[nodes.Node]) -> list[nodes.Node]:
        """Return statements with their loops replaced."""
        return [hooked for statement in statements for hooked in self._statement(statement)]

    def _statement(self, node: nodes.Node) -> list[nodes.Node]:
        if isinstance(node, nodes.Macro | nodes.CallBlock):
            return [node]
        if isinstance(node, nodes.For) and self._is_over_messages(node):
            return self._hooked(node)
        _change_inside(node, self.body)
        return [node]

    def _is_over_messages(self, node: nodes.For) -> bool:
        if not isinstance(node.target, nodes.Name) or node.else_ or node.recursive:
            return False
        if node.test is not None and "loop" in _reads([node.test, *node.body]):
            return False  # it counts the items that pass the test
        return bool(_reads([node.iter]) & self._aliases)

    def _hooked(self, node: nodes.For) -> list[nodes.Node]:
        assert isinstance(node.target, nodes.Name)
        self.count += 1
        number, line = self.count, node.lineno
        body, loop = node.body, f"loop_{number}"
        if node.test is not None:
            body = [nodes.If(node.test, body, [], []).set_lineno(line)]
        _rename_loop(body, loop)  # Jinja would not find the `loop` of a loop around it after a parameter of that name
        if _leaves_early(body):
            once = nodes.Name("once_", "store")
            body = [nodes.For(once, nodes.Const((0,)), _with_breaks(body), [], None, False).set_lineno(line)]
        free = sorted(self._read_by(body) - {node.target.name, loop} - CONSTANTS - OF_MACROS)
        free = [name for name in free if name not in self._environment.globals]
        free = [name for name in free if not name.startswith(TURN)]
        inner = self.body(body)
        handed = [node.target.name, loop, *free]
        macro = nodes.Macro(f"{TURN}{number}", [nodes.Name(name, "param") for name in handed], [], inner)
        run = nodes.Call(
            nodes.EnvironmentAttribute("run_loop"),
            [
                nodes.Const(number),
                node.iter,
                nodes.Tuple([nodes.Name(name, "load") for name in free], "load"),
                nodes.Name(f"{TURN}{number}", "load"),
            ],
            [],
            None,
            None,
        )
        return [macro.set_lineno(line), nodes.Output([run]).set_lineno(line)]

    def _read_by(self, body: Iterable[nodes.Node]) -> set[str]:
        """Return the names that statements read, also those that the macros they call read."""
        names = _reads(body)
        while True:
            more = names.union(*(self._macros[name] for name in names if name in self._macros))
            if more == names:
                return names - set(self._macros)
            names = more


def _aliases(template: nodes.Template) -> set[str]:
    """Return the names that may hold messages."""
    names = {"messages"}
    while True:
        more = names | {
            assigned.target.name
            for assigned in template.find_all(nodes.Assign)
            if isinstance(assigned.target, nodes.Name)
            and not isinstance(assigned.node, nodes.Call)
            and _reads([assigned.node]) & names
        }
        if more == names:
            return names
        names = more


def _reads(body: Iterable[nodes.Node]) -> set[str]:
    names: set[str] = set()
    for node in body:
        for name_node in (node, *node.find_all((nodes.Name, nodes.NSRef))):
            if isinstance(name_node, nodes.Name | nodes.NSRef):
                names.add(name_node.name)
    return names


def _leaves_early(body: Iterable[nodes.Node]) -> bool:
    """Return whether `break` or `continue` of this loop, and not of one inside it, is among statements."""
    for node in body:
        if isinstance(node, nodes.Break | nodes.Continue):
            return True
        if not isinstance(node, nodes.For) and _leaves_early(node.iter_child_nodes()):
            return True
    return False


def _with_breaks(body: list[nodes.Node]) -> list[nodes.Node]:
    """Return statements in which `break` first tells the environment, and then ends the turn."""
    statements_made: list[nodes.Node] = []
    for node in body:
        if isinstance(node, nodes.Break):
            call = nodes.Call(nodes.EnvironmentAttribute("break_loop"), [], [], None, None)
            statements_made += [nodes.Output([call]).set_lineno(node.lineno), nodes.Continue().set_lineno(node.lineno)]
            continue
        if not isinstance(node, nodes.For):
            _change_inside(node, _with_breaks)
        statements_made.append(node)
    return statements_made


def _change_inside(node: nodes.Node, change: Callable[[list[nodes.Node]], list[nodes.Node]]) -> None:
    """Change the statements inside one."""
    for inner in (node, *getattr(node, "elif_", ())):
        for name in ("body", "else_"):
            if isinstance(getattr(inner, name, None), list):
                setattr(inner, name, change(getattr(inner, name)))


def _rename_loop(body: Iterable[nodes.Node], name: str) -> None:
    """Have statements of a loop read `loop` under another name; loops inside it have their own."""
    for node in body:
        if isinstance(node, nodes.Name) and node.name == "loop":
            node.name = name
        elif isinstance(node, nodes.For):
            _rename_loop([node.iter], name)
        else:
            _rename_loop(node.iter_child_nodes(), name)
