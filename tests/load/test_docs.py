"""The code on the pages of this part runs, from top to bottom."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import run_python


def test_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    run_python("systems/episode-loader.md", blocks=6)
    run_python("formats/episodes.md", blocks=2)
    out = capsys.readouterr().out
    assert "['input_ids', 'labels', 'seq_lengths']" in out
    assert out.strip().endswith("[ 3 11 12 13 14]")
