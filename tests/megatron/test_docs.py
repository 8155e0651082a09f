"""The Python code of docs/megatron.md and docs/commands/synth-harmony.md runs as it stands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from chatmill import _facade
from tests.megatron.kd_sets import make_documents, write_root

DOCS = Path(__file__).parents[2] / "docs"
NAMES = {
    "SynthKDDataset": "megatron",
    "synth_kd_blend": "store.kd",
    "span_normalized_loss": "train.span_loss",
    "span_counts": "train.span_loss",
    "sum_counts": "train.span_loss",
    "sum_losses": "train.span_loss",
    "write_synth_harmony": "distill.synth_harmony",
}


@pytest.fixture(autouse=True)
def _public(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in NAMES.items():
        monkeypatch.setitem(_facade.PUBLIC, name, _facade.PUBLIC.get(name, module))


def run_page(page: str) -> dict[str, Any]:
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    assert blocks
    names: dict[str, Any] = {"__name__": "docs"}
    exec(compile("\n".join(blocks), page, "exec"), names)
    return names


def test_megatron_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    shards = [make_documents(700, 1, 1), make_documents(600, 2, 20_000)]
    write_root(tmp_path / "data" / "megatron" / "synth_kd_v1", {"train": shards, "valid": [make_documents(400, 3)]})
    names = run_page("megatron.md")
    printed = capsys.readouterr().out
    assert "'span_id': (512,)" in printed
    assert "'tokens_r'" in printed
    assert names["result"].w_r == 0.5
    assert len(names["valid"]) >= 10


def test_synth_harmony_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"synth_id": "a", "query": "q", "reasoning": "r", "response": "a"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert run_page("commands/synth-harmony.md")["result"].rows == 1
