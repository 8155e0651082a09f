"""Field maps: what they mean, what they refuse, and the map that an unknown shape suggests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler.first_recipe import look_at, recipe_text
from chatmill.compiler.recipe import recipe_of
from chatmill.core.conversation import Message, Role
from chatmill.errors import ConfigError, RecordError
from chatmill.read.conversations import ConversationFile
from chatmill.read.field_maps import map_of, map_text, parse_map
from chatmill.read.shapes import detect_shape, find_shape
from tests.read.three_ways import every_way

Q, A = Message(Role.USER, "q"), Message(Role.ASSISTANT, "a")


@pytest.mark.parametrize(
    ("words", "record", "messages"),
    [
        (["user=ask", "assistant=say"], {"ask": "q", "say": "a"}, (Q, A)),
        (["assistant=say", "system=rules", "user=ask"], {"ask": "q", "say": "a"}, (A, Q)),
        (["user=u", "assistant=v", "system=s"], {"u": "q", "v": "a", "s": "x"}, (Message(Role.SYSTEM, "x"), Q, A)),
        (["user=ask+more", "assistant=say"], {"ask": "q", "more": "m", "say": "a"}, (Message(Role.USER, "q\nm"), A)),
        (["user=ask+more", "assistant=say"], {"ask": "q", "say": "a"}, (Q, A)),
        (["user=u", "assistant=v", "user=w", "assistant=x"], {"u": "q", "v": "a", "w": "q", "x": "a"}, (Q, A, Q, A)),
        (["user=u", "user=w", "assistant=v"], {"u": "q", "w": "q", "v": "a"}, (Q, Q, A)),
        (["messages=talk"], {"talk": [{"role": "user", "content": "q"}, {"role": "gpt", "content": "a"}]}, (Q, A)),
        (["user=u", "assistant=v", "reasoning=w"], {"u": "q", "v": "a", "w": "hm"}, (Q, A._replace(reasoning="hm"))),
        (["user=u", "assistant=v", "reasoning=w"], {"u": "q", "v": "a", "w": ""}, (Q, A)),
        (
            ["messages=talk", "role=who", "content=what", "user=customer", "assistant=agent"],
            {"talk": [{"who": "customer", "what": "q"}, {"who": "agent", "what": "a"}]},
            (Q, A),
        ),
    ],
)  # fmt: skip
def test_what_a_map_reads(words: list[str], record: dict[str, Any], messages: tuple[Message, ...]) -> None:
    shape = find_shape(parse_map(words))
    (found,) = every_way(shape, [record])
    assert found.messages == messages
    key = find_shape(parse_map(words)).key
    assert find_shape(key) is shape, "a dataset keeps the map as a text"
    assert map_text(map_of(key)) == key


def test_a_field_that_a_map_names_has_no_other_meaning() -> None:
    shape = find_shape({"messages": "dialog", "role": "speaker", "content": "text", "id": "image", "source": "label"})
    talk = {"dialog": [{"speaker": "user", "text": "q"}, {"speaker": "assistant", "text": "a"}], "image": "7"}
    assert [found.id for found in every_way(shape, [talk, {**talk, "label": "web"}])] == ["7", "7"]


def test_names_that_are_no_shape() -> None:
    for name, message in (("opanai", "unknown shape 'opanai'.*'openai'"), ("{x", "must be a field map in JSON"),
                          ('{"x": 1}', "unknown name in a map 'x'")):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            find_shape(name)


def test_id_source_and_tools_can_be_mapped() -> None:
    words = ["user=ask", "assistant=say", "id=key", "source=origin", "tools=functions"]
    record = {"ask": "q", "say": "a", "key": 7, "origin": "web", "functions": [{"name": "f"}]}
    (found,) = every_way(find_shape(parse_map(words)), [record])
    assert (found.id, found.source, found.tools) == ("7", "web", ({"name": "f"},))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["user"], "a field map is NAME=FIELD"),
        (["user="], "a field map is NAME=FIELD"),
        (["humam=x"], "unknown name in a map"),
        (["user=x"], "a map needs assistant=FIELD"),
        (["id=x"], "a map needs assistant=FIELD"),
        (["user=x", "assistant=x"], "'x' has two meanings"),
        (["user=x", "assistant=y", "role=z"], "needs messages=FIELD next to it"),
        (["user=x", "assistant=y", "assistant=z"], "needs as many for the user, found 1"),
        (["messages=x", "messages=y"], "is one field, found x, y"),
        (["messages=x", "reasoning=y"], "have theirs inside"),
        (["messages=x", "id=x"], "'x' has two meanings"),
        (["messages=x", "role=text", "content=text"], "'text' has two meanings"),
        (["messages=x", "role=name"], "'role' cannot be 'name', which means something else"),
    ],
)
def test_a_map_that_means_nothing_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        map_text(parse_map(words))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"no": 1, "user_says": "q", "bot_reply": "a"}, "--shape user=user_says --shape assistant=bot_reply"),
        ({"The question": "q", "The answer": "a"}, "--shape 'user=The question' --shape 'assistant=The answer'"),
        ({"a": "q", "b": 3}, "--shape user=FIELD --shape assistant=FIELD"),
    ],
)
def test_an_unknown_shape_shows_keys_and_the_map_that_would_read_it(record: dict[str, Any], words: str) -> None:
    """More of these are in the table of docs/records.md."""
    with pytest.raises(RecordError) as caught:
        detect_shape([record], "f.jsonl")
    assert caught.value.code == "unknown_shape"
    assert ", ".join(record) in str(caught.value)
    assert words in str(caught.value)


def test_a_map_in_python_and_in_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"ask it": "q", "say": "a"}) + "\n")
    fields = {"user": "ask it", "assistant": "say"}
    assert next(iter(ConversationFile(path, shape=fields))).messages == (Q, A)
    options = {"tokenizer": "bytes", "template": "chatml"}
    recipe = recipe_of({"sources": [{"path": str(path), "map": fields}], **options})
    assert recipe.sources[0].shape == map_text(fields)
    assert recipe_of(recipe.as_json()) == recipe
    with pytest.raises(ConfigError, match="'map' says what the fields are called, and so does 'shape'"):
        recipe_of({"sources": [{"path": "x", "map": fields, "shape": "openai"}], **options})
    with pytest.raises(ConfigError, match="unknown name in a map 'usr'"):
        recipe_of({"sources": [{"path": "x", "map": {"usr": "x"}}], **options})


def test_init_writes_the_map_into_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"ask it": "q", "say": "a"}) + "\n")
    shape = map_text({"user": "ask it", "assistant": "say"})
    text = recipe_text(look_at([str(path)], shape=shape))
    assert 'map: {"user": "ask it", "assistant": "say"}' in text
