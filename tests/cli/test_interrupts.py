"""Ctrl-C at any moment of a start: one line, status 130, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chatmill.cli.statuses import Status
from tests.compiler.builds import chats, write_jsonl

AT_IMPORT = """
import os, signal, sys
from chatmill.cli import main
at, count, name = int(sys.argv.pop(1)), 0, ""
def hook(event, arguments):
    global count, name
    if event == "import":
        count += 1
        if count == at:
            name = arguments[0]
            os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(hook)
sys.argv[0] = "chatmill"
try:
    main()
finally:
    print(f"{count} {name}")
"""
"""The command, which gets SIGINT when the import of so many modules has begun; it prints how many there were."""


def interrupted(at: int, *arguments: str, cwd: Path) -> tuple[subprocess.CompletedProcess[str], int, str]:
    done = subprocess.run(
        [sys.executable, "-c", AT_IMPORT, str(at), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, "NO_COLOR": "1"},
    )
    count, _, name = done.stdout.rstrip("\n").rpartition("\n")[2].partition(" ")
    return done, int(count), name


COMMANDS = [
    ("--version",),
    ("build", "chats.jsonl", "-o", "out", "-t", "bytes", "--add-control-tokens", "-w", "0", "--quiet"),
    ("inspect", "chats.jsonl", "-t", "bytes"),
]


@pytest.mark.parametrize(
    ("arguments", "moments"),
    [(COMMANDS[0], 8), *(pytest.param(one, 150, marks=pytest.mark.slow) for one in COMMANDS)],
)
def test_ctrl_c_while_modules_are_imported_ends_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], moments: int
) -> None:
    write_jsonl(tmp_path / "chats.jsonl", chats(3))
    whole, count, _ = interrupted(0, *arguments, cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert count > 100, "the start imports much"
    for number in range(moments):
        at = 1 + number * (count - 1) // moments
        done, _, name = interrupted(at, *arguments, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (Status.INTERRUPTED, "Stopped.\n"), (at, name)


def test_nothing_is_imported_before_ctrl_c_is_caught() -> None:
    code = "import sys; before = set(sys.modules); import chatmill.cli; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["chatmill", "chatmill._facade", "chatmill.cli"]


def test_the_package_is_a_program(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "chatmill", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (Status.DONE, "")
    assert done.stdout.startswith("chatmill ")
    wrong = [sys.executable, "-m", "chatmill", "inspect", str(tmp_path / "nowhere.jsonl")]
    done = subprocess.run(wrong, capture_output=True, text=True, check=False)
    assert done.returncode == Status.MISTAKE
    assert done.stderr.startswith("chatmill: ")
