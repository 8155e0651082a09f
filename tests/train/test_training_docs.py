"""The code and the commands of docs/training.md run, in their order, in a folder with conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pages import DOCS, ROOT, fences, run_bash


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_bytes((ROOT / "examples" / "data" / "conversations.jsonl").read_bytes())
    page = DOCS / "training.md"
    names: dict[str, Any] = {}
    ran = []
    for fence in fences(page):
        if fence.language == "bash":
            done = run_bash(fence.body, tmp_path)
            assert done.returncode == 0, f"{fence.body}\n{done.stderr}"
            ran.append("bash")
        elif fence.language == "python":
            exec(compile(fence.body, page.name, "exec"), names)
            ran.append("python")
    assert ran == ["bash", "python", "bash", "python"]
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("finished ")
    assert said[0].endswith("step_00000005")
    steps, skipped = map(int, said[1].split())
    assert steps > 2
    assert skipped >= 0
