"""gigatoken that cannot be imported: the reference does its work with one warning, in this process and in workers."""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from chatmill import load_tokenizer
from chatmill.compiler.run import run_build
from chatmill.errors import SlowEngineWarning, TokenizerError
from chatmill.tokenizer import backends, tiktoken_file
from tests.cli.run import chatmill
from tests.compiler.builds import chats, digest, plain_recipe, write_jsonl
from tests.data.tokenizer_files import unpacked

BLOCKER = """
import sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "gigatoken":
            raise ImportError("blocked by a test")


sys.meta_path.insert(0, Blocker())
"""
SAID = re.compile(r"gigatoken cannot be imported \(ImportError: blocked by a test\)")


@pytest.fixture
def blocked(tmp_path: Path) -> dict[str, str]:
    """An environment in which no process can import gigatoken."""
    folder = tmp_path / "blocker"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BLOCKER)
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in this process."""
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    monkeypatch.setattr(backends, "_WARNED", set())


@pytest.mark.parametrize(
    ("tokenizer", "workers"),
    [
        ("gpt2", "2"),
        ("o200k", "0"),
        *(pytest.param(*given, marks=pytest.mark.slow) for given in (("gpt2", "0"), ("o200k", "2"))),
    ],
)
def test_a_build_gives_the_same_bytes_with_one_warning(
    tmp_path: Path, blocked: dict[str, str], tokenizer: str, workers: str
) -> None:
    path = write_jsonl(tmp_path / "chats.jsonl", chats(60))
    name = str(unpacked("gpt2")) if tokenizer == "gpt2" else tokenizer
    recipe = plain_recipe(path, tokenizer=name)
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    run_build({**recipe, "shard_bytes": 4000}, tmp_path / "good", workers=0)
    options = ("--workers", workers, "--set", "shard_bytes=4000")
    result = chatmill("build", tmp_path / "recipe.yaml", "--out", tmp_path / "bad", *options, env=blocked)
    assert result.returncode == 0, result.stderr
    assert len(SAID.findall(result.stderr)) == 1, result.stderr
    assert result.stderr.startswith("chatmill: Warning: gigatoken"), result.stderr
    assert digest(tmp_path / "bad") == digest(tmp_path / "good")


@pytest.mark.parametrize("name", ["gpt2", "o200k"])
def test_a_process_is_warned_once(missing: None, name: str) -> None:
    source: Any = unpacked("gpt2") if name == "gpt2" else name
    with pytest.warns(SlowEngineWarning, match=r"gigatoken cannot be imported .*pip install"):
        tokenizer = load_tokenizer(source)
    assert tokenizer.backend.name != "gigatoken"  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = load_tokenizer(source)
    assert list(again.encode("a b")) == list(tokenizer.encode("a b"))


def test_no_engine_at_all_is_one_error_with_a_way_out(missing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiktoken_file, "_reference", lambda ranks: None)
    with pytest.raises(TokenizerError, match=r"gigatoken cannot be imported .*chatmill\[harmony\]"):
        load_tokenizer("o200k")
