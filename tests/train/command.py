"""Runs training commands in a process of their own, with one thread; one that was started can be signalled too."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.forked import Forked, run_forked


def started(*arguments: str | Path) -> Forked:
    """Start and do not wait; the first argument is the name of the command."""
    return Forked("chatmill", *arguments, env=environment())


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """One thread, plain text, and what is asked for."""
    return {**os.environ, "NO_COLOR": "1", "COLUMNS": "100", "OMP_NUM_THREADS": "1", **(extra or {})}


def run_command(
    *arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run and wait; nothing is raised for a failing exit status."""
    return run_forked("chatmill", *arguments, cwd=cwd, env=environment(env))
