"""Runs the command line as a user would, in a process of its own, a fork, or in this one."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
from typer.testing import CliRunner, Result

from chatmill.cli.app import app
from chatmill.cli.statuses import ended, show_warning
from tests.forked import run_forked


class Done(NamedTuple):
    """What a command said."""

    status: int
    out: str
    said: str

    @property
    def error(self) -> str:
        """What it said to the standard error, in one line."""
        return " ".join(self.said.split())

    @property
    def messages(self) -> int:
        return self.said.count("chatmill: ")


Call = Callable[..., Done]


def chatmill(
    *arguments: str | Path, cwd: Path | None = None, columns: int = 80, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `chatmill ...`; nothing is raised for a failing exit status."""
    return subprocess.run(
        [sys.executable, "-c", "from chatmill.cli import main; main()", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=_environment(columns, env),
        check=False,
    )


def forked(
    *arguments: str | Path, cwd: Path | None = None, columns: int = 80, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The same in a process that finds everything imported: for tests that end it, or look at what it leaves."""
    return run_forked("chatmill", *arguments, cwd=cwd, env=_environment(columns, env))


def _environment(columns: int, more: Mapping[str, str] | None) -> dict[str, str]:
    return {**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1", **(more or {})}


def invoke(*arguments: object) -> Result:
    """The same in this process; what the command raises is the result's `exception`."""
    return CliRunner().invoke(app, list(map(str, arguments)))


def here(*arguments: str | Path, cwd: Path | None = None, columns: int = 80) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has loaded everything: for tests of what a command says."""
    out, said = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    command = typer.main.get_command(app)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("default")
        patch.setattr(warnings, "showwarning", show_warning)
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("NO_COLOR", "1")
        patch.chdir(cwd or Path.cwd())
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
            status = ended(
                lambda: command.main([str(one) for one in arguments], prog_name="chatmill", standalone_mode=False)
            )
    texts = (file.buffer.getvalue().decode() for file in (out, said))  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(list(map(str, arguments)), status, *texts)
