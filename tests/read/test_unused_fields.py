"""Fields that are not used are counted and named; those that have a meaning are read, or refused with the way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chatmill.cli import app
from chatmill.compiler.first_recipe import look_at, recipe_text
from chatmill.compiler.run import run_build
from chatmill.core.conversations import unused_fields, unused_sentence
from chatmill.dataset.compile import compile
from chatmill.errors import RecordError, UnknownNameError
from chatmill.read.conversations import ConversationFile, read_conversations
from chatmill.read.shapes import find_shape
from tests.compiler.builds import CHATML, proved, write_jsonl
from tests.read.three_ways import as_lines, every_way

PAIR = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
FUNCTION = {"name": "f", "parameters": {}}


def record(**fields: Any) -> dict[str, Any]:
    return {"messages": PAIR, **fields}


def read(records: list[dict[str, Any]], shape: str = "openai") -> Any:
    return as_lines(records, find_shape(shape))


def said(conversation: Any) -> list[str]:
    return [message.content for message in conversation.messages]


def test_unused_fields_are_counted_by_source_and_name() -> None:
    """That rows count the same is in `test_rows.py`."""
    found, errors = read(
        [
            record(meta=5, nothing=None, empty=[], none={}, text=""),
            record(label=3, meta={"a": 1}, naïve=1),
            record(label=True, id="x", source="web", **{'a "b"': 1}),
            {"messages": [{**PAIR[0], "time": 1}, {**PAIR[1], "time": None}], "meta": 1},
        ]
    )
    assert not errors
    counts = {
        ("s", "meta"): 3,
        ("s", "label"): 1,
        ("s", "na\u00efve"): 1,
        ("web", 'a "b"'): 1,
        ("s", "messages[].time"): 1,
    }
    assert found.unused == counts
    assert found.take(found.offsets[:1]).unused == {}
    assert unused_sentence({}) == ""


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
    (found,) = every_way(find_shape(shape), [one])
    assert said(found) == ["q", "a"]
    assert (
        unused_fields([found]) == {name: count for (_, name), count in read([one], shape)[0].unused.items()} == unused
    )


def test_what_has_a_meaning_is_read() -> None:
    records = [
        record(system="be kind"),
        record(functions=[FUNCTION]),
        {"messages": [PAIR[0], {**PAIR[1], "reasoning": "because"}]},
        {"system": "s", "messages": [{"role": "system", "content": "s"}, *PAIR]},
    ]
    found = every_way(find_shape("openai"), records)
    assert not read(records)[0].unused
    assert list(map(said, found)) == [["be kind", "q", "a"], ["q", "a"], ["q", "a"], ["s", "q", "a"]]
    assert found[1].tools == ({"type": "function", "function": FUNCTION},)
    assert found[2].messages[1].reasoning == "because"
    (plain,) = every_way(find_shape("prompt_completion"), [{"system": "s", "prompt": "p", "completion": "c"}])
    assert said(plain) == ["s", "p", "c"]


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
    found, errors = read([{"rejected": "b", **pair}], "chosen")
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
        assert "Fields that are not used: meta (1 records)." in done.output, words
        assert "files of unknown endings (b.jsonl.bak)." in done.stderr, words
        assert "unknown endings" not in done.stdout
    look = look_at([str(path)], tokenizer="bytes", preferences="chosen")
    assert look.recipe.preferences == "chosen"
    assert "\npreferences: chosen\n" in recipe_text(look)
    with pytest.warns(UserWarning, match="b.jsonl.bak"):
        compile(str(chats), model="bytes", template="chatml", add_control_tokens=True, preferences="chosen")
