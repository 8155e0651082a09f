"""Builds say which tokenizer, template and policy they use, compare with the model's own, and know its vocabulary."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler import progress
from chatmill.compiler.first_recipe import look_at, recipe_text
from chatmill.compiler.progress import BuildProgress
from chatmill.compiler.recipe import recipe_of
from chatmill.compiler.run import run_build
from chatmill.compiler.sample import first_conversations
from chatmill.errors import ConfigError
from chatmill.export.export import export_dataset
from chatmill.export.hf_rows import to_hf_dataset
from tests.cli.run import here
from tests.compiler.builds import talk, write_jsonl

TOKENIZER = Path(__file__).parents[1] / "data/tokenizers/tiny_torchtune/tokenizer.json"
OWN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
CHATS = [{"id": f"r{i}", "messages": talk("one", "two")} for i in range(3)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder with a template of its own and 2,003 ids."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": OWN, "eos_token": "<|im_end|>"}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 2003}))
    return folder


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "chats.jsonl", CHATS)


def call(*arguments: Any) -> str:
    done = here(*map(str, arguments))
    assert not done.returncode, done.stderr
    return done.stdout


def test_a_build_says_what_it_chose_and_why(model: Path, chats: Path, tmp_path: Path) -> None:
    said = call("build", chats, "-o", tmp_path / "a", "-t", model, "-w", "0")
    assert f"tokenizer {model} (as asked for)" in said
    assert f"template {model} (the model's own)" in said
    assert "policy assistant (that of the template)" in said
    assert "not the model's own" not in said
    file = call("build", chats, "-o", tmp_path / "b", "-t", model / "tokenizer.json", "-w", "0")
    assert f"template {model} (the model's own)" in file  # the folder of the file has it
    plain = call("build", chats, "-o", tmp_path / "c", "-w", "0", "-t", "o200k", "--add-control-tokens")
    assert "tokenizer o200k (as asked for)" in plain
    assert "template chatml (the default: this tokenizer brings none)" in plain
    assert "added above its vocabulary" in plain
    assert "A model needs 201,090 embeddings for these ids (<|im_start|>, <|im_end|>)" in plain
    assert json.loads(call("build", chats, "-o", tmp_path / "d", "-t", model, "-w", "0", "--json"))["format"]


def test_another_template_than_the_models_own_is_named(model: Path, chats: Path, tmp_path: Path) -> None:
    said = call("build", chats, "-o", tmp_path / "a", "-t", model, "-T", "chatml", "-w", "0")
    assert f"to train that, choose --template {model}." in said
    written = recipe_text(look_at([str(chats)], tokenizer=str(model), template="chatml"))
    assert "The template chatml is not the model's own" in written
    look = look_at([str(chats)], tokenizer=str(model / "tokenizer.json"))
    assert (look.recipe.template, look.recipe.add_control_tokens) == (str(model), False)


def test_ids_beyond_the_models_vocabulary_are_an_error(model: Path, chats: Path, tmp_path: Path) -> None:
    sources: dict[str, Any] = {"sources": [{"path": str(chats)}], "tokenizer": str(model)}
    grown = {**sources, "template": "llama3", "add_control_tokens": True}
    with pytest.raises(ConfigError, match=r"adds the id 2,006, and the model has 2,003 ids .*config\.json.*vocab_size"):
        run_build(grown, tmp_path / "a", workers=0)
    run_build({**grown, "vocab_size": 2007}, tmp_path / "b", workers=0)
    (model / "config.json").unlink()
    run_build(sources, tmp_path / "c", workers=0)
    assert len(to_hf_dataset(tmp_path / "c")) == 3
    (model / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 2002}}))
    with pytest.raises(ConfigError, match="the conversations have the id 2,002, and the model has 2,002 ids"):
        run_build(sources, tmp_path / "d", workers=0)
    assert recipe_of({**sources, "vocab_size": 5}).vocab_size == 5
    for use in (to_hf_dataset, lambda folder: export_dataset(folder, "parquet")):
        with pytest.raises(ConfigError, match=r"has the id 2,002, and the model has 2,002 ids"):
            use(tmp_path / "c")
    assert len(to_hf_dataset(tmp_path / "c", model=2003)) == 3
    refused = here("export", tmp_path / "c", "--to", "parquet", "--model", "1000")
    assert "has the id 2,002, and the model has 1,000 ids" in refused.stderr
    with pytest.raises(ConfigError, match="does not say how many ids"):
        to_hf_dataset(tmp_path / "c", model=str(tmp_path))


def test_few_conversations_of_much_text_are_tried(model: Path, tmp_path: Path) -> None:
    """Reasoning and calls are text, too."""
    thought = {"role": "assistant", "content": "two", "reasoning_content": "x" * 300_000}
    talk = [{"role": "user", "content": "one"}, thought] * 2
    path = write_jsonl(tmp_path / "long.jsonl", [{"id": str(n), "messages": talk} for n in range(9)])
    recipe = recipe_of({"sources": [{"path": str(path)}], "tokenizer": str(model), "template": "chatml"})
    assert len(first_conversations(recipe)) == 2


def test_a_terminal_sees_what_a_build_is_at(model: Path, chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BuildProgress] = []
    monkeypatch.setattr(progress, "shown_progress", lambda quiet: nullcontext(seen.append))
    call("build", chats, "-o", chats.parent / "out", "-t", model, "-T", "chatml", "-w", "0")
    assert [state.stage for state in seen] == ["try a sample", "compile", "compile"]
