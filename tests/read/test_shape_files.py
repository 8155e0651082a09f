"""Shapes of a user's own: a file with the names of fields, read by the scanner and one by one, and refused clearly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chatmill.core.conversation import Message, Role
from chatmill.errors import ConfigError
from chatmill.read.columns import scanner_names
from chatmill.read.conversations import ConversationFile
from chatmill.read.record_shape import Shape
from chatmill.read.shapes import find_shape, shape_key
from tests.read.three_ways import every_way

DIALOG = """
messages: dialog
role: speaker
content: text
roles: {Customer: user, agent: assistant}
system: instructions
id: ticket
"""
TURNS = {
    "turns": [
        {"key": "question", "role": "user"},
        {"key": "context", "role": "human", "optional": True},
        {"key": "answer", "role": "assistant"},
    ],
    "tools": "functions",
}
TALK = {"dialog": [{"speaker": "customer", "text": "é"}, {"speaker": "agent", "text": "a", "weight": 2}], "ticket": 7}
ANSWER = {"question": "q", "answer": "a", "functions": [{"name": "f"}], "id": "1"}


def shape_of(tmp_path: Path, text: str, name: str = "own.yaml") -> Shape:
    (tmp_path / name).write_text(text)
    return find_shape(str(tmp_path / name))


def test_a_list_of_messages(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, DIALOG)
    assert shape.name == "own"
    assert scanner_names(shape) is not None
    plain, told = every_way(shape, [TALK, {**TALK, "instructions": "Be kind.", "messages": "not these"}])
    assert plain.id == "7"
    assert plain.messages == (Message(Role.USER, "é"), Message(Role.ASSISTANT, "a", weight=2.0))
    assert told.messages == (Message(Role.SYSTEM, "Be kind."), *plain.messages)
    assert told.metadata == {"messages": "not these"}


def test_a_field_that_a_shape_names_has_no_other_meaning(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, "{messages: dialog, role: speaker, content: text, id: image, source: label}")
    talk = {"dialog": [{"speaker": "user", "text": "q"}, {"speaker": "assistant", "text": "a"}], "image": "7"}
    assert [found.id for found in every_way(shape, [talk, {**talk, "label": "web"}])] == ["7", "7"]


def test_turns(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, json.dumps(TURNS), "own.json")
    short, whole = every_way(shape, [ANSWER, {**ANSWER, "context": "c"}])
    q, c, a = Message(Role.USER, "q"), Message(Role.USER, "c"), Message(Role.ASSISTANT, "a")
    assert (short.messages, whole.messages) == ((q, a), (q, c, a))
    assert short.tools == ({"name": "f"},)


def test_a_file_of_conversations(tmp_path: Path) -> None:
    (tmp_path / "talks.jsonl").write_text(json.dumps(TALK) + "\n")
    shape_of(tmp_path, DIALOG)
    file = ConversationFile(tmp_path / "talks.jsonl", shape=str(tmp_path / "own.yaml"))
    assert [conversation.messages[0].content for conversation in file] == ["é"]
    assert file.shape.name == "own"


def test_what_a_file_says_is_enough_to_find_the_shape(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, DIALOG)
    key = shape_key(str(tmp_path / "own.yaml"))
    (tmp_path / "own.yaml").unlink()
    assert find_shape(key) is shape
    assert shape_key(key) == key
    assert shape_key("alpaca") == "alpaca"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "must hold a mapping with some of: name, messages, role"),
        ("messages: [", "is not YAML or JSON"),
        ("{}", "name either 'messages', the field with the list of messages, or 'turns'"),
        ("{messages: a, turns: [{key: b, role: user}]}", "name either 'messages'"),
        ("{messages: a, speaker: b}", "unknown key 'speaker'.*Known: name, messages, role, content"),
        ("{messages: 5}", "'messages' must be the name of a field"),
        ("{messages: a, role: 5}", "'role' must be the name of a field, found 5"),
        ("{messages: a, roles: {x: captain}}", "unknown role 'captain'.*system, developer, user, assistant, tool"),
        ("{messages: a, roles: [x]}", "'roles' must be a mapping"),
        ("{messages: a, id: a}", "the field 'a' has two meanings"),
        ("{messages: a, role: text, content: text}", "the field 'text' has two meanings"),
        ("{messages: a, role: name}", "'role' cannot be 'name', which means something else"),
        ("{turns: [{key: a}]}", "unknown role None"),
        ("{turns: [{role: user}]}", "needs a 'key'"),
        ("{turns: [{key: a, role: user, optional: true}]}", "all 'turns' are optional"),
        ("{turns: [{key: a, role: user, x: 1}]}", "unknown key of a turn 'x'.*key, role, optional"),
        ("{turns: [{key: a, role: user, optional: 1}]}", "must be true or false"),
        ("{turns: {}}", "name either"),
        ("{turns: {a: 1}}", "'turns' must be a list"),
    ],
)
def test_a_file_that_cannot_be_a_shape(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        shape_of(tmp_path, text)
    assert str(tmp_path / "own.yaml") in str(caught.value)


def test_names_that_are_no_shape(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no shape file"):
        find_shape(str(tmp_path / "missing.yaml"))
    with pytest.raises(ConfigError, match=r"unknown shape 'opanai'.*'openai'.*path of a \.yaml or \.json file"):
        find_shape("opanai")
    with pytest.raises(ConfigError, match="must be JSON"):
        find_shape("{x")
    with pytest.raises(ConfigError, match="unknown key"):
        find_shape('{"x": 1}')
