"""Where tokenizers are loaded from: objects, files, the local hub cache; what a file says; what is refused."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from chatmill.compiler.recipe import recipe_of
from chatmill.errors import ConfigError, TokenizerError
from chatmill.render.registry import bind, find_template, has_template
from chatmill.tokenizer import assets
from chatmill.tokenizer.backends import Engine
from chatmill.tokenizer.hf_json import tokenizer_from_json
from chatmill.tokenizer.hub_cache import cached_model
from chatmill.tokenizer.json_file import TokenizerJson, spelled_tokens
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens
from chatmill.tokenizer.probe import PROBE
from chatmill.tokenizer.tokenizer import Tokenizer
from tests.conftest import DATA
from tests.data.tokenizer_files import loaded, unpacked

QWEN3 = DATA / "tokenizers" / "qwen3"


def test_all_ways_in_give_the_same_tokenizer(gpt2: Any) -> None:
    import transformers

    folder = unpacked("gpt2")
    assert isinstance(gpt2, Tokenizer)
    assert load_tokenizer(gpt2) is gpt2
    from_file = load_tokenizer(folder / "tokenizer.json")
    packed = load_tokenizer(DATA / "tokenizers" / "gpt2" / "tokenizer.json.xz")
    assert from_file.fingerprint == gpt2.fingerprint == packed.fingerprint
    object_of_theirs = load_tokenizer(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))
    assert object_of_theirs.control_ids == gpt2.control_ids
    theirs = load_tokenizer(transformers.AutoTokenizer.from_pretrained(folder))
    assert (theirs.eos_id, theirs.bos_id) == (gpt2.eos_id, gpt2.bos_id)
    assert pickle.loads(pickle.dumps(theirs)).named_tokens == theirs.named_tokens != {}
    for text in PROBE:
        assert object_of_theirs.encode(text) == theirs.encode(text) == gpt2.encode(text)
    more = with_control_tokens(gpt2, ["<|x|>", "<|y|>"])
    back = pickle.loads(pickle.dumps(more))
    assert (back.fingerprint, back.encode("hello <|x|>")) == (more.fingerprint, more.encode("hello <|x|>"))


def test_fingerprints_tell_tokenizers_apart(qwen3: Any, gpt2: Any, o200k: Any) -> None:
    """Also by how added tokens match."""
    more = with_control_tokens(qwen3, ["<|x|>"])
    assert len({t.fingerprint for t in (qwen3, gpt2, o200k, loaded("qwen3_base"), more)}) == 5
    data = json.loads((unpacked("gpt2") / "tokenizer.json").read_text())
    data["model"] = {**data["model"], "merges": []}
    (token,) = data["added_tokens"]
    changed = [{**token, flag: not token.get(flag)} for flag in ("lstrip", "rstrip", "single_word")]
    files = [json.dumps({**data, "added_tokens": [one]}).encode() for one in (token, *changed)]
    assert len({tokenizer_from_json(file, "x", engine=Engine.REFERENCE).fingerprint for file in files}) == 4


def test_the_file_of_o200k_is_o200k_and_no_other_file_is(tmp_path: Path, o200k: Any) -> None:
    assert load_tokenizer(assets.find_o200k()).fingerprint == o200k.fingerprint
    (tmp_path / "x.tiktoken").write_text("aA== 0\n")
    with pytest.raises(TokenizerError, match=r"x\.tiktoken .*not the o200k vocabulary.*tokenizer\.json"):
        load_tokenizer(tmp_path / "x.tiktoken")


# -- a tokenizer.json: what its fingerprint covers, and the bytes of its tokens --------------------------------------


def fingerprint(data: Any, **style: Any) -> str:
    return TokenizerJson(json.dumps(data, **style).encode(), "x").fingerprint()


@pytest.fixture(scope="module", params=["part", pytest.param("whole", marks=pytest.mark.slow)])
def data(request: pytest.FixtureRequest) -> Any:
    """GPT-2's file, with all tokens and merges or few of them."""
    data = json.loads((unpacked("gpt2") / "tokenizer.json").read_bytes())
    if request.param == "part":
        model = data["model"]
        data["model"] = {**model, "vocab": dict(list(model["vocab"].items())[:2000]), "merges": model["merges"][:2000]}
    return data


def merges_of(data: Any, *, pairs: bool) -> Any:
    """The same file with its merges as pairs, or as strings."""
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in data["model"]["merges"]]
    return {**data, "model": {**data["model"], "merges": merges if pairs else list(map(" ".join, merges))}}


def test_the_way_a_file_is_written_is_no_part_of_the_fingerprint(data: Any) -> None:
    """Flags that say nothing may be left out, and the order of keys is nobody's business."""
    vocab = list(data["model"]["vocab"].items())
    random.Random(0).shuffle(vocab)
    shuffled = {**data, "model": {**data["model"], "vocab": dict(vocab)}}
    strings, pairs = (merges_of(data, pairs=one) for one in (False, True))
    model = dict(reversed([(k, v) for k, v in data["model"].items() if v not in (None, False, "")]))
    other_keys = {**dict(reversed(data.items())), "model": {**model, "dropout": None}}
    assert json.dumps(strings) != json.dumps(pairs)
    assert {fingerprint(one) for one in (shuffled, strings, pairs, other_keys)} == {fingerprint(data)}
    assert fingerprint(data, ensure_ascii=False, indent=3) == fingerprint(data, ensure_ascii=True)


def test_every_rule_is_part_of_the_fingerprint(data: Any) -> None:
    vocab, merges = data["model"]["vocab"], data["model"]["merges"]
    one, other = list(vocab)[10:12]
    last = max(vocab, key=vocab.__getitem__)
    models: list[dict[str, Any]] = [
        {"vocab": {**vocab, one: vocab[other], other: vocab[one]}},
        {"vocab": {("zzz" if name == one else name): token_id for name, token_id in vocab.items()}},
        {"vocab": {**vocab, last: vocab[last] + 1}},
        {"merges": [merges[1], merges[0], *merges[2:]]},
        {"merges": merges[:-1]},
        {"ignore_merges": True},
    ]
    changes = [{"model": {**data["model"], **model}} for model in models]
    changes += [{"normalizer": {"type": "Lowercase"}}, {"pre_tokenizer": {"type": "Whitespace"}}]
    assert len({fingerprint({**data, **change}) for change in ({}, *changes)}) == len(changes) + 1


HIDDEN = [byte for byte in range(256) if not (0x21 <= byte < 0x7F or (0xA1 <= byte < 0x100 and byte != 0xAD))]
BYTES_OF = {chr(byte): byte for byte in range(256) if byte not in HIDDEN}
BYTES_OF |= {chr(0x100 + place): byte for place, byte in enumerate(HIDDEN)}


def _spelled_slowly(token: str) -> bytes:
    """A token of a byte-level vocabulary, letter by letter."""
    return bytes(map(BYTES_OF.__getitem__, token)) if set(token) <= BYTES_OF.keys() else token.encode()


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_tokens_are_spelled_as_the_fast_engine_spells_them(name: str) -> None:
    fast: Any = loaded(name)
    ordinary = {token: fast.control(token) for token in fast.ordinary}
    file = TokenizerJson((unpacked(name) / "tokenizer.json").read_bytes(), name)
    spelled = spelled_tokens(file, ordinary)
    assert len(spelled) > 50_000
    assert spelled == {i: value for i, value in fast.backend.vocabulary().items() if i in spelled}
    slowly = {i: _spelled_slowly(token) for token, i in zip(*file.spellings(), strict=True)}
    assert spelled == slowly | {i: token.encode() for token, i in ordinary.items()}


@given(st.lists(st.text(st.characters(max_codepoint=0x150) | st.characters(exclude_categories=["Cs"])), unique=True))
def test_tokens_with_letters_that_stand_for_no_byte_are_spelled_as_they_are(tokens: list[str]) -> None:
    vocab = {token: 3 * place for place, token in enumerate(tokens)}
    raw = json.dumps({"model": {"vocab": vocab}, "decoder": {"type": "ByteLevel"}}).encode()
    assert spelled_tokens(TokenizerJson(raw, "x"), {}) == {i: _spelled_slowly(token) for token, i in vocab.items()}


# -- refusals -------------------------------------------------------------------------------------------------------

MODEL = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
BESIDE = "tokenizer_config.json"
GOOD = {"tokenizer.json": {"model": MODEL}}


def damaged(**parts: Any) -> dict[str, Any]:
    return {"tokenizer.json": {"model": MODEL, **parts}}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"holds no tokenizer\.json"),
        ({"tokenizer.json": {}}, "is not a tokenizer"),
        (damaged(added_tokens=[{"id": 1}]), "folder"),
        (damaged(added_tokens=[{"content": "<x>", "id": "1"}]), "folder"),
        (damaged(added_tokens={"<x>": 1}), "folder"),
        (damaged(normalizer="NFC"), "folder"),
        (damaged(normalizer={"type": "Sequence"}), "folder"),
        (damaged(pre_tokenizer={"type": "Sequence", "pretokenizers": [1]}), "folder"),
        (damaged(pre_tokenizer={"type": "Sequence", "pretokenizers": 1}), "folder"),
        ({**GOOD, BESIDE: {"added_tokens_decoder": {"x": {"content": "<a>"}}}}, "added_tokens_decoder"),
        ({**GOOD, BESIDE: {"added_tokens_decoder": {"1": "<a>"}}}, "added_tokens_decoder"),
        ({**GOOD, BESIDE: {"added_tokens_decoder": {"1": {}}}}, "added_tokens_decoder"),
        ({**GOOD, BESIDE: {"added_tokens_decoder": ["<a>"]}}, "added_tokens_decoder"),
        (
            {
                **damaged(added_tokens=[{"id": 1, "content": "<a>"}]),
                BESIDE: {"added_tokens_decoder": {"2": {"content": "<a>"}}},
            },
            r"'<a>' is id 1 in tokenizer\.json and id 2 in tokenizer_config\.json",
        ),
        ({"tokenizer.json.xz": {}}, "cannot be unpacked"),
    ],
)
def test_a_damaged_folder_is_a_clear_error(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(folder)


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"model": null}', b'{"model": 3}', b'{"model": {"vocab": {}'])
def test_what_is_no_tokenizer_file_is_said(raw: bytes) -> None:
    with pytest.raises(TokenizerError, match=r"thing is not a tokenizer\.json"):
        TokenizerJson(raw, "thing")


def test_what_is_nothing_to_load_or_to_encode_is_a_clear_error(gpt2: Any, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no tokenizer 'nowhere'"):
        load_tokenizer("nowhere")
    with pytest.raises(TokenizerError, match="cannot use a int"):
        load_tokenizer(7)
    with pytest.raises(TokenizerError, match="text 1 has a lone surrogate at character 2"):
        gpt2.encode_batch(["fine", "ab\ud800"])
    (tmp_path / BESIDE).write_text(json.dumps({"chat_template": [{"name": "default"}]}))
    with pytest.raises(ConfigError, match="no object with a name and a template"):
        find_template(tmp_path)


# -- models by their hub names --------------------------------------------------------------------------------------

NAME = "Qwen/Qwen3-0.6B"
LINE = f'hf download {NAME} --include "*.json" --include "*.jinja"'


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cache has the model, if it has it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub" / "models--Qwen--Qwen3-0.6B"


def test_a_model_in_the_cache(model: Path) -> None:
    """Its main branch names its state; without one, none is guessed."""
    shutil.copytree(QWEN3, model / "snapshots" / "0123456789abcdef")
    (model / "snapshots" / "other").mkdir()
    assert cached_model(NAME) is None
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0123456789abcdef")
    assert cached_model(NAME) == model / "snapshots" / "0123456789abcdef"
    tokenizer = load_tokenizer(NAME)
    assert tokenizer.name == find_template(NAME).name == bind(NAME, tokenizer).name == "Qwen3-0.6B"
    assert tokenizer.fingerprint == load_tokenizer(QWEN3).fingerprint
    assert has_template(NAME)
    assert recipe_of({"sources": [{"path": "x"}], "tokenizer": NAME}).template == NAME


def test_a_model_that_is_not_there_gives_the_line_that_fetches_it(model: Path) -> None:
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(NAME)
    assert LINE in str(caught.value)
    assert str(model.parent) in str(caught.value)
    with pytest.raises(ConfigError) as refused:
        find_template(NAME)
    assert LINE in str(refused.value)
    assert not has_template(NAME)


def test_a_folder_of_that_name_goes_before_the_cache(model: Path, tmp_path: Path) -> None:
    shutil.copytree(QWEN3, model / "snapshots" / "0123456789abcdef")
    shutil.copytree(QWEN3, tmp_path / NAME)
    assert cached_model(NAME) is None
    assert load_tokenizer(NAME).name == "Qwen3-0.6B"


# -- the file of o200k ----------------------------------------------------------------------------------------------


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("O200K_HARMONY_VOCAB_PATH", raising=False)
    monkeypatch.delenv("TIKTOKEN_ENCODINGS_BASE", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_file_is_found_in_the_stated_order(no_variables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = assets.find_o200k().read_bytes()
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


def test_variables_that_name_nothing_or_another_file_are_refused(
    no_variables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = no_variables / "o.tiktoken"
    path.write_text("aA== 0\n")
    wrong_hash = f"(?s)sha256 is [0-9a-f]{{64}}, expected {assets.O200K_SHA256}"
    cases = [("TIKTOKEN_ENCODINGS_BASE", "nothing", "TIKTOKEN_ENCODINGS_BASE")]
    cases += [("O200K_HARMONY_VOCAB_PATH", "nothing", "O200K_HARMONY_VOCAB_PATH")]
    for variable, value, message in (*cases, ("O200K_HARMONY_VOCAB_PATH", "o.tiktoken", wrong_hash)):
        monkeypatch.setenv(variable, str(no_variables / value))
        with pytest.raises(TokenizerError, match=message):
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
