"""Runs training commands in a process of their own, with one thread; the command line is there to be signalled too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

SCRIPT = "from chatmill.cli import main; main()"


def command_line(*arguments: str | Path) -> list[str]:
    """What to start; the first argument is the name of the command."""
    return [sys.executable, "-c", SCRIPT, *map(str, arguments)]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """One thread, plain text, and what is asked for."""
    return {**os.environ, "NO_COLOR": "1", "COLUMNS": "100", "OMP_NUM_THREADS": "1", **(extra or {})}


def run_command(
    *arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run and wait; nothing is raised for a failing exit status."""
    return subprocess.run(
        command_line(*arguments), capture_output=True, text=True, cwd=cwd, env=environment(env), check=False
    )
