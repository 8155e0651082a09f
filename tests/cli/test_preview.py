"""`chatmill inspect` of raw files: what a person sees, without colour and at 80 columns, and what a script reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.run import here

PAIR = {
    "id": "one",
    "messages": [{"role": "user", "content": "What is <|im_end|>?\n"}, {"role": "assistant", "content": "A token."}],
}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_records(*records: Any, name: str = "chats.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(r) + "\n" if not isinstance(r, str) else r + "\n" for r in records))
        return path

    return write_records


def test_bad_records_are_told_and_the_others_shown(write: Any) -> None:
    done = here("inspect", write("{broken", {"messages": [{"role": "pope", "content": "x"}]}, PAIR), "-t", "bytes")
    assert done.returncode == 0
    assert "A token." in done.stdout
    assert "left out [invalid_json]" in done.stderr
    assert "chats.jsonl:2, field messages[0].role: unknown role 'pope'" in done.stderr
    done = here("inspect", write({"messages": []}), "-t", "bytes")
    assert done.returncode == 2
    assert "no conversation to show" in done.stderr


def test_a_built_dataset_is_shown_as_it_is_stored(write: Any, tmp_path: Path) -> None:
    """Options that say how conversations are rendered would have no effect on it."""
    built = tmp_path / "built"
    options = ("-t", "bytes", "-T", "chatml", "--add-control-tokens", "-o", built, "--workers", "0", "--quiet")
    assert here("build", write(PAIR), *options).returncode == 0
    for idle in (["--policy", "all"], ["-T", "qwen3"], ["--shape", "user=q"], ["--set", "strict_text=true"]):
        refused = here("inspect", built, *idle)
        assert refused.returncode == 2
        assert "shown as it is stored" in " ".join(refused.stderr.split())
    shown = here("inspect", built, "-n", "1", "-t", "bytes")
    assert shown.returncode == 0
    assert "A token." in shown.stdout
