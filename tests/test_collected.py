"""No folder of tests is left out (pytest passes by folders named `build`, for one), and none depends on the clock."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def test_every_folder_of_tests_is_collected(pytestconfig: pytest.Config) -> None:
    patterns = pytestconfig.getini("norecursedirs")
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    assert Path("compiler") in folders
    assert not [folder for folder in folders if any(fnmatch(part, p) for part in folder.parts for p in patterns)]


def test_processes_can_be_interrupted_though_the_suite_runs_in_the_background() -> None:
    """A shell that starts `make test &` ignores Ctrl-C on its behalf, and processes inherit that."""
    child = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    suite = f"import subprocess, sys, tests.conftest; subprocess.run([sys.executable, '-c', '{child}'])"
    shell = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    )
    command = [sys.executable, "-c", shell, sys.executable, "-c", suite]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().endswith("KeyboardInterrupt")
