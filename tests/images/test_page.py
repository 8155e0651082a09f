"""The page on pictures shows commands and code that run."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from tests.images.model_folders import picture, write_model
from tests.pages import DOCS, fences, python_blocks, run_bash


def test_the_page_runs_from_files_to_a_training_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "vlm", "qwen3_vl")
    (tmp_path / "ring.png").write_bytes(picture(64, 64))
    (tmp_path / "wide.png").write_bytes(picture(64, 200))
    commands, expected = (
        next(fence.body for fence in fences(DOCS / "pictures.md") if fence.language == language)
        for language in ("bash", "text")
    )
    done = run_bash(commands, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[image 200x64," in done.stdout
    monkeypatch.chdir(tmp_path)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for code in python_blocks("pictures.md"):
            exec(compile(code, "pictures.md", "exec"), {})
    assert out.getvalue() == expected
