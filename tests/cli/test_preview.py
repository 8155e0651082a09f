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


def test_what_a_person_sees(write: Any) -> None:
    done = here("inspect", write(PAIR), "-t", "bytes")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in done.stdout
    trained = [line for line in lines if line[10:11] == "\u258c"]
    assert [line[12:] for line in trained] == ["A token.\u00ab<|im_end|>\u00bb"]
    user = next(line for line in lines if line.startswith("user"))
    assert user[12:] == "\u00ab<|im_start|>\u00bbuser\u23ce"
    assert "            What is <|im_end|>?\u23ce" in lines, "text that spells a control token is not shown as one"
    title = next(number for number, line in enumerate(lines) if line.startswith("one \u00b7"))
    assert lines[title + 1] == user, "a conversation has no boundaries of documents"
    assert "Control tokens added above the vocabulary: <|im_start|> = 259" in done.stdout
    assert "assistant" in lines[-2]
    assert lines[-1].startswith("all")


def test_json(write: Any) -> None:
    done = here("inspect", write(PAIR, {**PAIR, "id": "two"}), "-t", "bytes", "--json", "-n", "5")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["id"] for record in records] == ["one", "two"]
    runs = records[0]["runs"]
    assert records[0]["tokens"] == sum(len(run["ids"]) for run in runs)
    assert "".join(run["text"] for run in runs if run["weight"]) == "A token.<|im_end|>"
    assert records[0]["trained"] == 9
    assert {run["kind"] for run in runs} >= {"user.content", "assistant.content", "assistant.terminator"}


def test_policy_template_skip_and_count(write: Any) -> None:
    path = write(*({**PAIR, "id": f"r{i}"} for i in range(5)))
    done = here("inspect", path, "-t", "bytes", "-T", "token_native", "-p", "all", "--start", "1", "-n", "2")
    assert "r1 " in done.stdout
    assert "r2 " in done.stdout
    assert "r0 " not in done.stdout
    assert "r3 " not in done.stdout
    assert "100.0%" in done.stdout
    assert "template token_native" in done.stdout


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
