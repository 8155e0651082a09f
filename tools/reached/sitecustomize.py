"""Python imports this file at its start if its folder is on PYTHONPATH: functions of Chatmill then report a first call.

Each function of `chatmill` begins with a call of `reached`, which appends `path:line` to the file that
CHATMILL_REACHED_FILE names: processes that a test forks or starts append to the same file.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import os
import sys
from types import CodeType
from typing import Any

seen: set[str] = set()


def reached(name: str) -> None:
    """Append the name of a function, once for each process and test."""
    if name not in seen:
        seen.add(name)
        path = os.environ.get("CHATMILL_REACHED_FILE")
        if path:
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, f"{name}\n".encode())
            os.close(file)


class Loader(importlib.machinery.SourceFileLoader):
    """Compiles a module with a report at the beginning of each function."""

    def path_stats(self, path: Any) -> Any:
        """Refuse, so that no compiled file is read or written."""
        raise OSError

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:
        """Insert the reports after docstrings."""
        tree = ast.parse(data)
        short = "src/chatmill/" + str(path).rpartition("/chatmill/")[2]
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                call = ast.parse(f"__chatmill_reached__({f'{short}:{node.lineno}'!r})").body[0]
                for part in ast.walk(call):
                    if hasattr(part, "lineno"):
                        ast.copy_location(part, node.body[0])
                node.body.insert(ast.get_docstring(node, clean=False) is not None, call)
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)


class Finder(importlib.machinery.PathFinder):
    """Finds modules of Chatmill for the loader above."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Find as Python does, for `chatmill` alone."""
        if fullname.partition(".")[0] != "chatmill":
            return None
        spec = super().find_spec(fullname, path, target)
        if spec is not None and spec.origin and spec.origin.endswith(".py"):
            spec.loader = Loader(fullname, spec.origin)
        return spec


builtins.__chatmill_reached__ = reached  # type: ignore[attr-defined]
sys.meta_path.insert(0, Finder)
