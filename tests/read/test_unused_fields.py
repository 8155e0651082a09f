"""Fields that are not used are counted and named; those that have a meaning are read, or refused with the way out."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from chatmill.cli import app
from chatmill.compiler.first_recipe import look_at, recipe_text
from chatmill.compiler.run import run_build
from chatmill.core.conversations import unused_fields, unused_sentence
from chatmill.dataset.compile import compile
from chatmill.errors import RecordError, UnknownNameError
from chatmill.prove.verify import verify
from chatmill.read.conversations import ConversationFile, read_conversations
from chatmill.read.rows import read_rows
from chatmill.read.shapes import find_shape
from tests.compiler.builds import write_jsonl
from tests.read.three_ways import as_lines, every_way

PAIR = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
FUNCTION = {"name": "f", "parameters": {}}


def record(**fields: Any) -> dict[str, Any]:
    return {"messages": PAIR, **fields}


def read(records: list[dict[str, Any]], shape: str = "openai") -> Any:
    return as_lines(records, find_shape(shape))


def by_name(found: Any) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for (_, name), count in found.unused.items():
        sums[name] += count
    return dict(sums)


RECORDS = [
    record(meta=5, nothing=None, empty=[], none={}, text=""),
    record(label=3, meta={"a": 1}, naïve=1),
    record(label=True, id="x", source="web", **{'a "b"': 1}),
    {"messages": [{**PAIR[0], "time": 1}, {**PAIR[1], "time": None}], "meta": 1},
]
COUNTS = {"meta": 3, "label": 1, "na\u00efve": 1, 'a "b"': 1, "messages[].time": 1}


def test_unused_fields_are_counted_by_name() -> None:
    found, errors = read(RECORDS)
    assert not errors
    assert by_name(found) == COUNTS
    assert found.unused["web", 'a "b"'] == found.unused["s", "label"] == 1
    assert found.take(read(RECORDS)[0].offsets[:1]).unused == {}


OTHER = [{"role": "user", "content": "another question"}, PAIR[1]]


@pytest.mark.parametrize(
    ("shape", "one", "unused"),
    [
        ("openai", {"messages": PAIR, "conversations": OTHER}, {"conversations": 1}),
        ("openai", {"conversations": OTHER, "messages": PAIR}, {"conversations": 1}),
        ("openai", {"messages": PAIR, "conversations": []}, {}),
        ("openai", {"messages": None, "conversations": PAIR}, {}),
        ("harmony", {"messages_json": json.dumps({"messages": PAIR}), "messages": OTHER}, {"messages": 1}),
    ],
)
def test_a_second_list_of_messages_is_not_lost_without_a_word(
    shape: str, one: dict[str, Any], unused: dict[str, int]
) -> None:
    found, errors = read([one], shape)
    assert not errors
    assert [message.content for message in found[0].messages] == ["q", "a"]
    assert by_name(found) == unused
    rows, errors = read_rows(pa.RecordBatch.from_pylist([one]), first=1, path="f", source="s", shape=find_shape(shape))
    assert not errors
    assert [message.content for message in rows[0].messages] == ["q", "a"]
    assert by_name(rows) == unused


def test_what_has_a_meaning_is_read() -> None:
    answer = {**PAIR[1], "reasoning": "because"}
    records = [
        record(system="be kind"),
        record(functions=[FUNCTION]),
        {"messages": [PAIR[0], answer]},
        {"system": "s", "messages": [{"role": "system", "content": "s"}, *PAIR]},
    ]
    found = every_way(find_shape("openai"), records)
    assert not read(records)[0].unused
    assert [message.content for message in found[0].messages] == ["be kind", "q", "a"]
    assert found[1].tools == ({"type": "function", "function": FUNCTION},)
    assert found[2].messages[1].reasoning == "because"
    assert [message.content for message in found[3].messages] == ["s", "q", "a"]
    plain, errors = read([{"system": "s", "prompt": "p", "completion": "c"}], "prompt_completion")
    assert not errors
    assert [message.content for message in plain[0].messages] == ["s", "p", "c"]


@pytest.mark.parametrize(
    ("bad", "code", "way_out"),
    [
        (record(images=["a.png"]), "images_differ", "1 pictures in 'images'"),
        ({"messages": [{**PAIR[0], "images": ["a.png"]}, PAIR[1]]}, "non_text_part", r"quarantine"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, PAIR[1]]}, "images_differ", "1 places"),
        (record(label=False), "label_false", "--set preferences=chosen"),
        (record(tools=[{"type": "function", "function": FUNCTION}], functions=[FUNCTION]), "bad_tools", "keep one"),
        ({"system": "s", "messages": [{"role": "system", "content": "t"}, *PAIR]}, "system_twice", "keep one"),
        ({"messages": [PAIR[0], {**PAIR[1], "reasoning": "a", "thinking": "b"}]}, "reasoning_twice", "keep one"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_way_out(bad: dict[str, Any], code: str, way_out: str) -> None:
    found, [error] = read([record(), bad, record(images=[], label=None)])
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
    assert [[m.content for m in one.messages] for one in found] == [["q", "a"]] * 5
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
    found, errors = read([{"rejected": "b", **pair}], "chosen")
    if isinstance(wanted, str):
        assert [error.code for error in errors] == [wanted]
        assert "keep one" in str(errors[0])
    else:
        assert not errors
        assert [message.content for message in found[0].messages] == wanted
        assert not found.unused


def test_builds_count_unused_fields_and_leave_out_on_request(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "chats.jsonl", [record(meta=1), record(label=False), record(label=True, meta=2)])
    pairs = write_jsonl(tmp_path / "pairs.jsonl", PAIRS)
    recipe: Any = {"sources": [{"path": str(path)}, {"path": str(pairs)}], "tokenizer": "bytes", "template": "chatml"}
    recipe |= {"add_control_tokens": True}
    with pytest.raises(RecordError, match=r"label_false|--set preferences=chosen"):
        run_build(recipe, tmp_path / "a", workers=0)
    built = run_build({**recipe, "preferences": "chosen"}, tmp_path / "b", workers=0).manifest
    assert built["ledger"]["notes"]["chats"]["unused_field meta"] == 2
    assert built["ledger"]["notes"]["pairs"]["unused_field score"] == 1
    assert built["ledger"]["records"]["chats"]["skipped"] == {"label_false": 1}
    assert verify(tmp_path / "b", deep=True).passed


def test_commands_name_unused_fields(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "chats.jsonl", [record(meta=1), record(label=False)])
    options = ["-t", "bytes", "--set", "preferences=chosen"]
    sentence = "Fields that are not used: meta (1 records)."
    for words in (
        ["build", "-o", str(tmp_path / "a"), "--add-control-tokens", "-w", "0"],
        ["inspect"],
        ["init", "-o", "-"],
    ):
        done = CliRunner().invoke(app, [words[0], str(path), *words[1:], *options])
        assert done.exit_code == 0, done.output
        assert sentence in done.output, words
    shown = CliRunner().invoke(app, ["init", str(path), "-o", str(tmp_path / "r.yaml"), *options])
    assert sentence in shown.output
    look = look_at([str(path)], tokenizer="bytes", preferences="chosen")
    assert look.recipe.preferences == "chosen"
    assert "\npreferences: chosen\n" in recipe_text(look)
    assert unused_sentence({}) == ""


def test_commands_name_what_is_not_read_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "chats").mkdir()
    write_jsonl(tmp_path / "chats" / "a.jsonl", [record()])
    (tmp_path / "chats" / "b.jsonl.bak").write_text("")
    sentence = "files of unknown endings (b.jsonl.bak)."
    chats = str(tmp_path / "chats")
    for words in (
        ["build", chats, "-t", "bytes", "-o", str(tmp_path / "a"), "--add-control-tokens", "-w", "0", "--json"],
        ["inspect", chats, "-t", "bytes", "--json"],
        ["init", chats, "-t", "bytes", "-o", "-"],
    ):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        assert sentence in done.stderr, words
        assert sentence not in done.stdout
    with pytest.warns(UserWarning, match="b.jsonl.bak"):
        compile(chats, model="bytes", template="chatml", add_control_tokens=True)


@pytest.mark.parametrize("file", ["chats.jsonl", "chats.json", "chats.parquet"])
def test_unused_fields_are_counted_under_the_source_of_their_record(tmp_path: Path, file: str) -> None:
    records = [record(source="web", meta=1), record(source="books", meta=None), record(source=None, meta=2)]
    records += [record(source="web", meta=3), record(source="books", meta=4)]
    # the scanner declines another spelling of a role
    records.append({"source": "web", "meta": 5, "messages": [{**PAIR[0], "role": "Human"}, PAIR[1]]})
    match Path(file).suffix:
        case ".jsonl":
            write_jsonl(tmp_path / file, records)
        case ".json":
            (tmp_path / file).write_text(json.dumps(records))
        case _:
            pq.write_table(pa.Table.from_pylist(records), tmp_path / file)
    recipe: Any = {"sources": [{"path": str(tmp_path / file)}], "tokenizer": "bytes", "template": "chatml"}
    built = run_build({**recipe, "add_control_tokens": True}, tmp_path / "a", workers=0).manifest
    notes = built["ledger"]["notes"]
    assert {source: held.get("unused_field meta") for source, held in notes.items()} == {
        "web": 3,
        "books": 1,
        "chats": 1,
    }


def test_parquet_refuses_the_same() -> None:
    rows = [
        {"messages": PAIR, "label": label, "images": images} for label, images in ((False, None), (True, ["a.png"]))
    ]
    batch = pa.RecordBatch.from_pylist([*rows, {"messages": PAIR}])
    found, errors = read_rows(batch, first=1, path="f", source="s", shape=find_shape("openai"))
    assert [(error.code, error.where) for error in errors] == [("label_false", "f:row 1"), ("images_differ", "f:row 2")]
    assert (len(found), found.unused) == (1, {})
