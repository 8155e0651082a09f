"""The engines of a tokenizer: the fast one is checked against the reference, which stands in where it is missing."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.compiler.run import run_build
from chatmill.core.conversation import Conversation
from chatmill.errors import SlowEngineWarning, TokenizerError, UnknownNameError
from chatmill.tokenizer import backends, tiktoken_file
from chatmill.tokenizer.backends import Engine, GigatokenBackend, HuggingFaceBackend
from chatmill.tokenizer.json_file import TokenizerJson
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens
from chatmill.tokenizer.probe import PROBE, answers_of
from tests.cli.run import chatmill
from tests.compiler.builds import chats, digest, plain_recipe, write_jsonl
from tests.data.tokenizer_files import loaded, unpacked
from tests.tokenizer.small_models import FOLDERS


def source_of(name: str) -> Any:
    return name if name == "o200k" else unpacked(name)


def _json_of(name: str) -> bytes:
    if name in FOLDERS:
        return json.dumps(FOLDERS[name]["tokenizer.json"]).encode()
    return (unpacked(name) / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", ["byte_level", "with_bytes", "qwen3", "tiny_torchtitan"])
def test_a_model_from_decoded_tables_is_the_one_of_the_file(name: str) -> None:
    file = TokenizerJson(_json_of(name), name)
    ordinary = [token["content"] for token in file.added_tokens if not token.get("special")]
    hidden = {token["id"] for token in file.added_tokens if token.get("special")}
    stripped = file.stripped(hidden, ordinary)
    parsed = HuggingFaceBackend(stripped)
    from_tables = HuggingFaceBackend(stripped, file)
    assert from_tables._tokenizer.to_str() == parsed._tokenizer.to_str()
    assert (len(ordinary) > 5) == (name == "qwen3")
    assert (file.byte_pair_model(stripped) is None) == (name == "with_bytes"), "its merges are texts"


@pytest.mark.parametrize(
    "change",
    [
        {"merges": [["a", "absent"]]},
        {"merges": [["h", "i"]], "unk_token": 3},
        {"merges": [["h", "i"]], "dropout": 2.0},
        {"merges": [["h"]]},
    ],
)
def test_a_wrong_model_is_told_as_the_library_tells_it(change: dict[str, Any]) -> None:
    model = {**FOLDERS["byte_level"]["tokenizer.json"]["model"], **change}
    raw = json.dumps({**FOLDERS["byte_level"]["tokenizer.json"], "model": model}).encode()
    file = TokenizerJson(raw, "x")
    told = []
    for known in (None, file):
        with pytest.raises(TokenizerError) as error:
            HuggingFaceBackend.from_json(file.stripped(set()), known)
        told.append(str(error.value))
    assert told[0] == told[1]


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "o200k"])
def test_both_engines_are_one_tokenizer_with_the_same_answers(
    name: str, real_conversations: Callable[[int], list[Conversation]]
) -> None:
    fast: Any = loaded(name)
    reference: Any = load_tokenizer(source_of(name), engine="reference")
    unchecked: Any = load_tokenizer(source_of(name), engine="unchecked")
    slow = "tiktoken" if name == "o200k" else "tokenizers"
    assert [one.backend.name for one in (fast, unchecked, reference)] == ["gigatoken", "gigatoken", slow]
    assert reference.fingerprint == fast.fingerprint
    assert (reference.vocab_size, reference.control_ids) == (fast.vocab_size, fast.control_ids)
    texts = [message.content for one in real_conversations(3) for message in one.messages]
    assert len(texts) > 150
    (ids, offsets), (slow_ids, slow_offsets) = fast.encode_batch(texts), reference.encode_batch(texts)
    assert np.array_equal(ids, slow_ids)
    assert np.array_equal(offsets, slow_offsets)
    assert reference.decode(slow_ids) == fast.decode(ids)
    assert pickle.loads(pickle.dumps(reference)).backend.name == slow
    answers = pickle.loads(pickle.dumps(answers_of(reference)))
    assert answers == answers_of(unchecked)
    assert (len(answers.ids), len(answers.normalized)) == (len(PROBE), len(PROBE))
    assert (answers.normalized != PROBE) == (name == "qwen3")  # it has a normalizer
    assert answers.given_by(unchecked)
    assert answers.given_by(with_control_tokens(unchecked, ["<|more|>"]))


def test_other_answers_and_bytes_that_do_not_add_up_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    reference: Any = load_tokenizer(unpacked("gpt2"), engine="reference")
    unchecked: Any = load_tokenizer(unpacked("gpt2"), engine="unchecked")
    answers = answers_of(reference)
    assert not answers.given_by(load_tokenizer(unpacked("qwen3"), engine="unchecked"))
    other = replace(unchecked, text_tokens={**unchecked.text_tokens, answers.ids[5][0]: b"?"})
    assert (answers.given_by(unchecked), answers.given_by(other)) == (True, False)
    original = GigatokenBackend.encode_batch
    telling = [text for text in PROBE if len(set(unchecked.encode(text))) > 1]
    assert len(telling) > 15
    for wrong in telling:

        def encode(self: GigatokenBackend, texts: Any, wrong: str = wrong) -> Any:
            ids, offsets = original(self, texts)
            return (np.roll(ids, 1) if list(texts) == [wrong] else ids), offsets

        monkeypatch.setattr(GigatokenBackend, "encode_batch", encode)
        assert not answers.given_by(unchecked)


def test_an_engine_that_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tiktoken_file, "PATTERN", r"\S+|\s+")
        with pytest.raises(TokenizerError, match="differ on"):
            load_tokenizer("o200k")
    original = GigatokenBackend.encode_batch

    def wrong(self: GigatokenBackend, texts: Any) -> Any:
        ids, offsets = original(self, texts)
        return (ids[::-1].copy() if len(ids) > 5 else ids), offsets

    monkeypatch.setattr(GigatokenBackend, "encode_batch", wrong)
    assert load_tokenizer(unpacked("gpt2")).backend.name == "tokenizers"
    with pytest.raises(TokenizerError, match="differ on"):
        load_tokenizer("o200k")


ONE = Path(__file__).parents[2] / ".tokenizers-1"
"""Where `make setup` puts `tokenizers` 1.0, whose classes are others."""
WITH_ONE = """
import sys
import tokenizers
from chatmill.errors import TokenizerError
from chatmill.tokenizer.load import load_tokenizer
from chatmill.tokenizer.probe import PROBE, disagreement

assert tokenizers.__version__.startswith("1.")
known, other = sys.argv[1:]
fast, reference = load_tokenizer(known), load_tokenizer(known, engine="reference")
assert (fast.backend.name, reference.backend.name) == ("gigatoken", "tokenizers")
assert disagreement(fast.backend, reference.backend) is None
assert fast.bytes_add_up and reference.bytes_add_up and fast.fingerprint == reference.fingerprint
assert all(reference.decode(reference.encode(text)) == reference.normalize(text) for text in PROBE)
try:
    load_tokenizer(other)
except TokenizerError as error:
    print(error)
"""


@pytest.mark.skipif(not ONE.is_dir(), reason="tokenizers 1.0 is not in .tokenizers-1 (make setup)")
def test_tokenizers_one_reads_vocabularies_whose_bytes_add_up_and_refuses_others(tmp_path: Path) -> None:
    data = json.loads((unpacked("gpt2") / "tokenizer.json").read_text())
    lower = tmp_path / "tokenizer.json"
    lower.write_text(json.dumps({**data, "normalizer": {"type": "Lowercase"}}))
    command = [sys.executable, "-c", WITH_ONE, str(unpacked("gpt2")), str(lower)]
    paths = [str(ONE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "a normalizer of its own (Lowercase): pip install 'tokenizers<1'" in done.stdout


# -- gigatoken that cannot be imported, in this process and in others -----------------------------------------------

BLOCKER = """
import sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "gigatoken":
            raise ImportError("blocked by a test")


sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    monkeypatch.setattr(backends, "_WARNED", set())


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("gpt2", "2"),
        ("o200k", "0"),
        *(pytest.param(*given, marks=pytest.mark.slow) for given in (("gpt2", "0"), ("o200k", "2"))),
    ],
)
def test_a_build_without_gigatoken_gives_the_same_bytes_with_one_warning(
    tmp_path: Path, name: str, workers: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    folders = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    recipe = plain_recipe(write_jsonl(tmp_path / "chats.jsonl", chats(60)), tokenizer=str(source_of(name)))
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    run_build({**recipe, "shard_bytes": 4000}, tmp_path / "good", workers=0)
    options = ("--workers", workers, "--set", "shard_bytes=4000")
    blocked = {"PYTHONPATH": os.pathsep.join(folders).rstrip(os.pathsep)}
    result = chatmill("build", tmp_path / "recipe.yaml", "--out", tmp_path / "bad", *options, env=blocked)
    assert result.returncode == 0, result.stderr
    said = re.findall(r"gigatoken cannot be imported \(ImportError: blocked by a test\)", result.stderr)
    assert len(said) == 1, result.stderr
    assert result.stderr.startswith("chatmill: Warning: gigatoken"), result.stderr
    assert digest(tmp_path / "bad") == digest(tmp_path / "good")


@pytest.mark.parametrize("name", ["gpt2", "o200k"])
def test_a_process_without_gigatoken_is_warned_once(missing: None, name: str) -> None:
    with pytest.warns(SlowEngineWarning, match=r"gigatoken cannot be imported .*pip install"):
        tokenizer: Any = load_tokenizer(source_of(name))
    assert tokenizer.backend.name != "gigatoken"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = load_tokenizer(source_of(name))
    assert list(again.encode("a b")) == list(tokenizer.encode("a b"))


def test_no_engine_at_all_is_one_error_with_a_way_out(missing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownNameError, match="fast, unchecked, reference"):
        load_tokenizer("bytes", engine="slow")
    monkeypatch.setattr(tiktoken_file, "_reference", lambda ranks: None)
    with pytest.raises(TokenizerError, match="tiktoken, the reference engine, is not installed"):
        load_tokenizer("o200k", engine=Engine.REFERENCE)
    with pytest.raises(TokenizerError, match=r"gigatoken cannot be imported .*chatmill\[harmony\]"):
        load_tokenizer("o200k")
