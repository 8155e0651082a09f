"""Runs the command line as a user would, in a process of its own or in this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def chatmill(
    *arguments: str | Path, cwd: Path | None = None, columns: int = 80, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `chatmill ...`; nothing is raised for a failing exit status."""
    return subprocess.run(
        [sys.executable, "-c", "from chatmill.cli import main; main()", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1", **(env or {})},
        check=False,
    )
