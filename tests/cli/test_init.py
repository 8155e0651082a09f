"""`chatmill init`: the recipe fits the files, says what was seen, builds as it stands, and overwrites nothing."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from chatmill.compiler.first_recipe import LONGEST_ROW, look_at, recipe_text
from chatmill.compiler.recipe import Gates, OnError, Pack, Packing, Recipe, SplitOptions, recipe_of
from chatmill.compiler.run import run_build
from chatmill.errors import DataError, RecordError
from chatmill.render.registry import find_template
from tests.cli.run import invoke
from tests.compiler.builds import chats, write_jsonl
from tests.conftest import CONVERSATION_FILES
from tests.data.tokenizer_files import unpacked

run = partial(invoke, "init")


def pair(name: str, question: str = "q", answer: str = "a", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]
    return {"id": name, "messages": messages}


def plain(folder: Path, count: int = 30) -> Path:
    records = chats(count, 3)
    for record in records:
        for message in record["messages"]:
            message.pop("weight", None)
    return write_jsonl(folder / "chats.jsonl", records)


def bundled(name: str) -> Path:
    return next(path for path in CONVERSATION_FILES if path.name == f"{name}.jsonl.gz")


def test_the_recipe_builds_as_it_stands(tmp_path: Path) -> None:
    rows = [{"instruction": "say", "output": "said", "id": f"a{i}"} for i in range(4)]
    files = [plain(tmp_path), write_jsonl(tmp_path / "rows.jsonl", rows)]
    done = run(*files, "-o", tmp_path / "recipe.yaml", "-t", "bytes")
    assert done.exit_code == 0, done.output
    assert "Wrote" in done.output
    recipe = recipe_of(tmp_path / "recipe.yaml")
    assert [source.shape for source in recipe.sources] == ["openai", "alpaca"]
    assert recipe.template == "chatml"
    assert recipe.add_control_tokens
    assert recipe.on_error is OnError.FAIL
    assert recipe.gates.records_without_trained_tokens == recipe.gates.untrained_terminators == 0
    manifest = run_build(tmp_path / "recipe.yaml", tmp_path / "out", workers=0).manifest
    assert manifest["splits"]["train"]["episodes"] == 34


def test_every_key_of_a_recipe_is_there_with_a_comment(tmp_path: Path) -> None:
    text = recipe_text(look_at([str(plain(tmp_path))], tokenizer="bytes"))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    models = (Recipe, Packing, Pack, SplitOptions, Gates)
    keys = {key for model in models for key in model.__struct_fields__}
    keys |= {"path", "shape", "name", "weight", "max_records"}
    missing = {key for key in keys if not any(line.strip(" #-").startswith(f"{key}:") for line in lines)}
    assert not missing
    assert sum("#" in line for line in lines) > 20
    assert recipe_of(yaml.safe_load(text)).sources[0].path == str(tmp_path / "chats.jsonl")


def test_what_was_seen_is_told(tmp_path: Path) -> None:
    records: list[Any] = [pair(f"r{i}", "q" * i) for i in range(1, 9)]
    records += ["{broken", {"messages": [{"role": "user", "content": "no answer"}]}]
    look = look_at([str(write_jsonl(tmp_path / "chats.jsonl", records))], tokenizer="bytes")
    assert look.files[0].bad == {"invalid_json": 1}
    assert look.files[0].whole
    assert look.files[0].records == 10
    assert look.recipe.on_error is OnError.QUARANTINE
    assert look.recipe.gates.records_without_trained_tokens == 0, "a gate is never switched off"
    # <|im_start|>user\n + q * 8 + <|im_end|>\n + <|im_start|>assistant\na<|im_end|>\n
    assert look.lengths[-1] == (1 + 5 + 8 + 2) + (1 + 10 + 1 + 2)
    text = recipe_text(look)
    assert "all 10 records; 1 cannot be read: invalid_json 1" in text
    assert "records_without_trained_tokens: 0   # in the sample: 1 records train nothing; the build stops here" in text
    assert "records_left_out: 0.05   # in the sample: 1 of" in text


@pytest.mark.parametrize(
    ("longest", "row"), [(30, 512), (480, 512), (600, 1024), (3000, 4096), (LONGEST_ROW + 5, LONGEST_ROW)]
)
def test_the_row_holds_the_longest_conversation(tmp_path: Path, longest: int, row: int) -> None:
    path = write_jsonl(tmp_path / "chats.jsonl", [pair("a"), pair("b", "q" * (longest - 22))])
    look = look_at([str(path)], tokenizer="bytes")
    assert look.lengths[-1] == longest
    assert look.recipe.packing.max_length == row
    assert ("1 are longer than the row" in recipe_text(look)) == (longest > row)


@pytest.mark.parametrize(
    ("file", "tokenizer", "template", "added"),
    [
        ("oasst_en100", "o200k", "harmony", False),
        ("tau_airline", "o200k", "harmony", False),
        ("oasst_en100", "bytes", "chatml", True),
        ("gsm8k", "bytes", "qwen3", True),  # chatml does not show reasoning
        ("glaive_toolcall_en", "bytes", "qwen3", True),  # chatml has no tools
    ],
)
def test_the_template_fits_tokenizer_and_records(file: str, tokenizer: str, template: str, added: bool) -> None:
    look = look_at([str(bundled(file))], tokenizer=tokenizer, sample=50)
    assert (look.recipe.template, look.recipe.add_control_tokens) == (template, added)
    assert not look.unusable
    assert recipe_of(yaml.safe_load(recipe_text(look))) == look.recipe


@pytest.mark.parametrize("tokenizer", ["qwen3", "mistral_nemo"])
def test_a_model_keeps_its_own_template_and_vocabulary(tokenizer: str) -> None:
    folder = str(unpacked(tokenizer))
    look = look_at([str(bundled("oasst_en100"))], tokenizer=folder, sample=30)
    assert look.recipe.template == look.recipe.tokenizer == folder
    assert not look.recipe.add_control_tokens
    assert recipe_of(yaml.safe_load(recipe_text(look))) == look.recipe


def test_the_cost_of_turns_that_change_is_told(tmp_path: Path) -> None:
    messages = [{"role": role, "content": role} for role in ("user", "assistant") * 2]
    messages[0]["content"] *= 200
    path = write_jsonl(tmp_path / "chats.jsonl", [{"id": "r", "messages": messages}, pair("s")])
    look = look_at([str(path)], tokenizer=str(unpacked("qwen3")))
    text = recipe_text(look)
    added = look.ledger.total_notes("tokens_in_added_rows")
    assert "Later messages change 1 answers of the sample" in text
    assert f"with 1 rows and {added} tokens more." in text.replace("\n# ", " ")
    assert "# Options that it reads: enable_thinking." in text
    assert look.recipe.expand == "tree", "the rows share most of their tokens"
    assert run_build(look.recipe, tmp_path / "out", workers=0).manifest["splits"]["train"]["branches"] == 1


def test_repairs_that_help_are_proposed(tmp_path: Path) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "a"},
    ]
    path = write_jsonl(tmp_path / "chats.jsonl", [{"id": "r", "messages": said}, pair("s")])
    look = look_at([str(path)], tokenizer=str(unpacked("mistral_nemo")))
    assert look.recipe.repairs == ["call_ids"]
    assert not look.unusable
    text = recipe_text(look)
    assert '\nrepairs: ["call_ids"]\n' in text
    assert recipe_of(yaml.safe_load(text)) == look.recipe


def test_a_template_that_asks_for_the_date_gets_one(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in unpacked("qwen3").iterdir():
        (folder / path.name).symlink_to(path)
    dated = "<|im_start|>system\nToday is {{ strftime_now('%d %b %Y') }}.<|im_end|>\n" + find_template("chatml").text  # type: ignore[union-attr]
    (folder / "chat_template.jinja").write_text(dated)
    look = look_at([str(plain(tmp_path, 5))], tokenizer=str(folder))
    assert look.recipe.date is not None
    text = recipe_text(look)
    assert f"\ndate: {look.recipe.date}\n" in text
    assert recipe_of(yaml.safe_load(text)) == look.recipe


def test_a_sample_is_a_sample(tmp_path: Path) -> None:
    look = look_at([str(plain(tmp_path, 30))], tokenizer="bytes", sample=7)
    assert look.files[0].records == 7
    assert not look.files[0].whole
    assert "the first 7 records" in recipe_text(look)


def test_many_files_become_one_source_a_shape(tmp_path: Path) -> None:
    for number in range(9):
        write_jsonl(tmp_path / f"c{number}.jsonl", [pair(f"r{number}")])
    write_jsonl(tmp_path / "d.jsonl", [{"prompt": "p", "completion": "c"}])
    look = look_at([str(tmp_path / "*.jsonl")], tokenizer="bytes")
    assert [len(source.patterns) for source in look.recipe.sources] == [9, 1]
    assert recipe_of(yaml.safe_load(recipe_text(look))) == look.recipe


@pytest.mark.parametrize("name", ["a b.jsonl", "yes.jsonl", "#x.jsonl", "ü'\".jsonl", "- a.jsonl", "a: b.jsonl"])
def test_odd_names_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / name, [pair("a")])
    look = look_at([name], tokenizer="bytes")
    assert yaml.safe_load(recipe_text(look))["sources"][0]["path"] == name


def test_printed_instead(tmp_path: Path) -> None:
    done = run(plain(tmp_path), "-o", "-", "-t", "bytes")
    assert done.exit_code == 0
    assert recipe_of(yaml.safe_load(done.stdout)).tokenizer == "bytes"
    assert [path.name for path in tmp_path.iterdir()] == ["chats.jsonl"]


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("", DataError, "chats.jsonl holds no record; leave it out"),
        (json.dumps({"x": 1}) + "\n", RecordError, "cannot tell the shape of the records: the first record has: x"),
        ('{"messages": []}\n', DataError, "no record that can be read (no_messages 1)"),
    ],
)
def test_files_without_a_usable_record(tmp_path: Path, content: str, error: type[Exception], message: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(content)
    done = run(path, "-o", tmp_path / "recipe.yaml", "-t", "bytes")
    assert isinstance(done.exception, error)
    assert message in str(done.exception)
    assert not (tmp_path / "recipe.yaml").exists()


def test_what_a_gate_will_stop_is_printed_with_the_choice(tmp_path: Path) -> None:
    mute = [{"messages": [{"role": "user", "content": "no answer"}]} for _ in range(2)]
    path = write_jsonl(tmp_path / "chats.jsonl", [pair("r1"), *mute])
    done = run(path, "-o", tmp_path / "recipe.yaml", "-t", "bytes")
    assert "In the sample 2 records train nothing: the build will stop at the gate" in done.output
    assert "records_without_trained_tokens: null" in done.output
    assert recipe_of(tmp_path / "recipe.yaml").gates.records_without_trained_tokens == 0
