"""The formats that are written for Chatmill keep what a recipe and its records ask for, or refuse it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler.run import run_build
from chatmill.prove.verify import verify
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.builds import OPEN_GATES, write_jsonl


def _chat(number: int, **fields: Any) -> dict[str, Any]:
    said = ["one", "first", "two", "second", "three", "third"]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    return {"id": str(number), "messages": messages, **fields}


def _recipe(tmp_path: Path, records: list[dict[str, Any]], template: str, **more: Any) -> dict[str, Any]:
    path = write_jsonl(tmp_path / "chats.jsonl", records)
    recipe = {"sources": [{"path": str(path)}], "tokenizer": "bytes", "template": template, "add_control_tokens": True}
    return {**recipe, **more}


def _trained(built: Path) -> list[str]:
    episodes = EpisodeDataset(built, "train")
    return [
        "".join(chr(id) for id in episode.ids[episode.weights > 0].tolist() if id < 256)  # type: ignore[operator]
        for episode in episodes
    ]


@pytest.mark.parametrize("template", ["token_native", "markers", "chatml"])
def test_expand_last_trains_the_last_answer_alone(tmp_path: Path, template: str) -> None:
    records = [_chat(0), _chat(1)]
    records[1]["messages"][-1]["train"] = False
    run_build(_recipe(tmp_path, records, template, expand="last"), tmp_path / "last", workers=0)
    assert _trained(tmp_path / "last") == ["third", "second"]
    assert verify(tmp_path / "last", deep=True).passed
    run_build(_recipe(tmp_path, records, template), tmp_path / "all", workers=0)
    assert _trained(tmp_path / "all") == ["firstsecondthird", "firstsecond"]


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
