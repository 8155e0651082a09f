"""A tokenizer.json in parts: what its fingerprint covers and what it does not, and the bytes of its tokens."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.errors import TokenizerError
from chatmill.tokenizer.json_file import TokenizerJson, spelled_tokens
from tests.data.tokenizer_files import loaded, unpacked


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


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"model": null}', b'{"model": 3}', b'{"model": {"vocab": {}'])
def test_what_is_no_tokenizer_file_is_said(raw: bytes) -> None:
    with pytest.raises(TokenizerError, match=r"thing is not a tokenizer\.json"):
        TokenizerJson(raw, "thing")


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
