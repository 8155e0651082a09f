"""The command: verdict, table, exit status, JSON and page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chatmill.cli import app
from chatmill.render.registry import bind
from tests.audit.faults import FAULTS
from tests.audit.sets import clean_rows
from tests.data.tokenizer_files import loaded, unpacked


def run(fault: str, folder: Path, *options: str) -> Any:
    """Audit a set with a fault; clean without one."""
    model = unpacked("qwen3")
    bound = bind(model, loaded("qwen3"))
    rows = clean_rows(bound)
    rows = next(one for one in FAULTS if one.name == fault).put(rows, bound) if fault else rows
    (folder / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return CliRunner().invoke(app, ["audit", str(folder / "set.jsonl"), "--model", str(model), *options])


def test_a_clean_set_has_status_0(tmp_path: Path) -> None:
    done = run("", tmp_path)
    assert (done.exit_code, "No faults found" in done.output) == (0, True), done.output


@pytest.fixture
def _loaded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of the first test has loaded the vocabulary itself."""
    monkeypatch.setattr("chatmill.auditor.run.load_tokenizer", lambda model, control_tokens: loaded("qwen3"))


@pytest.mark.usefixtures("_loaded_before")
def test_a_fault_has_status_1_a_page_and_json(tmp_path: Path) -> None:
    page = tmp_path / "audit.html"
    done = run("newline of the prompt trained", tmp_path, "-o", str(page))
    assert done.exit_code == 1, done.output
    assert "prompt trained" in done.output
    assert all(len(line) <= 80 for line in done.output.splitlines() if "answers" in line)
    assert "prompt_trained" in page.read_text()
    assert "<script" not in page.read_text()
    found = json.loads(run("stop not trained", tmp_path, "--json").output)
    assert ([one["code"] for one in found["findings"]], found["passed"]) == (["stop_untrained"], False)
    assert found["findings"][0]["examples"][0]["parts"]


@pytest.mark.usefixtures("_loaded_before")
def test_a_note_has_status_0_and_examples_have_marks_for_line_breaks(tmp_path: Path) -> None:
    done = run("newline after the stop trained", tmp_path)
    assert done.exit_code == 0, done.output
    assert "text after the stop trained (note)" in done.output
    assert "⏎«<|im_start|>»user⏎" in " ".join(done.output.split())
