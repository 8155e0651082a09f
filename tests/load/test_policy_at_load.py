"""A policy that is chosen when data is loaded: what records asked for is kept, or what is lost is said."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chatmill
from chatmill.core.kinds import Part, RoleCode, kind
from chatmill.errors import ConfigError
from chatmill.label.presets import find_policy
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.store.episode_writer import EpisodeWriter
from tests.compiler.builds import write_jsonl
from tests.load.sets import Item, batch, items, loader, same, write_set

KIND = {
    "u": kind(RoleCode.USER, Part.CONTENT),
    "h": kind(RoleCode.ASSISTANT, Part.HEADER),
    "a": kind(RoleCode.ASSISTANT, Part.CONTENT),
    "e": kind(RoleCode.ASSISTANT, Part.TERMINATOR),
}


@pytest.mark.parametrize("name", ["assistant", "last_turn", "all", "final_only"])
def test_a_policy_at_load_chooses_what_is_trained(tmp_path: Path, name: str) -> None:
    texts = ["uuhaae", "uhaeuuhaaae", "uhaeuhaeuhae", "uuuuuuu", "haae", "uhaaaaaaaaaaaaae", "uhaeuuuuuuuuhae"]
    texts.append("uhaeuhaaaauhae")  # a row ends inside the second answer, and the last turn is the third
    rows, policy = [], find_policy(name)
    with EpisodeWriter(tmp_path, "train", shard_tokens=30) as writer:
        for i, text in enumerate(texts):
            ids, kinds = [100 * i + t for t in range(len(text))], [KIND[letter] for letter in text]
            writer.append(ids, [0] * len(text), kinds=kinds)
            rows.append(Item(ids, policy.token_weights(np.array(kinds, dtype=np.uint8)).tolist()))
    config = {"batch_size": 8, "block_size": 8, "pad_token_id": 50_256, "epoch_shuffle": False, "use_loss_mask": False}
    got = GPTEpisodeDataLoader(config, None, tmp_path, policy=name).get_batch()
    assert same(got, batch(rows, 8))
    assert float(got[2].sum()) > 0
    assert float(GPTEpisodeDataLoader(config, None, tmp_path, use_loss_mask=True).get_batch()[2].sum()) == 0


def test_a_policy_that_cannot_work_is_refused(tmp_path: Path) -> None:
    write_set(tmp_path / "plain", items(3))
    with EpisodeWriter(tmp_path / "kinds", "train") as writer:
        writer.append([1, 2, 3], kinds=[0, 1, 2])
    for folder, options, says in (
        ("plain", {"policy": "assistant"}, "kinds"),
        ("kinds", {"policy": "per_message"}, "per_message"),
        ("kinds", {"policy": "no such policy"}, "Known"),
        ("kinds", {"policy": "all", "use_loss_mask": False}, "use_loss_mask=False"),
    ):
        with pytest.raises(ConfigError, match=says):
            loader(tmp_path / folder, **options)


# ---- on what a build wrote


def chat(*answers: dict[str, Any]) -> dict[str, Any]:
    asked = {"role": "user", "content": "Why?"}
    return {"messages": [message for answer in answers for message in (asked, {"role": "assistant", **answer})]}


def built(folder: Path, *records: dict[str, Any], template: str = "chatml", **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = write_jsonl(folder / "chats.jsonl", [{"id": "one", **record} for record in records])
    recipe = {"sources": [{"path": str(path)}], "tokenizer": "bytes", "template": template, **options}
    chatmill.build({**recipe, "add_control_tokens": True}, folder / "built", workers=0)
    return folder / "built"


def row_of(folder: Path, **options: Any) -> Any:
    """The first batch, of one long row."""
    return loader(folder, 1, 255, epoch_shuffle=False, pad_token_id=0, **options).get_batch()


@pytest.mark.parametrize("template", ["chatml", "token_native", "markers"])
@pytest.mark.parametrize("unwanted", [{"train": False}, {"weight": 0}])
def test_an_answer_that_is_not_to_be_trained_stays_so(tmp_path: Path, template: str, unwanted: dict[str, Any]) -> None:
    folder = built(tmp_path, chat({"content": "wrong", **unwanted}, {"content": "right"}), template=template)
    policy = json.loads((folder / "manifest.json").read_text())["policy"]["name"]
    stored, chosen, everything = (row_of(folder, policy=name) for name in (None, policy, "all"))
    assert stored[2].sum() > 0
    assert chosen[2].tolist() == stored[2].tolist()
    text = bytes(id for id in everything[1][everything[2] > 0].tolist() if id < 256)
    assert b"right" in text
    assert b"wrong" not in text
    assert chatmill.verify_dataset(folder, deep=True).passed


def test_weights_of_messages_that_a_policy_at_load_loses_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = built(tmp_path / "plain", chat({"content": "a"}))
    half = built(tmp_path / "half", chat({"content": "a", "weight": 0.5}))
    with caplog.at_level(logging.WARNING):
        row_of(plain, policy="assistant")
        row_of(half)
        assert not caplog.records
        row_of(half, policy="assistant")
    assert "those that messages brought along do not count" in caplog.text


@pytest.mark.parametrize("several", [{"template": "qwen3"}, {"packing": {"max_length": 40, "overflow": "windows"}}])
def test_what_is_in_several_episodes_of_a_record_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, several: dict[str, Any]
) -> None:
    record = chat({"content": "a", "reasoning_content": "b"}, {"content": "c", "reasoning_content": "d"})
    gates = {"max_lost_reasoning": None}  # chatml shows none
    pieces = built(tmp_path / "pieces", record, gates=gates, **several)
    whole = built(tmp_path / "whole", record, record, gates=gates)
    with caplog.at_level(logging.WARNING):
        row_of(whole, policy="last_turn")
        row_of(pieces, policy="assistant")
        assert not caplog.records
        row_of(pieces, policy="last_turn")
        assert "build with this policy to train it once a record" in caplog.text
        caplog.clear()
        row_of(pieces, policy="all")
    assert "trains what is repeated in every episode" in caplog.text
