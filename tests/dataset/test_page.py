"""The code of the page about Python runs, from top to bottom."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.tokenizer_files import HERE as TOKENIZERS
from tests.pages import ROOT, run_python


def test_the_code_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen3-8B").symlink_to(TOKENIZERS / "tiny_torchtitan")
    lines = (ROOT / "examples" / "data" / "conversations.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "chats.jsonl").write_text("".join(lines[:3]))
    run_python("python.md", blocks=5)
    out = capsys.readouterr().out
    assert "Dataset: 3 records read, 3 built, 0 left out" in out
    assert "records[2], field messages[0].role: " in out
    assert "2 unknown_role" in out
    assert "['input_ids', 'labels']" in out
    assert "\nConversation('" in out
    assert "\nRendered(3 conversations" in out
