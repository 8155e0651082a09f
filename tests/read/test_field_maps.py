"""What recipes say of records: field maps, the map that an unknown shape suggests, and expressions that choose."""

from __future__ import annotations

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
from chatmill.read.where import parse_where
from chatmill.store.episodes import EpisodeDataset
from tests.chats import chat_record
from tests.compiler.builds import CHATML, proved, write_jsonl
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
    assert find_shape(shape.key) is shape, "a dataset keeps the map as a text"
    assert map_text(map_of(shape.key)) == shape.key


def test_id_source_and_tools_can_be_mapped_and_what_a_map_names_has_no_other_meaning() -> None:
    words = ["user=ask", "assistant=say", "id=key", "source=origin", "tools=functions"]
    record = {"ask": "q", "say": "a", "key": 7, "origin": "web", "functions": [{"name": "f"}]}
    (found,) = every_way(find_shape(parse_map(words)), [record])
    assert (found.id, found.source, found.tools) == ("7", "web", ({"name": "f"},))
    shape = find_shape({"messages": "dialog", "role": "speaker", "content": "text", "id": "image", "source": "label"})
    talk = {"dialog": [{"speaker": "user", "text": "q"}, {"speaker": "assistant", "text": "a"}], "image": "7"}
    assert [found.id for found in every_way(shape, [talk, {**talk, "label": "web"}])] == ["7", "7"]


def test_names_that_are_no_shape() -> None:
    for name, message in (("opanai", "unknown shape 'opanai'.*'openai'"), ("{x", "must be a field map in JSON"),
                          ('{"x": 1}', "unknown name in a map 'x'")):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            find_shape(name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["user"], "a field map is NAME=FIELD"),
        (["humam=x"], "unknown name in a map"),
        (["user=x"], "a map needs assistant=FIELD"),
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


def test_a_map_in_python_in_a_recipe_and_in_what_init_writes(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"ask it": "q", "say": "a"}])
    fields = {"user": "ask it", "assistant": "say"}
    assert next(iter(ConversationFile(path, shape=fields))).messages == (Q, A)
    recipe = recipe_of({"sources": [{"path": str(path), "map": fields}], **CHATML})
    assert recipe.sources[0].shape == map_text(fields)
    assert recipe_of(recipe.as_json()) == recipe
    text = recipe_text(look_at([str(path)], shape=map_text(fields)))
    assert 'map: {"user": "ask it", "assistant": "say"}' in text
    for source, message in (
        ({"map": fields, "shape": "openai"}, "'map' says what the fields are called, and so does 'shape'"),
        ({"map": {"usr": "x"}}, "unknown name in a map 'usr'"),
        ({"where": "reward >="}, r"sources\[0\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            recipe_of({"sources": [{"path": "x", **source}], **CHATML})


INFO = {"error": None, "deep": {"x": 2}}
RECORD = {"reward": 0.5, "resolved": True, "n": 1, "name": "a b", "none": None, "info": INFO}
TRUE = """reward >= 0.5; resolved == true; resolved; n == 1.0; 0 < reward < 1; name == 'a b'; name < 'b'; none != 1;
info.error == null; info.deep.x == 2; missing == null; not missing > 0; reward > -1; reward.x == null;
resolved and (reward > 1 or n == 1)"""
FALSE = "reward > 0.5; n; n == true; missing > 0; name > 0; n != 1; resolved and reward > 1; not resolved; null; 'true'"
NONE = """reward >=; f(x); __import__('os'); a[0]; a + 1; lambda: 1; x if y else z; a in b; a is b; [1]; b'x' == a;
f'{a}'; (a := 1); 1j == a; ...; -a; ~1; ("""


def parts(text: str) -> list[str]:
    return [one.strip() for one in text.split(";")]


@pytest.mark.parametrize("text", [*parts(TRUE), *parts(FALSE)])
def test_expressions(text: str) -> None:
    assert parse_where(text).accepts(RECORD) is (text in parts(TRUE))
    assert not parse_where(text).accepts([])


@pytest.mark.parametrize("text", [*parts(NONE), "(" * 400 + "a" + ")" * 400, "not " * 400 + "a", ""])
def test_nothing_else_is_an_expression(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_where(text)


def test_a_build_uses_the_records_for_which_it_is_true(tmp_path: Path) -> None:
    turns = ("user", "q"), ("assistant", "a")
    records = [chat_record(*turns, id=f"r{number}", reward=number / 10, n=[1]) for number in range(10)]
    records[2]["messages"] = []  # which nobody asks for
    records[8]["messages"] = []
    path = write_jsonl(tmp_path / "chats.jsonl", records)
    recipe = {"sources": [{"path": str(path), "where": "reward >= 0.5"}], **CHATML}
    ledger = proved({**recipe, "on_error": "quarantine", "gates": {"records_left_out": None}}, tmp_path / "built")
    assert [episode.record_id for episode in EpisodeDataset(tmp_path / "built")] == ["r5", "r6", "r7", "r9"]
    assert ledger.reasons("skipped", "quarantined") == {"where": 5, "no_messages": 1}
    assert {note for _, note in ledger.notes if "unused" in note} == {"unused_field n"}
