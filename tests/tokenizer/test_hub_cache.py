"""Models by their hub names: found in the local cache, and a missing one gives the line that fetches it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from chatmill.compiler.recipe import recipe_of
from chatmill.errors import ConfigError, TokenizerError
from chatmill.render.registry import bind, find_template, has_template
from chatmill.tokenizer.hub_cache import cached_model
from chatmill.tokenizer.load import load_tokenizer
from tests.conftest import DATA

NAME = "Qwen/Qwen3-0.6B"
COMMIT = "0123456789abcdef"
LINE = f'hf download {NAME} --include "*.json" --include "*.jinja"'


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def put(cache: Path, *, ref: bool = True) -> Path:
    model = cache / "models--Qwen--Qwen3-0.6B"
    shutil.copytree(DATA / "tokenizers" / "qwen3", model / "snapshots" / COMMIT)
    if ref:
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text(COMMIT)
    return model


@pytest.mark.parametrize("ref", [True, False])
def test_a_model_in_the_cache(cache: Path, ref: bool) -> None:
    model = put(cache, ref=ref)
    assert cached_model(NAME) == model / "snapshots" / COMMIT
    tokenizer = load_tokenizer(NAME)
    assert tokenizer.name == "Qwen3-0.6B"
    assert tokenizer.fingerprint == load_tokenizer(DATA / "tokenizers" / "qwen3").fingerprint
    assert has_template(NAME)
    assert find_template(NAME).name == "Qwen3-0.6B"
    assert bind(NAME, tokenizer).name == "Qwen3-0.6B"
    assert recipe_of({"sources": [{"path": "x"}], "tokenizer": NAME}).template == NAME


def test_a_model_that_is_not_there_gives_the_line_that_fetches_it(cache: Path) -> None:
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(NAME)
    assert LINE in str(caught.value)
    assert str(cache) in str(caught.value)
    with pytest.raises(ConfigError) as refused:
        find_template(NAME)
    assert LINE in str(refused.value)
    assert not has_template(NAME)


def test_a_folder_of_that_name_goes_before_the_cache(cache: Path, tmp_path: Path) -> None:
    put(cache)
    shutil.copytree(DATA / "tokenizers" / "qwen3", tmp_path / NAME)
    assert cached_model(NAME) is None
    assert load_tokenizer(NAME).name == "Qwen3-0.6B"


def test_two_states_without_a_main_branch_are_not_guessed_between(cache: Path) -> None:
    model = put(cache, ref=False)
    (model / "snapshots" / "other").mkdir()
    assert cached_model(NAME) is None
