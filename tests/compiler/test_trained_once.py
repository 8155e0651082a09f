"""A record in several rows: whatever a policy trains of it is trained in one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chatmill.cli import app
from chatmill.compiler.run import run_build
from chatmill.prove.verify import verify
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.builds import OPEN_GATES, write_jsonl

SAID = ["first question", "first answer", "second question", "second answer", "third question", "third answer"]


def _record() -> dict[str, object]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text, "weight": 1} for i, text in enumerate(SAID)]
    for message in messages[1::2]:
        message["reasoning_content"] = f"reasons of the {message['content']}"
    return {"id": "one", "messages": messages}


def _trained(built: Path) -> list[str]:
    """What each episode trains, as text; control tokens are `#`."""
    found = []
    for episode in EpisodeDataset(built, "train"):
        assert episode.weights is not None
        ids = episode.ids[episode.weights > 0].tolist()
        found.append("".join(chr(id) if id < 256 else "#" for id in ids))
    return found


@pytest.mark.parametrize("policy", ["all", "per_message", "trl", "post_training", "assistant"])
def test_what_several_rows_have_is_trained_in_one(tmp_path: Path, policy: str) -> None:
    path = write_jsonl(tmp_path / "chats.jsonl", [_record(), _record()])
    recipe = {"sources": [{"path": str(path)}], "tokenizer": "bytes", "template": "qwen3", "add_control_tokens": True}
    built = run_build({**recipe, "policy": policy}, tmp_path / "built", workers=0).manifest
    assert built["ledger"]["notes"]["chats"]["rows_added"] == 4
    assert "untrained_terminators" not in built["ledger"]["notes"]["chats"]
    everything = "".join(_trained(tmp_path / "built")[:3])
    for i, text in enumerate(SAID):
        assert everything.count(text) == (2 if i % 2 else policy in ("all", "per_message")), text  # answer and reasons
    headers = policy in ("all", "post_training")
    assert everything.count("#assistant\n") == (3 if headers else 0)
    assert everything.count("#user\n") == (3 if policy == "all" else 0)
    assert verify(tmp_path / "built", deep=True).passed
    shown = CliRunner().invoke(
        app, ["inspect", str(path), "-t", "bytes", "-T", "qwen3", "-p", policy, "-n", "1", "--json"]
    )
    rows = [json.loads(line) for line in shown.stdout.splitlines()]
    assert sum(row["trained"] for row in rows) == len(everything)


@pytest.mark.parametrize("template", ["qwen3", "chatml"])
@pytest.mark.parametrize("policy", ["all", "per_message"])
def test_what_others_say_behind_the_last_answer_is_trained_too(tmp_path: Path, policy: str, template: str) -> None:
    record = _record()
    record["messages"] = [*record["messages"], {"role": "user", "content": "fourth question", "weight": 1}]  # type: ignore[misc]
    path = write_jsonl(tmp_path / "chats.jsonl", [record])
    recipe = {"sources": [{"path": str(path)}], "tokenizer": "bytes", "template": template, "add_control_tokens": True}
    run_build({**recipe, "policy": policy, "gates": OPEN_GATES}, tmp_path / "built", workers=0)
    everything = "".join(_trained(tmp_path / "built"))
    answers = 2 if template == "qwen3" else 1
    for i, text in enumerate([*SAID, "fourth question"]):
        assert everything.count(text) == (answers if i % 2 else 1), text
    assert verify(tmp_path / "built", deep=True).passed


# The formats that are written for Chatmill keep what a recipe and its records ask for, or refuse it.


def _chat(number: int, **fields: Any) -> dict[str, Any]:
    said = ["one", "first", "two", "second", "three", "third"]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    return {"id": str(number), "messages": messages, **fields}


def _recipe(tmp_path: Path, records: list[dict[str, Any]], template: str, **more: Any) -> dict[str, Any]:
    path = write_jsonl(tmp_path / "chats.jsonl", records)
    recipe = {"sources": [{"path": str(path)}], "tokenizer": "bytes", "template": template, "add_control_tokens": True}
    return {**recipe, **more}


@pytest.mark.parametrize("template", ["token_native", "markers", "chatml"])
def test_expand_last_trains_the_last_answer_alone(tmp_path: Path, template: str) -> None:
    records = [_chat(0), _chat(1)]
    records[1]["messages"][-1]["train"] = False
    run_build(_recipe(tmp_path, records, template, expand="last"), tmp_path / "last", workers=0)
    assert [one.replace("#", "") for one in _trained(tmp_path / "last")] == ["third", "second"]
    assert verify(tmp_path / "last", deep=True).passed
    run_build(_recipe(tmp_path, records, template), tmp_path / "all", workers=0)
    assert [one.replace("#", "") for one in _trained(tmp_path / "all")] == ["firstsecondthird", "firstsecond"]


@pytest.mark.parametrize("template", ["token_native", "chatml"])
def test_options_of_records_that_a_template_does_not_read_are_refused(tmp_path: Path, template: str) -> None:
    options: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {}, {"effort": "high"}, {}]
    records = [_chat(i, chat_template_kwargs=one) for i, one in enumerate(options)]
    recipe = _recipe(tmp_path, records, template, on_error="quarantine", gates=OPEN_GATES)
    built = run_build(recipe, tmp_path / "built", workers=0).manifest
    assert built["ledger"]["records"]["chats"]["quarantined"] == {"unknown_option": 2}
    assert [episode.record_id for episode in EpisodeDataset(tmp_path / "built", "train")] == ["0", "2", "4"]
    rejected = (tmp_path / "built" / "rejected.jsonl").read_text().splitlines()
    assert "'enable_thinking'" in rejected[0]
    assert "'effort'" in rejected[1]
    assert verify(tmp_path / "built", deep=True).passed
