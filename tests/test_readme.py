"""The README is true: its commands run, its code runs, and its figures are those of the result files."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.forked import run_forked
from tests.pages import ROOT, fences, run_bash

PAGE = ROOT / "README.md"
NOT_RUN = re.compile(r"^(make (demo|test)\b|git clone\b|pip install\b)")
"""The two commands of the README run this very test; an install needs a package index."""


def shell_commands() -> list[str]:
    blocks = [fence.body for fence in fences(PAGE) if not fence.language]
    lines = [line.split("  #")[0].strip() for body in blocks for line in body.splitlines()]
    return [line for line in lines if re.match(r"^(make|chatmill|python|git|pip)\b", line)]


def test_commands_run_in_order(tmp_path: Path) -> None:
    """Each command of the README, one after the other, in a folder that has the examples; the output goes there too."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    commands = [command for command in shell_commands() if not NOT_RUN.match(command)]
    assert {"inspect", "build", "verify", "diff", "export"} <= {shlex.split(command)[1] for command in commands}
    for command in commands:
        done = run_bash(command, tmp_path)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        assert done.stdout.strip(), command


@pytest.mark.parametrize("code", [fence.body for fence in fences(PAGE) if fence.language == "python"])
def test_code_runs(code: str, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(code)
    done = run_forked(tmp_path / "code.py", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
    assert len(code.splitlines()) <= 11, "ten lines and a blank one"


def ratios(value: Any) -> Iterator[float]:
    """Numbers in a result file, and the ratios of rates that stand side by side."""
    if isinstance(value, dict):
        rates = [entry["rate"] for entry in value.values() if isinstance(entry, dict) and "rate" in entry]
        yield from (a / b for a in rates for b in rates if b)
        for entry in value.values():
            yield from ratios(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from ratios(entry)
    elif isinstance(value, int | float):
        yield float(value)


def test_figures_are_those_of_the_result_files() -> None:
    measured = [
        number
        for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))
        for number in ratios(json.loads(path.read_text()))
    ]
    figures = re.findall(r"(\d+(?:\.\d+)?)x\b", PAGE.read_text())
    assert len(figures) >= 4
    for figure in figures:
        digits = len(figure.partition(".")[2])
        assert any(f"{number:.{digits}f}" == figure for number in measured), f"{figure}x is in no result file"
