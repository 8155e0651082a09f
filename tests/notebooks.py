"""Runs the cells of a notebook without Jupyter, and writes what they show into it: `python -m tests.notebooks FILE`."""

from __future__ import annotations

import ast
import contextlib
import json
import sys
from pathlib import Path
from typing import Any


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(path: Path, folder: Path) -> list[dict[str, str]]:
    """Run all cells in a folder; what each shows of its last expression, nothing if there is none."""
    names: dict[str, Any] = {"__name__": "__main__"}
    found: list[dict[str, str]] = []
    for number, cell in enumerate(code_cells(json.loads(path.read_text(encoding="utf-8")))):
        tree, value = ast.parse("".join(cell["source"]), f"cell {number}"), None
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.chdir(folder):
            exec(compile(tree, f"cell {number}", "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
        found.append({} if value is None else {"text/plain": repr(value)})
        if hasattr(value, "_repr_html_"):
            found[-1]["text/html"] = value._repr_html_()
    return found


def stored(path: Path) -> list[dict[str, str]]:
    """What the file says that each code cell shows."""
    outputs = [cell["outputs"] for cell in code_cells(json.loads(path.read_text(encoding="utf-8")))]
    return [{kind: "".join(lines) for one in cell for kind, lines in one["data"].items()} for cell in outputs]


def write(path: Path, folder: Path) -> None:
    """Put what the cells show into the notebook."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for number, (cell, output) in enumerate(zip(code_cells(notebook), run(path, folder), strict=True), 1):
        data = {kind: text.splitlines(keepends=True) for kind, text in output.items()}
        entry = {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data}
        cell |= {"execution_count": number, "outputs": [entry] if data else []}
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]).resolve(), Path(sys.argv[1]).resolve().parent)
