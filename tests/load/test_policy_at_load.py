"""A policy that is chosen when data is loaded: what records asked for is kept, or what is lost is said."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import chatmill
from chatmill import GPTEpisodeDataLoader

CONFIG = {"batch_size": 1, "block_size": 255, "epoch_shuffle": False, "pad_token_id": 0}


def _chat(*answers: dict[str, Any]) -> dict[str, Any]:
    turns = [message for answer in answers for message in ({"role": "user", "content": "Why?"}, answer)]
    return {"id": "one", "messages": [{**turn, "role": turn.get("role", "assistant")} for turn in turns]}


def _built(folder: Path, template: str, *records: dict[str, Any], **options: Any) -> Path:
    folder.mkdir()
    source = folder / "chats.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    recipe = {"sources": [{"path": str(source)}], "tokenizer": "bytes", "template": template, **options}
    chatmill.build({**recipe, "add_control_tokens": True}, folder / "built", workers=0)
    return folder / "built"


@pytest.mark.parametrize("template", ["chatml", "token_native", "markers"])
@pytest.mark.parametrize("unwanted", [{"train": False}, {"weight": 0}])
def test_an_answer_that_is_not_to_be_trained_stays_so(tmp_path: Path, template: str, unwanted: dict[str, Any]) -> None:
    record = _chat({"content": "wrong", **unwanted}, {"content": "right"})
    built = _built(tmp_path / "set", template, record)
    stored = GPTEpisodeDataLoader(CONFIG, None, built, use_loss_mask=True).get_batch()
    policy = json.loads((built / "manifest.json").read_text())["policy"]["name"]
    chosen = GPTEpisodeDataLoader(CONFIG, None, built, policy=policy).get_batch()
    assert stored[2].sum() > 0
    assert chosen[2].tolist() == stored[2].tolist()
    everything = GPTEpisodeDataLoader(CONFIG, None, built, policy="all").get_batch()
    text = bytes(id for id in everything[1][everything[2] > 0].tolist() if id < 256)
    assert b"right" in text
    assert b"wrong" not in text
    assert chatmill.verify_dataset(built, deep=True).passed


def test_weights_of_messages_that_a_policy_at_load_loses_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = _built(tmp_path / "plain", "chatml", _chat({"content": "a"}))
    half = _built(tmp_path / "half", "chatml", _chat({"content": "a", "weight": 0.5}))
    with caplog.at_level(logging.WARNING):
        GPTEpisodeDataLoader(CONFIG, None, plain, policy="assistant")
        GPTEpisodeDataLoader(CONFIG, None, half, use_loss_mask=True)
        assert not caplog.records
        GPTEpisodeDataLoader(CONFIG, None, half, policy="assistant")
    assert "those that messages brought along do not count" in caplog.text


@pytest.mark.parametrize("several", [{"template": "qwen3"}, {"packing": {"max_length": 40, "overflow": "windows"}}])
def test_what_is_in_several_episodes_of_a_record_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, several: dict[str, Any]
) -> None:
    record = _chat({"content": "a", "reasoning_content": "b"}, {"content": "c", "reasoning_content": "d"})
    gates = {"max_lost_reasoning": None}  # chatml shows none
    options = dict(several)
    built = _built(tmp_path / "set", options.pop("template", "chatml"), record, gates=gates, **options)
    whole = _built(tmp_path / "whole", "chatml", record, record, gates=gates)
    with caplog.at_level(logging.WARNING):
        GPTEpisodeDataLoader(CONFIG, None, whole, policy="last_turn")
        GPTEpisodeDataLoader(CONFIG, None, built, policy="assistant")
        assert not caplog.records
        GPTEpisodeDataLoader(CONFIG, None, built, policy="last_turn")
    assert "build with this policy to train it once a record" in caplog.text
    caplog.clear()
    GPTEpisodeDataLoader(CONFIG, None, built, policy="all")
    assert "trains what is repeated in every episode" in caplog.text
