"""Examples, recipes and answers run: scripts of `examples/`, code of `docs/recipes`, commands of the FAQ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.forked import run_forked
from tests.pages import DOCS, ROOT, fences, run_bash

RECIPES = sorted(page for page in (DOCS / "recipes").glob("*.md") if page.name != "index.md")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
RUN_ELSEWHERE = {"train_tiny.py": "tests/train", "screenshots.py": "tests/view"}
"""Examples whose tests stand next to what they show, because they take a browser or a minute."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `chats.jsonl` and, as the page of recipes says, the dataset `built`."""
    made = tmp_path_factory.mktemp("pages")
    (made / "chats.jsonl").write_bytes((ROOT / "examples" / "data" / "conversations.jsonl").read_bytes())
    (commands,) = [fence.body for fence in fences(DOCS / "recipes" / "index.md") if fence.language == "bash"]
    done = run_bash(commands, made)
    assert done.returncode == 0, done.stderr
    return made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_the_code_of_a_recipe_runs(
    page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": page.stem}
    blocks = 0
    for fence in fences(page):
        if fence.language == "bash":
            done = run_bash(fence.body, folder)
            assert done.returncode == 0, f"{fence.body}\n{done.stderr}"
        elif fence.language == "python":
            exec(compile(fence.body, page.name, "exec"), names)
            blocks += 1
    assert blocks
    assert capsys.readouterr().out.strip(), "it prints what it did"


def test_the_commands_of_the_answers_run(folder: Path) -> None:
    scripts = [fence.body for fence in fences(DOCS / "faq.md") if fence.language == "bash"]
    assert len(scripts) >= 12
    done = run_bash("\n".join(scripts), folder)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr}"
    statuses = [line for line in done.stdout.splitlines() if line.startswith("status ")]
    assert statuses == ["status 3", "status 3", "status 1", "status 2"], "silent, cut away, damaged, bad"
    assert "What is <|im_end|>?«<|im_end|>»" in done.stdout
    assert "All records are equal." in done.stdout
    assert "already holds exactly this build" in done.stdout
    assert "the same bytes" in done.stdout
    assert "{(64,)}" in done.stdout


@pytest.mark.parametrize("script", [path for path in EXAMPLES if path.name not in RUN_ELSEWHERE], ids=lambda p: p.name)
def test_an_example_runs(script: Path, tmp_path: Path) -> None:
    done = run_forked(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert script.name != "demo.py" or "trained" in done.stdout
    assert (script.read_text().splitlines()[0]).startswith('"""'), "the first line says what it shows"
