"""`chatmill init`: the recipe fits the files, says what was seen, builds as it stands, and overwrites nothing."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from chatmill.compiler.first_recipe import LONGEST_ROW, FirstLook, look_at, recipe_text
from chatmill.compiler.recipe import Gates, OnError, Pack, Packing, Recipe, SplitOptions, recipe_of
from chatmill.compiler.run import run_build
from chatmill.errors import DataError, RecordError
from chatmill.render.registry import find_template
from tests.cli.run import invoke
from tests.compiler.builds import talk, write_jsonl
from tests.conftest import CONVERSATION_FILES
from tests.data.tokenizer_files import unpacked

run = partial(invoke, "init")


def pair(name: str, question: str = "q", answer: str = "a") -> dict[str, Any]:
    return {"id": name, "messages": talk(question, answer)}


def checked(*paths: Path | str, tokenizer: Path | str, **how: Any) -> FirstLook:
    """The first look, after a check that its recipe reads as what it chose."""
    look = look_at([str(path) for path in paths], tokenizer=str(tokenizer), **how)
    assert recipe_of(yaml.safe_load(recipe_text(look))) == look.recipe
    return look


def bundled(name: str) -> Path:
    return next(path for path in CONVERSATION_FILES if path.name == f"{name}.jsonl.gz")


def test_the_recipe_builds_as_it_stands(tmp_path: Path) -> None:
    rows = [{"instruction": "say", "output": "said", "id": f"a{i}"} for i in range(4)]
    plain = write_jsonl(tmp_path / "chats.jsonl", [pair(f"r{i}") for i in range(30)])
    done = run(plain, write_jsonl(tmp_path / "rows.jsonl", rows), "-o", tmp_path / "recipe.yaml", "-t", "bytes")
    assert done.exit_code == 0, done.output
    assert "Wrote" in done.output
    recipe = recipe_of(tmp_path / "recipe.yaml")
    assert [source.shape for source in recipe.sources] == ["openai", "alpaca"]
    assert (recipe.template, recipe.add_control_tokens, recipe.on_error) == ("chatml", True, OnError.FAIL)
    assert recipe.gates.records_without_trained_tokens == recipe.gates.untrained_terminators == 0
    manifest = run_build(tmp_path / "recipe.yaml", tmp_path / "out", workers=0).manifest
    assert manifest["splits"]["train"]["episodes"] == 34


def test_every_key_of_a_recipe_is_there_with_a_comment(tmp_path: Path) -> None:
    text = recipe_text(look_at([str(write_jsonl(tmp_path / "chats.jsonl", [pair("r")]))], tokenizer="bytes"))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    models = (Recipe, Packing, Pack, SplitOptions, Gates)
    keys = {key for model in models for key in model.__struct_fields__}
    keys |= {"path", "shape", "name", "weight", "max_records"}
    missing = {key for key in keys if not any(line.strip(" #-").startswith(f"{key}:") for line in lines)}
    assert not missing
    assert sum("#" in line for line in lines) > 20
    assert recipe_of(yaml.safe_load(text)).sources[0].path == str(tmp_path / "chats.jsonl")


def test_bad_records_are_counted_and_no_gate_is_switched_off(tmp_path: Path) -> None:
    records: list[Any] = [pair(f"r{i}", "q" * i) for i in range(1, 9)]
    path = write_jsonl(tmp_path / "chats.jsonl", [*records, "{broken", {"messages": talk("no answer")}])
    done = run(path, "-o", tmp_path / "recipe.yaml", "-t", "bytes")
    assert "In the sample 1 records train nothing: the build will stop at the gate" in done.output
    assert "records_without_trained_tokens: null" in done.output
    look = look_at([str(path)], tokenizer="bytes")
    assert (look.files[0].bad, look.files[0].whole, look.files[0].records) == ({"invalid_json": 1}, True, 10)
    assert look.recipe.on_error is OnError.QUARANTINE
    assert look.recipe == recipe_of(tmp_path / "recipe.yaml")
    assert look.recipe.gates.records_without_trained_tokens == 0
    sample = look_at([str(path)], tokenizer="bytes", sample=7)
    assert (sample.files[0].whole, sample.files[0].records) == (False, 7)
    assert "the first 7 records" in recipe_text(sample)


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
    look = checked(bundled(file), tokenizer=tokenizer, sample=50)
    assert (look.recipe.template, look.recipe.add_control_tokens) == (template, added)
    assert not look.unusable


@pytest.mark.parametrize("tokenizer", ["qwen3", "mistral_nemo"])
def test_a_model_keeps_its_own_template_and_vocabulary(tokenizer: str) -> None:
    look = checked(bundled("oasst_en100"), tokenizer=unpacked(tokenizer), sample=30)
    assert look.recipe.template == look.recipe.tokenizer == str(unpacked(tokenizer))
    assert not look.recipe.add_control_tokens


def test_the_cost_of_turns_that_change_is_told(tmp_path: Path) -> None:
    messages = talk("user" * 200, "assistant", "user", "assistant")
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
    result = {"role": "tool", "content": "1", "tool_call_id": "call_1"}
    said = [*talk("q"), {"role": "assistant", "tool_calls": [call]}, result, {"role": "assistant", "content": "a"}]
    path = write_jsonl(tmp_path / "chats.jsonl", [{"id": "r", "messages": said}, pair("s")])
    look = checked(path, tokenizer=unpacked("mistral_nemo"))
    assert look.recipe.repairs == ["call_ids"]
    assert not look.unusable
    assert '\nrepairs: ["call_ids"]\n' in recipe_text(look)


def test_a_template_that_asks_for_the_date_gets_one(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(unpacked("qwen3"), folder)
    dated = "<|im_start|>system\nToday is {{ strftime_now('%d %b %Y') }}.<|im_end|>\n" + find_template("chatml").text  # type: ignore[union-attr]
    (folder / "chat_template.jinja").write_text(dated)
    look = checked(write_jsonl(tmp_path / "chats.jsonl", [pair("a")]), tokenizer=folder)
    assert look.recipe.date is not None
    assert f"\ndate: {look.recipe.date}\n" in recipe_text(look)


def test_many_files_become_one_source_a_shape(tmp_path: Path) -> None:
    for number in range(9):
        write_jsonl(tmp_path / f"c{number}.jsonl", [pair(f"r{number}")])
    write_jsonl(tmp_path / "d.jsonl", [{"prompt": "p", "completion": "c"}])
    look = checked(tmp_path / "*.jsonl", tokenizer="bytes")
    assert [len(source.patterns) for source in look.recipe.sources] == [9, 1]


@pytest.mark.parametrize("name", ["a b.jsonl", "yes.jsonl", "#x.jsonl", "ü'\".jsonl", "- a.jsonl", "a: b.jsonl"])
def test_odd_names_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / name, [pair("a")])
    look = look_at([name], tokenizer="bytes")
    assert yaml.safe_load(recipe_text(look))["sources"][0]["path"] == name


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
