"""`chatmill train` refuses what does not fit: rows that cut, models of another tokenizer, ids without an embedding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chatmill.cli import app
from chatmill.cli.train_data import make_model
from chatmill.cli.train_recipe import read_recipe
from chatmill.cli.vocabulary import RunVocabulary, difference, refuse_other_tokenizer
from chatmill.errors import ConfigError, DataError
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens
from tests.load.sets import PAD, Item, write_set
from tests.train.test_checkpoint import tiny_foreign
from tests.train.tiny import tiny_gpt

RECIPE = """
out: OUT
model: {layers: 1, hidden: 16, heads: 2, vocab_size: 128}
data: {dataset: SET, batch_size: 2, block_size: 8, pad_token_id: 1, MORE}
train: {steps: 2}
"""
LONG = [Item(ids=list(range(2, 22)), weights=[0] * 12 + [1] * 8) for _ in range(4)]
SHORT = Item(ids=[2, 3, 4], weights=[0, 1, 1])
FILES = Path(__file__).parents[1] / "data/tokenizers"


def train(tmp_path: Path, more: str = "") -> Any:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE.replace("OUT", str(tmp_path / "run")).replace("SET", str(tmp_path)).replace("MORE", more))
    return CliRunner().invoke(app, ["train", str(path), "--quiet"])


def test_rows_shorter_than_the_episodes_are_an_error_or_a_choice(tmp_path: Path) -> None:
    write_set(tmp_path, [*LONG, SHORT])
    refused = train(tmp_path)
    assert isinstance(refused.exception, ConfigError)
    assert "32 of the 32 trained ones (100%), would be lost" in str(refused.exception)
    assert "block_size=19" in str(refused.exception)
    assert not (tmp_path / "run").exists()
    assert "data.overflow is 'maybe'; allowed: error, cut, drop" in str(train(tmp_path, "overflow: maybe").exception)
    dropped = train(tmp_path, "overflow: drop")
    assert dropped.exit_code == 0, dropped.output
    assert "1 episodes, 80 tokens left out (32 trained tokens, 4 episodes longer than a row)" in dropped.output


def test_a_run_that_trains_nothing_does_not_end_as_finished(tmp_path: Path) -> None:
    write_set(tmp_path, LONG)
    ended = train(tmp_path, "overflow: cut")
    assert isinstance(ended.exception, DataError)
    assert "no token was trained in 2 steps" in str(ended.exception)
    assert "finished" not in ended.stdout
    assert not (tmp_path / "run/checkpoints").exists()


def test_ids_without_an_embedding_are_refused(tmp_path: Path) -> None:
    write_set(tmp_path, [Item(ids=[2, 3, 97, 4], weights=[1] * 4)])
    loader = GPTEpisodeDataLoader({"batch_size": 1, "block_size": 4, "pad_token_id": PAD % 97}, None, tmp_path)
    with pytest.raises(DataError, match="the id 97, and the model has 97 embeddings"):
        tiny_gpt(layers=1).fit(loader, steps=1)


def known(tokenizer: Any, name: str) -> RunVocabulary:
    return RunVocabulary(size=None, pad_id=1, fingerprint=tokenizer.fingerprint, notes={"tokenizer": name})


def test_a_model_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_foreign("qwen3", folder)
    (folder / "tokenizer.json").write_bytes((FILES / "tiny_torchtitan/tokenizer.json").read_bytes())
    own, other = load_tokenizer(folder), load_tokenizer(FILES / "tiny_torchtune/tokenizer.json")
    (tmp_path / "r.yaml").write_text(f"out: {tmp_path / 'run'}\nmodel: {{path: {folder}}}\n")
    recipe = read_recipe(tmp_path / "r.yaml", {})
    with pytest.raises(ConfigError, match=r"other ids: vocabulary or rules differ.*-t .*model\.check_tokenizer"):
        make_model(recipe, known(other, str(FILES / "tiny_torchtune")))
    with pytest.raises(ConfigError, match="their fingerprints differ"):
        make_model(recipe, known(other, "no/longer/there"))
    refuse_other_tokenizer(folder, known(own, "no/longer/there"))
    refuse_other_tokenizer(tmp_path, known(other, "a folder without a tokenizer"))
    recipe.model["check_tokenizer"] = False
    make_model(recipe, known(other, "no/longer/there"))


def test_tokens_that_only_one_side_has_are_no_difference_but_moved_ones_are() -> None:
    plain = load_tokenizer("bytes")
    assert difference(plain, with_control_tokens(plain, ["<a>", "<b>"])) is None
    moved = difference(with_control_tokens(plain, ["<a>", "<b>"]), with_control_tokens(plain, ["<b>"]))
    assert moved == "'<b>' is 260 in the one and 259 in the other"
    taken = difference(with_control_tokens(plain, ["<a>"]), with_control_tokens(plain, ["<b>"]))
    assert taken == "id 259 is '<a>' in the one and '<b>' in the other"


def test_a_checkpoint_remembers_its_tokenizer(tmp_path: Path) -> None:
    notes = {"tokenizer": str(FILES / "tiny_torchtitan"), "template": None, "add_control_tokens": False}
    (tmp_path / "state.json").write_text(json.dumps({"notes": notes}))
    other = load_tokenizer(FILES / "tiny_torchtune")
    with pytest.raises(ConfigError, match="gives other ids"):
        refuse_other_tokenizer(tmp_path, known(other, str(FILES / "tiny_torchtune")))
