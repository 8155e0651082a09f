"""The README is true: its commands run, its code runs, its links lead somewhere; and so do those of the docs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
NOT_RUN = re.compile(r"^(make (demo|test)\b|git clone\b|pip install\b)")
"""The two commands of the README run this very test; an install needs a package index."""
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def shell_commands() -> list[str]:
    lines = [
        line.split("  #")[0].strip()
        for language, body in FENCE.findall(README)
        if not language
        for line in body.splitlines()
    ]
    return [line for line in lines if re.match(r"^(make|chatmill|python|git|pip)\b", line)]


def test_every_command_is_known_to_this_test() -> None:
    commands = shell_commands()
    assert any(command.startswith("make demo") for command in commands)
    assert sum(command.startswith("chatmill ") for command in commands) >= 3


def test_commands_run_in_order(tmp_path: Path) -> None:
    """Each command of the README, one after the other, in a folder that has the examples; the output goes there too."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    commands = [command for command in shell_commands() if not NOT_RUN.match(command)]
    assert {"preview", "build", "verify", "diff", "export"} <= {shlex.split(command)[1] for command in commands}
    for command in commands:
        done = subprocess.run(
            shlex.split(command),
            cwd=tmp_path,
            env={**os.environ, "PATH": path, "COLUMNS": "80"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        assert done.stdout.strip(), command


@pytest.mark.parametrize("code", [body for language, body in FENCE.findall(README) if language == "python"])
def test_code_runs(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_the_demo_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py")], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
