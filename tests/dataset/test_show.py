"""What a notebook and a prompt show of conversations, tokens and datasets: short, escaped, and complete in numbers."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import chatmill
from chatmill.read.record_shape import conversation_of
from chatmill.read.shapes import find_shape
from tests.compiler.builds import talk
from tests.notebooks import run, stored
from tests.pages import ROOT

EVIL = "<script>alert(1)</script> <|im_end|>"
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
RECORD: dict[str, Any] = {
    "id": "evil <b>",
    "tools": [{"type": "function", "function": {"name": "add"}}],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": EVIL},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4. " + "Really, it is. " * 5, "reasoning_content": "2+2"},
    ],
}
OPTIONS: dict[str, Any] = {"template": "chatml", "add_control_tokens": True}


@pytest.fixture(scope="module")
def data() -> Any:
    spoken = [message for message in RECORD["messages"] if message["content"]]
    gates = {"max_lost_reasoning": None}  # chatml shows none
    return chatmill.compile(
        [{**RECORD, "messages": spoken, "tools": None}], "bytes", max_length=4096, gates=gates, **OPTIONS
    )


def test_conversations_tokens_and_rendered_show_how_they_begin_and_their_counts() -> None:
    conversation = conversation_of(RECORD, find_shape("openai"), where="chats.jsonl:1", source="chats")
    assert repr(conversation) == (
        f"Conversation('evil <b>'; 5 messages: system 'Be brief.', user {EVIL!r}, assistant 'add({{\"a\": 2}})', "
        "tool '4', 1 more; 1 tool)"
    )
    assert repr(chatmill.Conversation(())) == "Conversation(0 messages: )"
    tokenizer = chatmill.load_tokenizer("bytes", control_tokens=["<|im_start|>", "<|im_end|>"])
    nobody = chatmill.Conversation((chatmill.Message(chatmill.Role.USER, "2+2?"),), where="chats.jsonl:2")
    rendered = chatmill.render_conversations([nobody], "chatml", tokenizer)
    count = len(rendered.tokens.ids)
    assert repr(rendered.tokens) == f"Tokens(1 conversation, {count} tokens)"
    assert repr(rendered) == f"Rendered(1 conversations, 1 documents, {count} tokens)"
    both = chatmill.render_conversations([nobody, conversation], "chatml", tokenizer, collect_failures=True)
    assert len(both.failed) == 1
    assert "1 refused by the template" in repr(both)
    assert "first refused: chats.jsonl:1" in repr(both)


def test_an_episode_is_shown_with_what_is_trained_marked_and_fits(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    shown = repr(data[0])
    assert shown.startswith("episode 0 of train · evil <b> · ")
    assert "«<|im_start|>»user" in shown
    assert " ▌ It is 4. Really" in shown
    assert "\x1b" not in shown
    assert 70 < max(map(len, shown.split("\n"))) <= 80, "a pipe has 80 columns, and they are used"
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, repr(data[0]).split("\n"))) <= 60
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in repr(data[0])
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in repr(data[0])


def test_an_episode_in_a_notebook_is_escaped_and_cut_with_a_word(data: Any) -> None:
    page = data[0]._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "background:rgba(47,168,102,.22)" in page
    assert 'title="assistant.content, ' in page
    assert "more tokens" not in page
    assert "more tokens" in chatmill.compile([talk("u" * 5000, "a")], "bytes", **OPTIONS)[0]._repr_html_()


def test_arrays_of_an_episode_are_those_of_the_dataset(data: Any) -> None:
    episode, stored_one = data[0], data.episodes[0]
    assert episode.ids.tolist() == stored_one.ids.tolist()
    assert len(episode) == len(episode.kinds) == len(episode.labels)
    assert (episode.labels >= 0).sum() == episode.trained == (episode.weights > 0).sum()
    assert (episode.record_id, episode.source) == ("evil <b>", "records")
    assert episode.text.count("<|im_end|>") == 5  # four ends of messages, and one that a user spelled


def test_a_dataset_its_stats_and_a_stored_split_are_tables(data: Any, tmp_path: Path) -> None:
    assert repr(data).splitlines()[0] == "Dataset: 1 record read, 1 built, 0 left out"
    assert "  model bytes, template chatml, policy assistant, max_length 4,096, overflow error" in repr(data)
    assert "<table" in data._repr_html_()
    tokens = data.manifest["splits"]["train"]["tokens"]
    assert f">{tokens:,}<" in data._repr_html_()
    assert "trained share per role" in repr(data.stats())
    assert repr(data.stats()).startswith("train: 1 episode, ")
    data.save(tmp_path / "built")
    split = chatmill.EpisodeDataset(tmp_path / "built", "train")
    assert repr(split).endswith(f"1 episodes, {tokens:,} tokens)")


def test_the_notebook_runs_and_shows_what_its_file_says(tmp_path: Path) -> None:
    """`python -m tests.notebooks` writes it."""
    notebook = ROOT / "examples" / "compile.ipynb"
    shutil.copytree(ROOT / "examples" / "data", tmp_path / "data")
    found = run(notebook, tmp_path)
    for form in ("text/plain", "text/html"):
        assert [cell.get(form) for cell in found] == [cell.get(form) for cell in stored(notebook)]
    shown = "".join(cell.get("text/plain", "") for cell in found)
    assert "left out" in shown
    assert "trained tokens lost by overflow" in shown
    assert "<table" in found[1]["text/html"]
