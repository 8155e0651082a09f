"""`chatmill init`: the recipe fits the files, says what was seen, builds as it stands, and overwrites nothing."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import structs

from chatmill.compiler.first_recipe import LONGEST_ROW, FirstLook, look_at, recipe_text
from chatmill.compiler.recipe import Gates, OnError, Pack, Packing, Recipe, SplitOptions, recipe_of
from chatmill.compiler.run import run_build
from chatmill.errors import DataError, RecordError
from chatmill.export.registry import TARGETS
from chatmill.export.trainer_lines import TRAINER_LINES
from chatmill.render.registry import find_template
from tests.cli.run import invoke
from tests.compiler.builds import CHATML, talk, write_jsonl
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
    assert "In the sample 1 record trains nothing: the build will stop at the gate" in done.output
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


def test_files_of_agents_get_keys_for_what_they_lack() -> None:
    session = Path(__file__).parents[1] / "data" / "agents" / "claude_code_subagents" / "session_0.jsonl"
    text = recipe_text(checked(session, tokenizer="bytes"))
    assert all(f"# {key}: " in text for key in ("tools_file", "system_file", "unknown_prompt", "where"))


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


CHAT = {"messages": talk("q", "an answer")}
MIXED = [CHAT, {"prompt": "q", "completion": "a"}, {"instruction": "q", "output": "a"}]


def test_a_file_that_mixes_formats_is_read_each_in_its_own(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "chats.jsonl", [*MIXED, *MIXED, "{broken"])
    done = run(path, "-o", tmp_path / "recipe.yaml", "-t", "bytes")
    assert "mixes formats, and each record is read in its own: of the first 7 records openai 2" in done.output
    assert f"Cannot be read: {path}:7: not JSON" in done.output
    recipe = recipe_of(tmp_path / "recipe.yaml")
    assert recipe.sources[0].shape == "each"
    built = run_build(structs.replace(recipe, gates=Gates(records_left_out=None)), tmp_path / "out", workers=0)
    assert built.manifest["splits"]["train"]["episodes"] == 6


def test_one_format_stays_the_format_of_a_file_with_bad_records(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "chats.jsonl", [CHAT, CHAT, {"text": "no format"}, {"messages": []}])
    look = checked(path, tokenizer="bytes")
    assert look.recipe.sources[0].shape == "openai"
    assert not look.files[0].formats


PAIRS = [{"prompt": f"q{n}", "chosen": "good " * (n + 1), "rejected": "bad"} for n in range(6)]
LABELS = [{"prompt": f"q{n}", "completion": f"a{n}", "label": n % 2 == 0} for n in range(6)]


@pytest.mark.parametrize(
    ("records", "holds", "preferences", "episodes"),
    [
        (PAIRS, ("pairs",), "pairs", 12),
        (PAIRS, (), "chosen", 6),
        (LABELS, ("pairs",), "pairs", 6),
        (LABELS, (), "chosen", 3),
        ([CHAT, CHAT, CHAT, PAIRS[0]], ("pairs",), "chosen", 4),
    ],
)
def test_answers_that_people_compared_are_recognised(
    tmp_path: Path, records: list[Any], holds: tuple[str, ...], preferences: str, episodes: int
) -> None:
    look = checked(write_jsonl(tmp_path / "pairs.jsonl", records), tokenizer="bytes", holds=holds)
    assert look.recipe.preferences == preferences
    assert sum(file.records for file in look.files) == (3 if episodes == 3 else len(records))
    (tmp_path / "recipe.yaml").write_text(recipe_text(look))
    built = run_build(tmp_path / "recipe.yaml", tmp_path / "out", workers=0)
    assert built.manifest["splits"]["train"]["episodes"] == episodes


def test_labels_that_are_texts_of_a_table_are_labels(tmp_path: Path) -> None:
    (tmp_path / "answers.csv").write_text("prompt,completion,label\nq,good,true\nq,bad,False\n")
    done = run(tmp_path / "answers.csv", "-o", tmp_path / "recipe.yaml", "-t", "bytes", "--for", "trl")
    assert "export built --to trl-kto" in done.output
    recipe = {"sources": [{"path": str(tmp_path / "answers.csv")}], **CHATML}
    with pytest.raises(RecordError, match="'label' is false: people did not like this answer"):
        run_build(recipe, tmp_path / "plain", workers=0)
    built = run_build(tmp_path / "recipe.yaml", tmp_path / "out", workers=0)
    assert built.manifest["splits"]["train"]["episodes"] == 2


def test_log_probabilities_are_stored_and_said(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "a", "token_ids": list(b"a\x00"), "logprobs": [-0.1, -0.2]}
    path = write_jsonl(tmp_path / "chats.jsonl", [{"messages": [*talk("q"), answer]}, CHAT])
    look = checked(path, tokenizer="bytes")
    assert look.with_logprobs == 1
    assert look.recipe.logprobs
    assert "# 1 conversations of the sample have log-probabilities" in recipe_text(look)


def test_records_that_cannot_be_used_are_explained_in_whole_sentences(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "a", "token_ids": [65], "logprobs": [-0.1, -0.2]}
    path = write_jsonl(tmp_path / "chats.jsonl", [{"messages": [*talk("q"), answer]}])
    done = run(path, "-o", tmp_path / "recipe.yaml", "-t", "bytes")
    assert "(bad_token_ids 1). The first: " in str(done.exception)
    assert "must have one number for each id, found 2 for 1 token_ids" in str(done.exception)
    other = {"role": "assistant", "content": "a", "token_ids": list(b"another")}
    write_jsonl(path, [CHAT, {"messages": [*talk("q"), other]}])
    done = run(path, "-o", tmp_path / "recipe.yaml", "-t", "bytes")
    assert f"Refused: {path}:2" in done.output


@pytest.mark.parametrize("name", list(TARGETS))
def test_the_last_comment_leads_to_the_rows_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    turns = talk("user " * 30, "first", "user", "second")
    records = PAIRS if name in ("trl-dpo", "trl-reward") else LABELS if name == "trl-kto" else [{"messages": turns}] * 3
    write_jsonl(tmp_path / "chats.jsonl", records)
    model = unpacked("qwen3")
    done = run("chats.jsonl", "-t", model, "--for", name)
    assert done.exit_code == 0, done.output
    recipe = recipe_of("recipe.yaml")
    assert (recipe.expand == "tree") == (name in ("hf", "parquet"))
    comment = [
        line.removeprefix("# ").removeprefix("#") for line in (tmp_path / "recipe.yaml").read_text().splitlines()
    ]
    closing = comment[comment.index(f"For {name}:") + 1 :]
    build, export = (shlex.split(line) for line in closing[:2])
    assert build == ["chatmill", "build", "recipe.yaml", "--out", "built"]
    run_build("recipe.yaml", "built", workers=0)
    exported = invoke(*export[1:])
    assert exported.exit_code == 0, exported.output
    _, _, printed = exported.output.partition(f"For the config of {name}:\n")
    config = printed.rpartition("\n\n")[0].splitlines()
    said = [line.removeprefix("    ") for line in closing[3:]]
    if name in TRAINER_LINES:
        # Lengths are those of the whole set there, and the largest that can be here.
        assert [re.sub(r"\d+", "N", line) for line in said] == [re.sub(r"\d+", "N", line) for line in config]
    else:
        assert not said
