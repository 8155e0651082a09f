"""The command: verdict, table, exit status, JSON and page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chatmill.cli import app
from chatmill.render.registry import bind
from tests.audit.faults import FAULTS
from tests.audit.sets import Row, clean_rows
from tests.data.tokenizer_files import loaded, unpacked


@pytest.fixture(scope="module")
def model() -> Path:
    return unpacked("qwen3")


@pytest.fixture
def _loaded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of the first test has loaded the vocabulary itself."""
    monkeypatch.setattr("chatmill.auditor.run.load_tokenizer", lambda model, control_tokens: loaded("qwen3"))


def saved(rows: list[Row], folder: Path) -> str:
    path = folder / "set.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows_of(model: Path, fault: str = "") -> list[Row]:
    bound = bind(model, loaded("qwen3"))
    rows = clean_rows(bound)
    return next(one for one in FAULTS if one.name == fault).put(rows, bound) if fault else rows


def test_a_clean_set_has_status_0(model: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["audit", saved(rows_of(model), tmp_path), "--model", str(model)])
    assert done.exit_code == 0, done.output
    assert "No faults found" in done.output


@pytest.mark.usefixtures("_loaded_before")
def test_a_fault_has_status_1_and_a_page(model: Path, tmp_path: Path) -> None:
    path, page = saved(rows_of(model, "newline of the prompt trained"), tmp_path), tmp_path / "audit.html"
    done = CliRunner().invoke(app, ["audit", path, "--model", str(model), "-o", str(page)])
    assert done.exit_code == 1, done.output
    assert "prompt trained" in done.output
    assert all(len(line) <= 80 for line in done.output.splitlines() if "answers" in line)
    html = page.read_text()
    assert "prompt_trained" in html
    assert "<script" not in html


@pytest.mark.usefixtures("_loaded_before")
def test_a_note_has_status_0_and_examples_have_marks_for_line_breaks(model: Path, tmp_path: Path) -> None:
    path = saved(rows_of(model, "newline after the stop trained"), tmp_path)
    done = CliRunner().invoke(app, ["audit", path, "--model", str(model)])
    assert done.exit_code == 0, done.output
    assert "text after the stop trained (note)" in done.output
    shown = " ".join(done.output.split())
    assert "⏎«<|im_start|>»user⏎" in shown


@pytest.mark.usefixtures("_loaded_before")
def test_json_has_everything(model: Path, tmp_path: Path) -> None:
    path = saved(rows_of(model, "stop not trained"), tmp_path)
    done = CliRunner().invoke(app, ["audit", path, "--model", str(model), "--json"])
    assert done.exit_code == 1
    found = json.loads(done.output)
    assert [one["code"] for one in found["findings"]] == ["stop_untrained"]
    assert found["findings"][0]["examples"][0]["parts"]
    assert found["passed"] is False
