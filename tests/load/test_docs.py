"""The code on the pages of this part runs, from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["systems/episode-loader.md", "formats/episodes.md"]


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)


def test_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "docs"}
    counts = []
    for page in PAGES:
        counts.append(len(blocks(page)))
        for code in blocks(page):
            exec(compile(code, page, "exec"), names)
    assert counts == [7, 1]
    out = capsys.readouterr().out
    assert "['input_ids', 'labels', 'seq_lengths']" in out
    assert "other_set" in out
    assert out.strip().endswith("[ 3 11 12 13 14]")
