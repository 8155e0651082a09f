"""Code of templates in which macros and blocks say what they read from around them.

A turn of a loop calls macros that are defined elsewhere. What these read of the names around them is an input of the
turn, like a message. Jinja's own tables say which variable a name is: wherever a macro or a block reads one that is not
its own, the code asks `environment.outside(name, value, read)`, which gives the turn what it was handed under it,
or refuses to follow it.
"""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, MacroRef
from jinja2.idtracking import VAR_LOAD_ALIAS, VAR_LOAD_RESOLVE

from chatmill.render.jinja.loops import OURS


class OutsideReads(CodeGenerator):
    """Writes what macros and blocks read from around them as `environment.outside(name, value, read)`.

    A read has a number: the code that reads, which always reads the same variable.
    """

    _own_level: int | None = None
    """The level of names in the outermost macro or block that is being written; None outside of them."""
    _reads = 0

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
            elif action == VAR_LOAD_ALIAS and self._is_outside(source):
                name = _name_of(source)
            else:
                continue
            if name.startswith(OURS):  # no name of the template
                continue
            self.writeline(f"{reference} = {self._outside(name, reference)}")

    def visit_Name(self, node: nodes.Name, frame: Frame) -> None:  # noqa: N802 (names of the base class)
        """Write a name that is read or assigned."""
        reference = frame.symbols.ref(node.name)
        if node.ctx != "load" or not self._is_outside(reference):
            super().visit_Name(node, frame)
            return
        self.write(f"environment.outside({node.name!r}, ")
        super().visit_Name(node, frame)
        self._reads += 1
        self.write(f", {self._reads})")

    def visit_NSRef(self, node: nodes.NSRef, frame: Frame) -> None:  # noqa: N802
        """Write the target of an assignment to a value of a namespace."""
        reference = frame.symbols.ref(node.name)
        if not self._is_outside(reference):
            super().visit_NSRef(node, frame)
            return
        self.writeline(f"{self._outside(node.name, reference)}[{node.attr!r}]")

    def _is_outside(self, reference: str) -> bool:
        return self._own_level is not None and _level_of(reference) < self._own_level

    def _outside(self, name: Any, reference: str) -> str:
        self._reads += 1
        return f"environment.outside({name!r}, {reference}, {self._reads})"


def _level_of(reference: str) -> int:
    """Return the level of a variable, which Jinja calls `l_<level>_<name>`."""
    return int(reference.split("_", 2)[1])


def _name_of(reference: str) -> str:
    return reference.split("_", 2)[2]
