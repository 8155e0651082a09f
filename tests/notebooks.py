"""Runs the cells of a notebook without Jupyter, and writes what they show into it: `python -m tests.notebooks FILE`."""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path
from typing import Any


def code_cells(path: Path) -> list[str]:
    """The sources of the code cells of a notebook."""
    return ["".join(cell["source"]) for cell in read(path)["cells"] if cell["cell_type"] == "code"]


def read(path: Path) -> dict[str, Any]:
    """A notebook as it is in its file."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def shown(value: object) -> dict[str, str]:
    """What a notebook shows of a value."""
    found = {"text/plain": repr(value)}
    if hasattr(value, "_repr_html_"):
        found["text/html"] = value._repr_html_()
    return found


def run(path: Path, folder: Path) -> list[dict[str, str]]:
    """Run all cells in a folder; what each shows of its last expression, nothing if there is none."""
    names: dict[str, Any] = {"__name__": "__main__"}
    found: list[dict[str, str]] = []
    before = Path.cwd()
    os.chdir(folder)
    try:
        for number, source in enumerate(code_cells(path)):
            tree = ast.parse(source, f"cell {number}")
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, f"cell {number}", "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
                found.append({} if value is None else shown(value))
            else:
                found.append({})
    finally:
        os.chdir(before)
    return found


def stored(path: Path) -> list[dict[str, str]]:
    """What the file says that each code cell shows."""
    outputs = [cell["outputs"] for cell in read(path)["cells"] if cell["cell_type"] == "code"]
    return [{kind: "".join(lines) for one in cell for kind, lines in one["data"].items()} for cell in outputs]


def write(path: Path, folder: Path) -> None:
    """Put what the cells show into the notebook."""
    notebook, outputs = read(path), iter(run(path, folder))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        data = {kind: text.splitlines(keepends=True) for kind, text in next(outputs).items()}
        entry = {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data}
        cell |= {"execution_count": number, "outputs": [entry] if data else []}
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]).resolve(), Path(sys.argv[1]).resolve().parent)
