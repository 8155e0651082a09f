"""Code of templates in which macros and blocks say what they read from around them.

A turn of a loop calls macros that are defined elsewhere. What these read of the names around them is an input of the
turn, like a message. Jinja's own tables say which variable a name is: wherever a macro or a block reads one that is not
its own, the code asks `environment.outside(name, value, variable)`, which gives the turn what it was handed under that
name, or refuses to follow it.

One name may be several variables, which hold equal values for some records only. So a loop says of which variable it
hands the value, and a macro which one it reads: the name of Jinja's own Python variable, or `GIVEN`.
"""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, MacroRef
from jinja2.idtracking import VAR_LOAD_ALIAS, VAR_LOAD_RESOLVE, Symbols

from chatmill.render.jinja.loops import CHANGED, OF_SCOPE, OURS

GIVEN = "given"
"""The variable of a name that no statement around it assigns: the template is given it."""
IN_BLOCK = "in a block"
"""What a block reads, which may be a variable of the loop around it: no loop is handed it."""


class OutsideReads(CodeGenerator):
    """Writes what macros and blocks read from around them as `environment.outside(name, value, variable)`."""

    _own_level: int | None = None
    """The level of names in the outermost macro or block that is being written; None outside of them."""

    def macro_body(self, node: nodes.Macro | nodes.CallBlock, frame: Frame) -> tuple[Frame, MacroRef]:
        """Write a macro."""
        if self._own_level is not None:
            return super().macro_body(node, frame)
        self._own_level = frame.symbols.level + 1
        try:
            return super().macro_body(node, frame)
        finally:
            self._own_level = None

    def enter_frame(self, frame: Frame) -> None:
        """Write the beginning of a scope, where names are looked up that are not assigned before they are read."""
        if frame.block_frame and frame.symbols.parent is None:  # blocks come last, after the template itself
            self._own_level = frame.symbols.level
        super().enter_frame(frame)
        if self._own_level is None:
            return
        for reference, (action, source) in frame.symbols.loads.items():
            if action == VAR_LOAD_RESOLVE:
                name = source
                variable = IN_BLOCK if frame.block is not None else GIVEN
            elif action == VAR_LOAD_ALIAS and self._is_outside(source):
                name = _name_of(source)
                variable = _variable(frame.symbols.parent, name)
            else:
                continue
            if name.startswith(OURS):  # no name of the template
                continue
            self.writeline(f"{reference} = {_outside(name, reference, variable)}")

    def visit_Name(self, node: nodes.Name, frame: Frame) -> None:  # noqa: N802 (names of the base class)
        """Write a name that is read or assigned."""
        reference = frame.symbols.ref(node.name)
        if node.ctx != "load" or not self._is_outside(reference):
            super().visit_Name(node, frame)
            return
        self.write(f"environment.outside({node.name!r}, ")
        super().visit_Name(node, frame)
        self.write(f", {_variable(frame.symbols, node.name)!r})")

    def visit_NSRef(self, node: nodes.NSRef, frame: Frame) -> None:  # noqa: N802
        """Write the target of an assignment to a value of a namespace."""
        reference = frame.symbols.ref(node.name)
        if not self._is_outside(reference):
            super().visit_NSRef(node, frame)
            return
        self.writeline(f"{_outside(node.name, reference, _variable(frame.symbols, node.name))}[{node.attr!r}]")

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:  # noqa: N802
        """Write a call; that of a loop over messages says which variables are handed to its body."""
        if isinstance(node.node, nodes.EnvironmentAttribute) and node.node.name == "run_loop":
            names = node.args[1]
            assert isinstance(names, nodes.Const)
            handed: list[tuple[str, str]] = []
            for name, variable in names.value:
                if variable == OF_SCOPE and frame.block is not None:  # a block has variables of its own
                    variable = CHANGED
                elif variable == OF_SCOPE:
                    variable = _variable(frame.symbols, name)
                handed.append((name, variable))
            names.value = tuple(handed)
        super().visit_Call(node, frame, forward_caller=forward_caller)

    def _is_outside(self, reference: str) -> bool:
        return self._own_level is not None and _level_of(reference) < self._own_level


def _outside(name: Any, reference: str, variable: str) -> str:
    return f"environment.outside({name!r}, {reference}, {variable!r})"


def _variable(symbols: Symbols | None, name: str) -> str:
    """Return the variable that a name is in a scope of the template itself."""
    scope = symbols
    while scope is not None and name not in scope.refs:
        scope = scope.parent
    if scope is None:
        return GIVEN
    reference = scope.refs[name]
    is_given = scope.loads.get(reference) == (VAR_LOAD_RESOLVE, name) and name not in scope.stores
    return GIVEN if is_given else reference


def _level_of(reference: str) -> int:
    """Return the level of a variable, which Jinja calls `l_<level>_<name>`."""
    return int(reference.split("_", 2)[1])


def _name_of(reference: str) -> str:
    return reference.split("_", 2)[2]
