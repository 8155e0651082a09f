"""Models that need more embeddings, and conversations with a trained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from chatmill.cli import app
from chatmill.cli.train_data import make_model
from chatmill.cli.train_recipe import read_recipe
from chatmill.cli.vocabulary import RunVocabulary
from chatmill.errors import ChatmillError, ConfigError
from chatmill.train.foreign_model import ForeignModel
from chatmill.train.generate import FinishReason, Generated
from chatmill.train.gpt import GPT
from chatmill.train.open_model import open_model
from chatmill.train.prompt import Reply
from tests.load.sets import write_set
from tests.train.test_checkpoint import tiny_foreign
from tests.train.test_trainer import loader_over, small_items
from tests.train.tiny import tiny_gpt

KNOWN = RunVocabulary(size=103, pad_id=1, fingerprint="a", notes={})


def recipe(tmp_path: Path, model: str) -> Any:
    (tmp_path / "r.yaml").write_text(f"out: {tmp_path / 'run'}\nmodel: {model}\n")
    return read_recipe(tmp_path / "r.yaml", {})


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "own", "own untied"])
def test_embeddings_grow_on_request_and_are_saved(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    if kind.startswith("own"):
        source.mkdir()
        tiny_gpt(layers=1, tied=kind == "own").save_weights(source)
    else:
        tiny_foreign(kind, source)
    with pytest.raises(ConfigError, match=r"97 embeddings, but the tokenizer has 103 ids.*model.resize"):
        make_model(recipe(tmp_path, f"{{path: {source}}}"), KNOWN)
    grown = make_model(recipe(tmp_path, f"{{path: {source}, resize: true}}"), KNOWN)
    old = open_model(source)
    parts = [(old.head_weight, grown.head_weight)]
    if isinstance(grown, ForeignModel):
        parts.append((old.inner.get_input_embeddings().weight, grown.inner.get_input_embeddings().weight))
    else:
        assert isinstance(grown, GPT)
        parts.append((old.embedding.weight, grown.embedding.weight))
    for before, after in parts:
        assert after.shape == (103, before.shape[1])
        assert torch.equal(after[:97], before)
        assert torch.allclose(after[97:], before.mean(0).expand(6, -1))
    write_set(tmp_path / "set", small_items(12))
    options: dict[str, Any] = {"learning_rate": 1e-2, "out": tmp_path / "run"}
    grown.fit(loader_over(tmp_path / "set", pack=True), steps=2, **options)
    again = make_model(recipe(tmp_path, f"{{path: {source}, resize: true}}"), KNOWN)
    assert again.fit(loader_over(tmp_path / "set", pack=True), steps=3, **options).step == 3
    saved = open_model(tmp_path / "run")
    assert torch.equal(saved.head_weight, again.head_weight)
    assert len(saved.head_weight) == 103


def test_resize_goes_with_a_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.resize goes with model.path"):
        make_model(recipe(tmp_path, "{layers: 1, resize: true}"), KNOWN)


def test_a_word_that_means_no_flag_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.random_weights is 'maybe'"):
        make_model(recipe(tmp_path, f"{{path: {tmp_path}, check_tokenizer: no, random_weights: maybe}}"), KNOWN)


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A checkpoint with notes, and the conversations that it is asked."""
    from chatmill.train import prompt
    from chatmill.train.checkpoint import RunState, TrainingSpec, save_checkpoint
    from chatmill.train.config import TrainConfig
    from chatmill.train.step import make_optimizer

    model = tiny_gpt(vocab_size=384, layers=1)
    notes = {"tokenizer": "bytes", "template": "chatml", "add_control_tokens": True}
    spec = TrainingSpec(mode="training", data=None, tokenizer=None)
    state = RunState(step=1, phase_start=0, spec=spec, loader=None, notes=notes)
    save_checkpoint(tmp_path, model, make_optimizer(model, TrainConfig()), state, keep=1)
    asked: list[list[tuple[str, str]]] = []

    def ask(model: Any, bound: Any, messages: Any, *, sampling: Any) -> Reply:
        asked.append([(message["role"], message["content"]) for message in messages])
        text = f"answer {len(asked)}"
        made = Generated(ids=(1, 2), finish=FinishReason.STOP, stop_id=3)
        return Reply(text=f"<|x|>{text}", stop="<|im_end|>", generated=made, content=text)

    monkeypatch.setattr(prompt, "ask", ask)
    return asked


def sample(tmp_path: Path, *arguments: str, text: str | None = None) -> Any:
    return CliRunner().invoke(app, ["sample", str(tmp_path), *arguments], input=text)


def test_several_prompts_are_turns_of_one_conversation(tmp_path: Path, answers: Any) -> None:
    done = sample(tmp_path, "one", "two", "--system", "be", "--json")
    assert done.exit_code == 0, done.output
    assert answers == [
        [("system", "be"), ("user", "one")],
        [("system", "be"), ("user", "one"), ("assistant", "answer 1"), ("user", "two")],
    ]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["prompt"], line["text"]) for line in lines] == [("one", "<|x|>answer 1"), ("two", "<|x|>answer 2")]
    assert sample(tmp_path, text="three\n\nfour\n").exit_code == 0
    assert answers[-1] == [("user", "three"), ("assistant", "answer 3"), ("user", "four")]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    failed = sample(tmp_path / "runs", "one")
    assert isinstance(failed.exception, ChatmillError)
    assert f"there is no folder {tmp_path / 'runs'}" in str(failed.exception)


def test_a_conversation_comes_from_a_file(tmp_path: Path, answers: Any) -> None:
    path = tmp_path / "chat.json"
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path.write_text(json.dumps({"messages": said}))
    assert sample(tmp_path, "c", "--messages", str(path)).exit_code == 0
    assert answers[-1] == [("user", "a"), ("assistant", "b"), ("user", "c")]
    path.write_text(json.dumps(said[:1]))
    assert sample(tmp_path, "--messages", str(path)).exit_code == 0
    assert answers[-1] == [("user", "a")]
    for text, arguments, says in (
        (json.dumps(said[:1]), ["c"], "give no PROMPT"),
        ("{", ["c"], "cannot be read as JSON"),
        ('{"messages": [{"role": "x"}]}', ["c"], "role"),
        ('[{"role": "system", "content": "s"}]', ["c", "--system", "t"], "leave --system out"),
    ):
        path.write_text(text)
        failed = sample(tmp_path, *arguments, "--messages", str(path))
        assert isinstance(failed.exception, ChatmillError)
        assert says in str(failed.exception)


def test_the_content_of_an_answer_is_what_stands_behind_its_control_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from chatmill.render.registry import bind
    from chatmill.tokenizer.load import load_tokenizer
    from chatmill.train import prompt

    tokenizer = load_tokenizer("bytes", control_tokens=["<|im_start|>", "<|im_end|>", "<|channel|>"])
    ids = (*tokenizer.encode("x"), tokenizer.control("<|channel|>"), *tokenizer.encode("yes"))
    made = Generated(ids=ids, finish=FinishReason.LENGTH, stop_id=None)
    monkeypatch.setattr(prompt, "generate", lambda *given, **options: made)
    answer = prompt.ask(None, bind("chatml", tokenizer), [{"role": "user", "content": "a"}])
    assert (answer.text, answer.content) == ("x<|channel|>yes", "yes")
