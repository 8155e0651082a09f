"""Finds the loops over messages in a template, and hands them to the environment: each body becomes a macro.

A loop whose iterable mentions the messages becomes

    {% macro 1turn7(message, 1loop7, ns, enable_thinking, ... every other name that the body may read) %}
        BODY
    {% endmacro %}
    {{ environment.run_loop(7, (("ns", VARIABLE), ...), ITERABLE, (ns, enable_thinking, ...), 1turn7) }}

A macro scopes `set` as the body of a loop does, so the text is the same; and everything the body reads is handed to it.
Names of our own begin with a digit, which no name of a template does.

A body may call macros of the template, and these read names from around them. The names listed here are those that
they are likely to read. What they do read is observed (`outside_reads`): a name that was not handed, or that is another
variable, is not followed. `VARIABLE` says which one is handed: `OF_SCOPE` (a variable around the loop, which Jinja's
tables name later), or, in the body of a loop that is handed values itself, `HANDED` or `CHANGED`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jinja2
from jinja2 import nodes

OF_MACROS = frozenset({"caller", "varargs", "kwargs", "self"})
"""Names that Jinja gives a meaning of its own: in a body they become names of ours."""
OURS = "1"
"""The first character of names of ours."""
ONCE = f"{OURS}once"
LOOP = f"{OURS}loop"
TURN = f"{OURS}turn"
"""The names of macros that bodies become begin with this."""
OF_SCOPE = "of scope"
"""A name that is handed to a loop is a variable of the scope around it."""
HANDED = "handed"
"""It is what the loop around it was handed under the same name."""
CHANGED = "changed"
"""It is a variable of the body around it, which no macro outside of this body reads."""


def hook_loops(template: nodes.Template, environment: jinja2.Environment) -> int:
    """Have the environment run the loops over messages; return how many there are."""
    hooks = _Hooks(template)
    template.body = hooks.body(template.body)
    template.set_environment(environment)
    for node in template.find_all(nodes.Node):
        if getattr(node, "lineno", None) is None:
            node.lineno = 1
    return hooks.count


class _Hooks:
    """Goes through a template's statements, and replaces loops."""

    def __init__(self, template: nodes.Template) -> None:
        self.count = 0
        self._macros = _reads_of_macros(template)
        self._aliases = _aliases(template)
        self._unchanged: set[str] | None = None
        """What the loop around is handed, and its body does not assign; None outside of loops."""

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
        body, loop = node.body, f"{LOOP}{number}"
        if node.test is not None:
            body = [nodes.If(node.test, body, [], []).set_lineno(line)]
        _rename_loop(body, loop)  # Jinja would not find the `loop` of a loop around it after a parameter of that name
        if _leaves_early(body):
            once = nodes.Name(ONCE, "store")
            body = [nodes.For(once, nodes.Const((0,)), _with_breaks(body), [], None, False).set_lineno(line)]
        target = _of_template(node.target.name)
        free = sorted(set(map(_of_template, self._read_by(body))) - {target, loop, ONCE})
        renamed = {name: OURS + name for name in OF_MACROS.intersection([target, *free])}
        _rename_outside_macros(body, renamed)
        variables = tuple((name, self._variable(name)) for name in free)
        around = self._unchanged
        values = free if around is None else [renamed.get(name, name) for name in free]
        self._unchanged = set(free) - set(map(_of_template, _assigned_in(body)))
        inner = self.body(body)
        self._unchanged = around
        handed = [renamed.get(target, target), loop, *[renamed.get(name, name) for name in free]]
        macro = nodes.Macro(f"{TURN}{number}", [nodes.Name(name, "param") for name in handed], [], inner)
        run = nodes.Call(
            nodes.EnvironmentAttribute("run_loop"),
            [
                nodes.Const(number),
                nodes.Const(variables),
                node.iter,
                nodes.Tuple([nodes.Name(name, "load") for name in values], "load"),
                nodes.Name(f"{TURN}{number}", "load"),
            ],
            [],
            None,
            None,
        )
        return [macro.set_lineno(line), nodes.Output([run]).set_lineno(line)]

    def _variable(self, name: str) -> str:
        """Return which variable a loop is handed under a name."""
        if self._unchanged is None:
            return OF_SCOPE
        return HANDED if name in self._unchanged else CHANGED

    def _read_by(self, body: Iterable[nodes.Node]) -> set[str]:
        """Return the names that statements read, also those that the macros they mention read."""
        names = _reads(body)
        while True:
            more = names.union(*(self._macros[name] for name in names if name in self._macros))
            if more == names:
                return names
            names = more


def _of_template(name: str) -> str:
    """Return a name as the template has it, which a loop around this one may have renamed."""
    own = name.removeprefix(OURS)
    return own if own in OF_MACROS else name


def _reads_of_macros(template: nodes.Template) -> dict[str, set[str]]:
    """Return, for each name that may hold a macro, the names that calling it may read.

    A macro may be defined more than once, and held by other names: in lists, objects and namespaces, too.
    """
    reads: dict[str, set[str]] = {}
    for macro in template.find_all(nodes.Macro):
        parameters = {argument.name for argument in macro.args}
        own = (_reads(macro.body) - parameters) | _reads(macro.defaults)
        reads[macro.name] = reads.get(macro.name, set()) | own
    while True:
        before = sum(map(len, reads.values())), len(reads)
        for target, value in _assigned(template):
            held = _reads([value]) & reads.keys()
            for name in _reads([target]) if held else ():
                reads[name] = reads.get(name, set()) | held
        if before == (sum(map(len, reads.values())), len(reads)):
            return reads


def _assigned(template: nodes.Template) -> list[tuple[nodes.Node, nodes.Node]]:
    """Return what names are given: pairs of a target and an expression."""
    pairs: list[tuple[nodes.Node, nodes.Node]] = []
    for assigned in template.find_all(nodes.Assign):
        pairs.append((assigned.target, assigned.node))
    for loop in template.find_all(nodes.For):
        pairs.append((loop.target, loop.iter))
    for block in template.find_all(nodes.With):
        pairs += zip(block.targets, block.values, strict=True)
    return pairs


def _assigned_in(body: Iterable[nodes.Node]) -> set[str]:
    """Return the names that statements assign, in any scope."""
    names: set[str] = set()
    for statement in body:
        for node in (statement, *statement.find_all((nodes.Name, nodes.Macro))):
            if isinstance(node, nodes.Macro) or (isinstance(node, nodes.Name) and node.ctx != "load"):
                names.add(node.name)
    return names


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
    """Return the names that are read in statements, and those that are assigned."""
    names: set[str] = set()
    for node in body:
        for name_node in (node, *node.find_all(_NAMED)):
            if isinstance(name_node, _NAMED):
                names.add(name_node.name)
    return names


_NAMED = (nodes.Name, nodes.NSRef, nodes.Macro)


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


def _rename_outside_macros(body: Iterable[nodes.Node], names: dict[str, str]) -> None:
    """Have statements use other names; in a macro of their own, these names are the macro's."""
    if not names:
        return
    for node in body:
        if isinstance(node, nodes.Name | nodes.NSRef):
            node.name = names.get(node.name, node.name)
        fields = ("body",) if isinstance(node, nodes.Macro | nodes.CallBlock) else ()
        _rename_outside_macros(node.iter_child_nodes(exclude=fields), names)
