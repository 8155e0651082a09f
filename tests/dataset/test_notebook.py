"""The notebook of the examples runs, and its file shows what its cells show (`python -m tests.notebooks` writes it)."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.notebooks import run, stored
from tests.pages import ROOT

NOTEBOOK = ROOT / "examples" / "compile.ipynb"


def test_the_notebook_runs_and_shows_what_its_file_says(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "data", tmp_path / "data")
    found = run(NOTEBOOK, tmp_path)
    assert [cell.get("text/plain") for cell in found] == [cell.get("text/plain") for cell in stored(NOTEBOOK)]
    assert [cell.get("text/html") for cell in found] == [cell.get("text/html") for cell in stored(NOTEBOOK)]
    shown = "".join(cell.get("text/plain", "") for cell in found)
    assert "left out" in shown
    assert "trained tokens lost by overflow" in shown
    assert "<table" in found[1]["text/html"]
