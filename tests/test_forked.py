"""Forks behave as processes that were started: arguments, folder, environment, output, status, signals."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.forked import Forked, run_forked
from tests.pages import run_bash

SCRIPT = """
import atexit, os, signal, sys
atexit.register(print, "at the end")
print(sys.argv[1:], os.getcwd(), os.environ.get("HERE"), __name__)
print("said", file=sys.stderr)
end = sys.argv[1]
if end == "kill":
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
if end == "raise":
    raise ValueError("wrong")
if end != "nothing":
    sys.exit(int(end) if end.isdigit() else end)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("nothing", 0, "said\n"),
        ("0", 0, "said\n"),
        ("3", 3, "said\n"),
        ("one message", 1, "said\none message\n"),
        ("raise", 1, "ValueError: wrong\n"),
        ("kill", -signal.SIGKILL, "said\n"),
    ],
)
def test_a_script_ends_as_it_would(script: Path, end: str, status: int, said: str) -> None:
    done = run_forked(script, end, cwd=script.parent, env={**os.environ, "HERE": "there"})
    assert done.returncode == status
    lines = [f"{[end]} {script.parent} there __main__", *(["at the end"] if end != "kill" else [])]
    assert done.stdout.splitlines() == lines
    assert done.stderr.endswith(said)


def test_one_that_runs_can_be_signalled(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import signal; print('here', flush=True); signal.pause()")
    process = Forked(tmp_path / "waits.py")
    while process.heard() != "here\n":
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.communicate() == ("here\n", "")
    assert process.returncode == -signal.SIGTERM


def test_a_shell_has_the_command(tmp_path: Path) -> None:
    done = run_bash("chatmill --version | cat; chatmill bild || echo status $?; cat missing", tmp_path)
    assert done.returncode == 1
    version, status = done.stdout.splitlines()
    assert version.startswith("chatmill ")
    assert status == "status 2"
    assert "unknown command 'bild'" in done.stderr


def test_a_shell_has_python_for_scripts(script: Path) -> None:
    commands = "python script.py 3 || echo status $?; echo 'import sys; print(sys.argv, __name__)' | python - x"
    done = run_bash(f"{commands}; python -c 'import sys; print(\"torch\" in sys.modules)'", script.parent)
    assert done.returncode == 0, done.stderr
    first, *others = done.stdout.splitlines()
    assert first.startswith("['3'] ")
    assert others == ["at the end", "status 3", "['-', 'x'] __main__", "False"]
