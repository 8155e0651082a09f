"""Fields of records: maps of them, expressions that choose by them, those that are not used and those refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import chatmill
from chatmill.cli.app import app
from chatmill.compiler.first_recipe import look_at, recipe_text
from chatmill.compiler.recipe import recipe_of
from chatmill.compiler.run import run_build
from chatmill.core.conversation import Message, Role
from chatmill.core.conversations import unused_fields, unused_sentence
from chatmill.dataset.compile import compile
from chatmill.errors import ConfigError, RecordError, UnknownNameError
from chatmill.read.conversations import ConversationFile, read_conversations
from chatmill.read.field_maps import map_of, map_text, parse_map
from chatmill.read.shapes import detect_shape, find_shape
from chatmill.read.where import parse_where
from chatmill.store.episodes import EpisodeDataset
from tests.chats import chat_record
from tests.compiler.builds import CHATML, proved, talk, write_jsonl
from tests.read.three_ways import as_lines, every_way

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
        ({"no": 1, "Question": "q", "Reply": "a"}, "--shape user=Question --shape assistant=Reply"),
        ({"user_says": "q", "bot_reply": "a"}, "--shape user=FIELD --shape assistant=FIELD"),
        ({"question": "q", "other": "a"}, "--shape user=FIELD --shape assistant=FIELD"),
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
    text = recipe_text(look_at([str(path)], tokenizer="bytes", shape=map_text(fields)))
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


PAIR = talk("q", "a")
FUNCTION = {"name": "f", "parameters": {}}
STORED = {"type": "function", "function": FUNCTION}


def record(*before: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [*before, *PAIR], **fields}


def said(conversation: Any) -> list[str]:
    return [message.content for message in conversation.messages]


def test_unused_fields_are_counted_by_source_and_name() -> None:
    records = [
        record(meta=5, nothing=None, empty=[], none={}, text=""),
        record(label=3, meta={"a": 1}, naïve=1),
        record(label=True, id="x", source="web", **{'a "b"': 1}),
        {"messages": [{**PAIR[0], "time": 1}, {**PAIR[1], "time": None}], "meta": 1},
    ]
    found, errors = as_lines(records, find_shape("openai"))
    assert not errors
    counts = {"meta": 3, "label": 1, "naïve": 1, "messages[].time": 1}
    assert found.unused == {("web", 'a "b"'): 1} | {("s", name): count for name, count in counts.items()}
    assert found.take(found.offsets[:1]).unused == {}
    assert unused_sentence({}) == ""


OTHER = talk("another question", "a")


@pytest.mark.parametrize(
    ("shape", "one", "texts", "unused"),
    [
        ("openai", {"messages": PAIR, "conversations": OTHER}, ["q", "a"], {"conversations": 1}),
        ("openai", {"conversations": OTHER, "messages": PAIR}, ["q", "a"], {"conversations": 1}),
        ("openai", {"messages": PAIR, "conversations": []}, ["q", "a"], {}),
        ("openai", {"messages": None, "conversations": PAIR}, ["q", "a"], {}),
        ("harmony", {"messages_json": json.dumps(record()), "messages": OTHER}, ["q", "a"], {"messages": 1}),
        ("openai", record(system="be kind"), ["be kind", "q", "a"], {}),
        ("openai", record({"role": "system", "content": "s"}, system="s"), ["s", "q", "a"], {}),
        ("prompt_completion", {"system": "s", "prompt": "p", "completion": "c"}, ["s", "p", "c"], {}),
    ],
)
def test_no_text_is_lost_without_a_word(shape: str, one: Any, texts: list[str], unused: dict[str, int]) -> None:
    (found,) = every_way(find_shape(shape), [one])
    assert said(found) == texts
    assert unused_fields([found]) == unused


def test_functions_and_reasoning_have_a_meaning() -> None:
    records = [record(functions=[FUNCTION]), {"messages": [PAIR[0], {**PAIR[1], "reasoning": "because"}]}]
    with_tools, with_reasoning = every_way(find_shape("openai"), records)
    assert with_tools.tools == (STORED,)
    assert with_reasoning.messages[1].reasoning == "because"
    assert not unused_fields([with_tools, with_reasoning])


@pytest.mark.parametrize(
    ("bad", "code", "way_out"),
    [
        (record(images=["a.png"]), "images_differ", "1 picture in 'images'"),
        ({"messages": [{**PAIR[0], "images": ["a.png"]}, PAIR[1]]}, "non_text_part", r"quarantine"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, PAIR[1]]}, "images_differ", "1 place for"),
        (record(label=False), "label_false", "--set preferences=chosen"),
        (record(tools=[STORED], functions=[FUNCTION]), "bad_tools", "keep one"),
        (record({"role": "system", "content": "t"}, system="s"), "system_twice", "keep one"),
        ({"messages": [PAIR[0], {**PAIR[1], "reasoning": "a", "thinking": "b"}]}, "reasoning_twice", "keep one"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_way_out(bad: dict[str, Any], code: str, way_out: str) -> None:
    found, [error] = as_lines([record(), bad, record(images=[], label=None)], find_shape("openai"))
    assert len(found) == 2
    assert (error.code, error.where) == (code, "f:2")
    assert way_out in str(error)


PAIRS = [
    {"prompt": "q", "chosen": "a", "rejected": "b"},
    {"prompt": [PAIR[0]], "chosen": [PAIR[1]], "rejected": [PAIR[1]], "score": 3},
    {"prompt": "q", "chosen": PAIR, "rejected": PAIR},
    {"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "a"}, "rejected": {}},
    {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
]


def test_pairs_train_the_chosen_answer_on_request(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "pairs.jsonl", PAIRS)
    with pytest.raises(RecordError, match=r"pairs.jsonl:1, field chosen: .*--set preferences=pairs"):
        next(read_conversations(path))
    found = list(ConversationFile(path, preferences="chosen"))
    assert list(map(said, found)) == [["q", "a"]] * 5
    assert unused_fields(found) == {"score": 1}
    with pytest.raises(UnknownNameError, match="Known: chosen"):
        ConversationFile(path, preferences="rejected")
    alone = write_jsonl(tmp_path / "alone.jsonl", [{"chosen": "a", "rejected": "b"}])
    with pytest.raises(RecordError, match="nothing says what 'chosen' answers"):
        list(ConversationFile(alone, preferences="chosen"))


@pytest.mark.parametrize(
    ("pair", "wanted"),
    [
        ({"prompt": "q", "messages": [PAIR[0]], "chosen": "a"}, ["q", "a"]),
        ({"prompt": "q", "chosen": PAIR, "messages": PAIR}, ["q", "a"]),
        ({"prompt": "q", "chosen": [PAIR[1], {**PAIR[0], "content": "q2"}, PAIR[1]]}, ["q", "a", "q2", "a"]),
        ({"system": "s", "question": "q", "chosen": "a"}, ["s", "q", "a"]),
        ({"system": "s", "chosen": PAIR}, ["s", "q", "a"]),
        ({"prompt": "other", "messages": [PAIR[0]], "chosen": "a"}, "prompt_twice"),
        ({"prompt": "other", "chosen": PAIR}, "prompt_twice"),
        ({"instruction": "other", "prompt": "q", "chosen": "a"}, "prompt_twice"),
        ({"system": "s", "chosen": [{"role": "system", "content": "t"}, *PAIR]}, "system_twice"),
    ],
)
def test_what_a_chosen_answer_answers_is_said_once(pair: dict[str, Any], wanted: list[str] | str) -> None:
    found, errors = as_lines([{"rejected": "b", **pair}], find_shape("chosen"))
    if isinstance(wanted, str):
        assert [error.code for error in errors] == [wanted]
        assert "keep one" in str(errors[0])
    else:
        assert not errors
        assert said(found[0]) == wanted
        assert not found.unused


def test_builds_count_unused_fields_and_leave_out_on_request(tmp_path: Path) -> None:
    records = [
        record(meta=1),
        record(label=False),
        record(label=True, meta=2, source="web"),
        record(source="web", meta=1),
    ]
    records.append(record(source=None, meta=2))
    files = [write_jsonl(tmp_path / "chats.jsonl", records), write_jsonl(tmp_path / "pairs.jsonl", PAIRS)]
    recipe: Any = {"sources": [{"path": str(path)} for path in files], **CHATML}
    with pytest.raises(RecordError, match=r"label_false|--set preferences=chosen"):
        run_build(recipe, tmp_path / "a", workers=0)
    ledger = proved({**recipe, "preferences": "chosen"}, tmp_path / "b")
    unused = {key: count for key, count in ledger.notes.items() if "unused" in key[1]}
    assert unused == {
        ("chats", "unused_field meta"): 2,
        ("web", "unused_field meta"): 2,
        ("pairs", "unused_field score"): 1,
    }
    assert ledger.reasons("skipped") == {"label_false": 1}


def test_commands_name_unused_fields_and_what_is_not_read_in_a_folder(tmp_path: Path) -> None:
    chats = tmp_path / "chats"
    chats.mkdir()
    path = write_jsonl(chats / "a.jsonl", [record(meta=1), record(label=False)])
    (chats / "b.jsonl.bak").write_text("")
    build = ["build", "-o", str(tmp_path / "a"), "--add-control-tokens", "-w", "0"]
    inits = ["init", "-o", "-"], ["init", "-o", str(tmp_path / "r.yaml")]
    for command, *words in (build, ["inspect"], *inits):
        done = CliRunner().invoke(app, [command, str(chats), *words, "-t", "bytes", "--set", "preferences=chosen"])
        assert done.exit_code == 0, done.output
        assert "Fields that are not used: meta (1 record)." in done.output, words
        assert "files of unknown endings (b.jsonl.bak)." in done.stderr, words
        assert "unknown endings" not in done.stdout
    look = look_at([str(path)], tokenizer="bytes", preferences="chosen")
    assert look.recipe.preferences == "chosen"
    assert "\npreferences: chosen\n" in recipe_text(look)
    with pytest.warns(UserWarning, match="b.jsonl.bak"):
        compile(str(chats), model="bytes", template="chatml", add_control_tokens=True, preferences="chosen")


def test_a_weight_of_a_record_is_said_to_train_nothing(tmp_path: Path) -> None:
    """A table with a column of weights is read past it: a reader must not take it for used."""
    path = write_jsonl(tmp_path / "a.jsonl", [record(weight=0.5)])
    keys = ["-t", "bytes", "--add-control-tokens", "-w", "0"]
    done = CliRunner().invoke(app, ["build", str(path), "-o", str(tmp_path / "a"), *keys])
    assert done.exit_code == 0, done.output
    assert "weight (1 record). Nothing is trained by a field of the record: weight and train are" in done.output
    assert "(nothing is trained by a field of the record" in repr(chatmill.Dataset(tmp_path / "a"))
