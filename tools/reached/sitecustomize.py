"""Python imports this file at its start if its folder is on PYTHONPATH: blocks of Chatmill then report a first run.

Each block of statements in `chatmill` begins with a call of `reached`, which appends `path:line` to the file that
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
    """Append the name of a block, once for each process and test."""
    seen.add(name)
    path = os.environ.get("CHATMILL_REACHED_FILE")
    if path:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{name}\n".encode())
        os.close(file)


class Loader(importlib.machinery.SourceFileLoader):
    """Compiles a module with a report at the beginning of each block."""

    def path_stats(self, path: Any) -> Any:
        """Refuse, so that no compiled file is read or written."""
        raise OSError

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:
        """Insert the reports, after docstrings."""
        tree = ast.parse(data)
        short = "src/chatmill/" + str(path).rpartition("/chatmill/")[2]
        for node in list(ast.walk(tree)):
            if isinstance(node, ast.Module | ast.ClassDef):
                continue
            for _, block in ast.iter_fields(node):
                if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                    first = block[0]
                    name = repr(f"{short}:{first.lineno}")
                    report = ast.parse(f"{name} in __chatmill_seen__ or __chatmill_reached__({name})").body[0]
                    for part in ast.walk(report):
                        if hasattr(part, "lineno"):
                            ast.copy_location(part, first)
                    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                    block.insert(is_function and ast.get_docstring(node, clean=False) is not None, report)
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


builtins.__chatmill_seen__ = seen  # type: ignore[attr-defined]
builtins.__chatmill_reached__ = reached  # type: ignore[attr-defined]
sys.meta_path.insert(0, Finder)
