"""A record in several rows: whatever a policy trains of it is trained in one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chatmill.core.ledger import Ledger
from chatmill.store.episodes import EpisodeDataset
from tests.cli.run import here
from tests.compiler.builds import plain_recipe, proved, talk, write_jsonl

SAID = ["first question", "first answer", "second question", "second answer", "third question", "third answer"]
SHORT = ["one", "first", "two", "second", "three", "third"]


def _record(*more: str) -> dict[str, Any]:
    messages = [{**message, "weight": 1} for message in talk(*SAID, *more)]
    for message in messages[1::2]:
        message["reasoning_content"] = f"reasons of the {message['content']}"
    return {"id": "one", "messages": messages}


def _built(home: Path, records: list[dict[str, Any]], name: str = "built", **recipe: Any) -> Ledger:
    path = write_jsonl(home / "chats.jsonl", records)
    return proved(plain_recipe(path, **recipe), home / name)


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
    notes = _built(tmp_path, [_record(), _record()], template="qwen3", policy=policy).all_notes()
    assert (notes["rows_added"], notes["untrained_terminators"]) == (4, 0)
    everything = "".join(_trained(tmp_path / "built")[:3])
    for i, text in enumerate(SAID):
        assert everything.count(text) == (2 if i % 2 else policy in ("all", "per_message")), text  # answer and reasons
    headers = policy in ("all", "post_training")
    assert everything.count("#assistant\n") == (3 if headers else 0)
    assert everything.count("#user\n") == (3 if policy == "all" else 0)
    shown = here("inspect", tmp_path / "chats.jsonl", "-t", "bytes", "-T", "qwen3", "-p", policy, "-n", "1", "--json")
    rows = [json.loads(line) for line in shown.stdout.splitlines()]
    assert sum(row["trained"] for row in rows) == len(everything)


@pytest.mark.parametrize("template", ["qwen3", "chatml"])
@pytest.mark.parametrize("policy", ["all", "per_message"])
def test_what_others_say_behind_the_last_answer_is_trained_too(tmp_path: Path, policy: str, template: str) -> None:
    _built(tmp_path, [_record("fourth question")], template=template, policy=policy)
    everything = "".join(_trained(tmp_path / "built"))
    answers = 2 if template == "qwen3" else 1
    for i, text in enumerate([*SAID, "fourth question"]):
        assert everything.count(text) == (answers if i % 2 else 1), text


# The formats that are written for Chatmill keep what a recipe and its records ask for, or refuse it.


@pytest.mark.parametrize("template", ["token_native", "markers", "chatml"])
def test_expand_last_trains_the_last_answer_alone(tmp_path: Path, template: str) -> None:
    records = [{"messages": talk(*SHORT)} for _ in range(2)]
    records[1]["messages"][-1]["train"] = False
    _built(tmp_path, records, "last", template=template, expand="last")
    assert [one.replace("#", "") for one in _trained(tmp_path / "last")] == ["third", "second"]
    _built(tmp_path, records, "all", template=template)
    assert [one.replace("#", "") for one in _trained(tmp_path / "all")] == ["firstsecondthird", "firstsecond"]


@pytest.mark.parametrize("template", ["token_native", "chatml"])
def test_options_of_records_that_a_template_does_not_read_are_refused(tmp_path: Path, template: str) -> None:
    options: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {}, {"effort": "high"}, {}]
    records = [{"id": str(i), "messages": talk(*SHORT), "chat_template_kwargs": one} for i, one in enumerate(options)]
    ledger = _built(tmp_path, records, template=template, on_error="quarantine")
    assert ledger.reasons("quarantined") == {"unknown_option": 2}
    assert [episode.record_id for episode in EpisodeDataset(tmp_path / "built", "train")] == ["0", "2", "4"]
    rejected = (tmp_path / "built" / "rejected.jsonl").read_text().splitlines()
    assert "'enable_thinking'" in rejected[0]
    assert "'effort'" in rejected[1]
