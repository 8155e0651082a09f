"""Runs builds that are killed, in a process of their own, and checks what it reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def reports_of(module: str, order: dict[str, Any]) -> list[dict[str, Any]]:
    """What `python -m MODULE` prints, one report for each kill."""
    done = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["killed"], f"the build was not killed: {report}"
        assert report["resumed"], f"the build could not be resumed: {report}"
        assert report["equal"], f"other bytes than those of an undisturbed build: {report}"
        assert not report["leftovers"], report
