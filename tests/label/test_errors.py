"""Policies that do not train calls whose result is an error."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.compiler.run import run_build
from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.conversations import Conversations
from chatmill.core.ledger import Ledger
from chatmill.errors import ConfigError
from chatmill.label.errors import ErrorRule
from chatmill.label.presets import find_policy
from chatmill.prove.conversations import without_failed
from chatmill.prove.verify import verify
from chatmill.store.episodes import EpisodeDataset
from chatmill.tokenizer.load import load_tokenizer
from tests.compiler.builds import OPEN_GATES, write_jsonl

RULE = ErrorRule(fields={"is_error": True, "code": 1}, begins=("Error:", "Traceback"))
CALLS = st.lists(st.sampled_from([None, "a", "b"]), max_size=2).map(
    lambda ids: tuple(ToolCall("look", "{}", one) for one in ids)
)
ANSWERS = st.builds(
    lambda calls, weight: Message(Role.ASSISTANT, "x", tool_calls=calls, weight=weight),
    CALLS,
    st.sampled_from([None, 0.0, 0.5]),
)
RESULTS = st.builds(
    lambda text, called, extra: Message(Role.TOOL, text, tool_call_id=called, extra=extra),
    st.sampled_from(["fine", "Error: no", "an Error:", "Err", ""]),
    st.sampled_from([None, "a", "b"]),
    st.sampled_from([{}, {"is_error": True}, {"is_error": 1}, {"code": 1}, {"code": True}, {"is_error": False}]),
)


@settings(max_examples=600)  # quick ones
@given(st.lists(st.lists(ANSWERS | RESULTS, max_size=7), min_size=1, max_size=4))
def test_columns_and_single_messages_agree(chats: list[list[Message]]) -> None:
    conversations = [Conversation(tuple(messages)) for messages in chats]
    found, counts = RULE.without_failed(Conversations.of(conversations))
    expected = [without_failed(one, RULE) for one in conversations]
    assert [one.messages for one in found[:]] == [one.messages for one in expected]
    pairs = zip(conversations, expected, strict=True)
    changed = [sum(map(lambda a, b: a.weight != b.weight, one.messages, other.messages)) for one, other in pairs]
    assert counts.tolist() == changed


def run(rng: random.Random, name: str) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    late: list[str] = []  # calls whose results come after the next call
    for step in range(rng.randint(1, 5)):
        ids = [f"c{step}", f"d{step}"][: rng.randint(1, 2)]
        function = {"name": "look", "arguments": {"at": step}}
        calls = [{"id": one, "type": "function", "function": function} for one in ids]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        for one in [*late, *ids[:1]]:
            failed = rng.random() < 0.4
            result = {"role": "tool", "tool_call_id": one, "content": "no" if failed else "yes"}
            messages.append({**result, **({"is_error": failed} if failed or rng.random() < 0.5 else {})})
        late = ids[1:]
    return {"id": name, "messages": [*messages, {"role": "assistant", "content": "done"}]}


@pytest.mark.parametrize("more", [{}, {"history": {"observations": 1}}])
def test_calls_that_failed_are_context(tmp_path: Path, more: dict[str, Any]) -> None:
    rng = random.Random(1)
    records = [run(rng, f"r{number}") for number in range(20)]
    path = write_jsonl(tmp_path / "runs.jsonl", records)
    recipe = {"sources": [{"path": str(path), **more}], "tokenizer": "bytes", "template": "qwen3", "gates": OPEN_GATES}
    made = run_build({**recipe, "add_control_tokens": True, "policy": "no_errors"}, tmp_path / "built", workers=0)
    results = [(one["id"], message) for one in records for message in one["messages"] if message.get("is_error")]
    failed = len({(name, message["tool_call_id"][1:]) for name, message in results})
    ledger = Ledger.from_json(made.manifest["ledger"])
    assert ledger.total_notes("answers_whose_calls_failed") == failed > 10
    assert not any("is_error" in note for note in ledger.all_notes())
    assert verify(tmp_path / "built", deep=True).passed
    stop = load_tokenizer("bytes", control_tokens=["<|im_start|>", "<|im_end|>"])
    trained = 0
    for episode in EpisodeDataset(tmp_path / "built"):
        assert episode.weights is not None
        trained += int(((episode.ids == stop.control_ids["<|im_end|>"]) & (episode.weights > 0)).sum())
    answers = sum(message["role"] == "assistant" for one in records for message in one["messages"])
    assert trained == answers - failed


def test_a_rule_in_a_file_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    table = {"weights": {"assistant.content": 1.0}}
    path.write_text(json.dumps({**table, "errors": {"begins": ["Error:"]}}))
    assert find_policy(path).errors == ErrorRule(begins=("Error:",))
    for wrong in ([], {"begin": []}, {"begins": [""]}, {"fields": "is_error"}):
        path.write_text(json.dumps({**table, "errors": wrong}))
        with pytest.raises(ConfigError, match="errors"):
            find_policy(path)
