"""The vocabulary file of o200k: where it is looked for, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatmill.errors import TokenizerError
from chatmill.tokenizer import assets
from chatmill.tokenizer.load import load_tokenizer

# -- the o200k asset ------------------------------------------------------------------------------------------------


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("O200K_HARMONY_VOCAB_PATH", raising=False)
    monkeypatch.delenv("TIKTOKEN_ENCODINGS_BASE", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_asset_is_found_in_the_stated_order(no_variables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled = assets.find_o200k()
    raw = bundled.read_bytes()
    copies = {name: no_variables / name / assets.O200K_FILE for name in ("explicit", "variable", "folder")}
    copies["project"] = no_variables / assets.PROJECT_COPY
    for path in copies.values():
        path.parent.mkdir(parents=True)
        path.write_bytes(raw)
    assert assets.find_o200k().resolve() == copies["project"]
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(copies["folder"].parent))
    assert assets.find_o200k() == copies["folder"]
    monkeypatch.setenv("O200K_HARMONY_VOCAB_PATH", str(copies["variable"]))
    assert assets.find_o200k() == copies["variable"]
    assert assets.find_o200k(copies["explicit"]) == copies["explicit"]


def test_a_wrong_hash_shows_both(no_variables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = no_variables / "o.tiktoken"
    path.write_text("aA== 0\n")
    monkeypatch.setenv("O200K_HARMONY_VOCAB_PATH", str(path))
    with pytest.raises(TokenizerError, match=f"(?s)sha256 is [0-9a-f]{{64}}, expected {assets.O200K_SHA256}"):
        load_tokenizer("o200k")


@pytest.mark.parametrize("variable", ["O200K_HARMONY_VOCAB_PATH", "TIKTOKEN_ENCODINGS_BASE"])
def test_a_variable_that_names_nothing(variable: str, no_variables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, str(no_variables / "nothing"))
    with pytest.raises(TokenizerError, match=variable):
        load_tokenizer("o200k")


def test_the_bundled_copy_survives_a_damaged_cache(no_variables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(no_variables))
    assets.bundled_o200k.cache_clear()
    path = assets.find_o200k()
    assert path.is_relative_to(no_variables)
    path.write_text("damaged")
    assets.bundled_o200k.cache_clear()
    assert assets.find_o200k().stat().st_size > 3_000_000
    assets.bundled_o200k.cache_clear()
