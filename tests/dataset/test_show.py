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


@pytest.fixture(scope="module")
def conversation() -> Any:
    return conversation_of(RECORD, find_shape("openai"), where="chats.jsonl:1", source="chats")


@pytest.fixture(scope="module")
def data() -> Any:
    spoken = [message for message in RECORD["messages"] if message["content"]]
    record = {"id": RECORD["id"], "messages": spoken}
    gates = {"max_lost_reasoning": None}  # chatml shows none
    return chatmill.compile([record], "bytes", template="chatml", add_control_tokens=True, max_length=4096, gates=gates)


def test_a_conversation_shows_how_its_messages_begin(conversation: Any) -> None:
    assert repr(conversation) == (
        f"Conversation('evil <b>'; 5 messages: system 'Be brief.', user {EVIL!r}, assistant 'add({{\"a\": 2}})', "
        "tool '4', 1 more; 1 tool)"
    )
    assert repr(chatmill.Conversation(())) == "Conversation(0 messages: )"


def test_tokens_and_rendered_show_their_counts(conversation: Any) -> None:
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


def test_an_episode_is_shown_with_what_is_trained_marked(data: Any) -> None:
    shown = repr(data[0])
    assert shown.startswith("episode 0 of train · evil <b> · ")
    assert "«<|im_start|>»user" in shown
    assert " ▌ It is 4. Really" in shown
    assert "\x1b" not in shown
    page = data[0]._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "background:rgba(47,168,102,.22)" in page
    assert 'title="assistant.content, ' in page
    assert data[0].text.count("<|im_end|>") == 5  # four ends of messages, and one that a user spelled


def test_a_terminal_gets_colours_unless_it_wants_none(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in repr(data[0])
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in repr(data[0])


def test_a_long_episode_is_cut_in_a_notebook_and_says_so() -> None:
    long = [{"role": "user", "content": "u" * 5000}, {"role": "assistant", "content": "a"}]
    data = chatmill.compile([long], "bytes", template="chatml", add_control_tokens=True)
    assert "more tokens" in data[0]._repr_html_()


def test_arrays_of_an_episode_are_those_of_the_dataset(data: Any) -> None:
    episode, stored = data[0], data.episodes[0]
    assert episode.ids.tolist() == stored.ids.tolist()
    assert len(episode) == len(episode.kinds) == len(episode.labels)
    assert (episode.labels >= 0).sum() == episode.trained == (episode.weights > 0).sum()
    assert (episode.record_id, episode.source) == ("evil <b>", "records")


def test_a_dataset_and_a_stored_split_are_tables_in_a_notebook(data: Any, tmp_path: Path) -> None:
    assert repr(data).splitlines()[0] == "Dataset: 1 record read, 1 built, 0 left out"
    assert "  model bytes, template chatml, policy assistant, max_length 4,096, overflow error" in repr(data)
    assert "<table" in data._repr_html_()
    tokens = data.manifest["splits"]["train"]["tokens"]
    assert f">{tokens:,}<" in data._repr_html_()
    data.save(tmp_path / "built")
    split = chatmill.EpisodeDataset(tmp_path / "built", "train")
    assert repr(split).endswith(f"1 episodes, {tokens:,} tokens)")


def test_stats_show_the_tables_of_the_command(data: Any) -> None:
    shown = repr(data.stats())
    assert "trained share per role" in shown
    assert shown.splitlines()[0].startswith("train: 1 episode, ")


def test_an_episode_fits_where_it_is_printed(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = repr(data[0]).split("\n")
    assert 70 < max(map(len, lines)) <= 80, "a pipe has 80 columns, and they are used"
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, repr(data[0]).split("\n"))) <= 60


# The notebook of the examples runs, and its file shows what its cells show (`python -m tests.notebooks` writes it).


NOTEBOOK = ROOT / "examples" / "compile.ipynb"


def test_the_notebook_runs_and_shows_what_its_file_says(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "data", tmp_path / "data")
    found = run(NOTEBOOK, tmp_path)
    assert [cell.get("text/plain") for cell in found] == [cell.get("text/plain") for cell in stored(NOTEBOOK)]
    assert [cell.get("text/html") for cell in found] == [cell.get("text/html") for cell in stored(NOTEBOOK)]
    shown = "".join(cell.get("text/plain", "") for cell in found)
    assert "left out" in shown
    assert "trained tokens lost by overflow" in shown
    assert "<table" in found[1]["text/html"]
