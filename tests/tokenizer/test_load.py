"""Real tokenizers: ids equal to the reference library, text never becomes control, and every way to load one."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable, Collection, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from chatmill.core.conversation import Conversation
from chatmill.core.message_parser import is_encodable
from chatmill.core.texts import Texts
from chatmill.errors import ConfigError, TokenizerError
from chatmill.render.registry import find_template
from chatmill.tokenizer import assets, tiktoken_file
from chatmill.tokenizer.backends import Engine, GigatokenBackend, HuggingFaceBackend
from chatmill.tokenizer.hf_json import tokenizer_from_json
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens
from chatmill.tokenizer.probe import PROBE
from chatmill.tokenizer.tiktoken_file import harmony_control_ids
from chatmill.tokenizer.tokenizer import Tokenizer
from tests.conftest import DATA
from tests.data.tokenizer_files import loaded, unpacked

REAL = ("qwen3", "gpt2", "mistral_nemo", "deepseek_v3")
TINY = ("tiny_torchtitan", "tiny_torchtune")


@pytest.fixture(scope="module", autouse=True)
def _references_go() -> Iterator[None]:
    """A gigabyte that no other module needs."""
    yield
    for kept in (whole_reference, pure_text_reference, loaded_strictly):
        kept.cache_clear()


def nasty_texts() -> list[str]:
    texts: list[str] = []
    for line in gzip.decompress((DATA / "nasty.jsonl.gz").read_bytes()).splitlines():
        messages = json.loads(line)["messages"]
        for message in messages if isinstance(messages, list) else []:
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, str):
                texts.append(content)
    assert len(texts) > 100
    return [text for text in texts if len(text) < 50_000 and is_encodable(text)]


@pytest.fixture(scope="session")
def every_text(real_conversations: Callable[[int], list[Conversation]]) -> list[str]:
    found = [*nasty_texts(), *PROBE]
    for conversation in real_conversations(6):
        for message in conversation.messages:
            found.append(message.content)
            found += [call.arguments for call in message.tool_calls]
            if message.reasoning:
                found.append(message.reasoning)
    assert len(found) > 700
    return found


@cache
def whole_reference(name: str) -> Any:
    """The reference library on the same file."""
    return tokenizers.Tokenizer.from_file(str(unpacked(name) / "tokenizer.json"))


@cache
def pure_text_reference(name: str) -> Any:
    """The reference library on the same vocabulary with its added tokens and post-processor taken out."""
    data = json.loads((unpacked(name) / "tokenizer.json").read_text())
    return tokenizers.Tokenizer.from_str(json.dumps({**data, "added_tokens": [], "post_processor": None}))


def spells(text: str, names: Collection[str]) -> bool:
    return any(name in text for name in names)


def rows(encoded: tuple[np.ndarray, np.ndarray]) -> list[list[int]]:
    ids, offsets = encoded
    return [ids[a:b].tolist() for a, b in pairwise(offsets)]


@pytest.fixture(scope="session", params=[*REAL, *TINY])
def named(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, loaded(request.param)


@pytest.fixture(scope="session")
def strict(named: tuple[str, Any]) -> Any:
    return loaded_strictly(named[0])


@cache
def loaded_strictly(name: str) -> Any:
    return load_tokenizer(unpacked(name), strict_text=True)


@pytest.fixture(scope="session")
def texts(every_text: list[str], named: tuple[str, Any]) -> list[str]:
    """Fewer for the small vocabularies, which the fast engine does not know."""
    return every_text[::5] if named[0] in TINY else every_text


def test_strict_ids_equal_the_reference_library_without_added_tokens(
    named: tuple[str, Any], strict: Any, texts: list[str]
) -> None:
    theirs = [e.ids for e in pure_text_reference(named[0]).encode_batch_fast(texts, add_special_tokens=False)]
    assert rows(strict.encode_batch(texts)) == theirs


def test_where_no_special_token_is_spelled_ids_equal_the_whole_tokenizer(
    named: tuple[str, Any], texts: list[str]
) -> None:
    name, tokenizer = named
    whole = whole_reference(name)
    special = [control for control in tokenizer.control_ids if control not in tokenizer.ordinary]
    ordinary = [f"a {token}b\n{token}" for token in sorted(tokenizer.ordinary)]
    plain = [text for text in [*texts, *ordinary] if not spells(text, special)]
    assert len(plain) > (100 if name in TINY else 600)
    theirs = [e.ids for e in whole.encode_batch_fast(plain, add_special_tokens=False)]
    assert rows(tokenizer.encode_batch(plain)) == theirs


def test_text_never_becomes_a_special_token(named: tuple[str, Any], strict: Any, texts: list[str]) -> None:
    _, tokenizer = named
    spelled = [*texts, *tokenizer.control_ids, " ".join(tokenizer.control_ids), "".join(tokenizer.control_ids)]
    special = [token_id for name, token_id in tokenizer.control_ids.items() if name not in tokenizer.ordinary]
    assert not np.isin(tokenizer.encode_batch(spelled)[0], special).any()
    assert strict.control_ids == tokenizer.control_ids
    assert not np.isin(strict.encode_batch(spelled)[0], list(strict.control_ids.values())).any()


def test_added_tokens_that_are_not_special_are_part_of_the_vocabulary_unless_text_is_strict(qwen3: Any) -> None:
    """As when the model is served: the model writes `<think>` as one token, and so does text that spells it."""
    think, end, text = qwen3.control("<think>"), qwen3.control("</think>"), "<think>\nhello</think>"
    assert {"<think>", "</think>", "<tool_call>"} <= set(qwen3.ordinary)
    assert "<|im_end|>" not in qwen3.ordinary
    found = qwen3.encode(text)
    assert (found[0], found[-1]) == (think, end)
    assert found == hf_ids("qwen3", text)
    strict = loaded_strictly("qwen3")
    assert not {think, end} & set(strict.encode(text))
    assert strict.control("<think>") == think, "a template still writes it"
    assert strict.fingerprint != qwen3.fingerprint


def hf_ids(name: str, text: str) -> list[int]:
    return list(whole_reference(name).encode(text, add_special_tokens=False).ids)


def test_decoding_gives_the_normalised_text(named: tuple[str, Any], texts: list[str]) -> None:
    name, tokenizer = named
    if name in TINY:  # these test vocabularies lack bytes: they lose text by design
        assert tokenizer.decode(tokenizer.encode("h\u00e9")) != "h\u00e9"
        return
    for text, row in zip(texts, rows(tokenizer.encode_batch(texts)), strict=True):
        assert tokenizer.decode(row) == tokenizer.normalize(text)
    changed = sum(tokenizer.normalize(text) != text for text in texts)
    assert (changed > 0) == (name == "qwen3")


def test_o200k_is_exact_and_lossless(o200k: Any, every_text: list[str]) -> None:
    from chatmill.render.official_harmony import encoding

    official = encoding()
    for text, row in zip(every_text, rows(o200k.encode_batch(every_text)), strict=True):
        assert row == official.encode(text, disallowed_special=())
        assert o200k.decode(row) == text
    assert (o200k.vocab_size, o200k.eos_id, o200k.bos_id, o200k.pad_id) == (201088, 199999, None, None)


def test_o200k_control_ids_equal_the_official_ones(o200k: Any) -> None:
    from chatmill.render.official_harmony import encoding

    official = encoding()
    known = set(official.special_tokens_set) - {"<|reserved_201088|>"}  # one past the padded vocabulary of spec 5
    assert known <= set(harmony_control_ids())
    for name in known:
        assert official.encode(name, allowed_special="all") == [o200k.control(name)]


NAMED_IDS = {
    "qwen3": (None, 151645, 151643),
    "gpt2": (50256, 50256, None),
    "mistral_nemo": (1, 2, None),
    "deepseek_v3": (0, 1, 1),
    "tiny_torchtitan": (2002, 2003, 2001),
    "tiny_torchtune": (None, None, None),
}


def test_named_ids_and_engines(named: tuple[str, Any]) -> None:
    name, tokenizer = named
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == NAMED_IDS[name]
    assert tokenizer.backend.name == ("tokenizers" if name in TINY else "gigatoken")


def test_all_ways_in_give_the_same_tokenizer(gpt2: Any) -> None:
    import transformers

    folder = unpacked("gpt2")
    assert isinstance(gpt2, Tokenizer)
    assert load_tokenizer(gpt2) is gpt2
    from_file = load_tokenizer(folder / "tokenizer.json")
    packed = load_tokenizer(DATA / "tokenizers" / "gpt2" / "tokenizer.json.xz")
    assert from_file.fingerprint == gpt2.fingerprint == packed.fingerprint
    loaded = load_tokenizer(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))
    assert loaded.control_ids == gpt2.control_ids
    theirs = load_tokenizer(transformers.AutoTokenizer.from_pretrained(folder))
    assert (theirs.eos_id, theirs.bos_id) == (gpt2.eos_id, gpt2.bos_id)
    assert pickle.loads(pickle.dumps(theirs)).named_tokens == theirs.named_tokens != {}
    for text in PROBE:
        assert loaded.encode(text) == theirs.encode(text) == gpt2.encode(text)


def test_fingerprints_tell_tokenizers_apart(qwen3: Any, gpt2: Any, o200k: Any) -> None:
    base = loaded("qwen3_base")
    more = with_control_tokens(qwen3, ["<|x|>"])
    assert len({t.fingerprint for t in (qwen3, gpt2, o200k, base, more)}) == 5


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_how_added_tokens_match_is_part_of_the_fingerprint(flag: str) -> None:
    data = json.loads((unpacked("gpt2") / "tokenizer.json").read_text())
    changed = [{**token, flag: not token.get(flag)} for token in data["added_tokens"]]
    found = [
        tokenizer_from_json(json.dumps({**data, "added_tokens": added}).encode(), "x", engine=Engine.REFERENCE)
        for added in (data["added_tokens"], changed)
    ]
    assert changed
    assert found[0].fingerprint != found[1].fingerprint


# -- control tokens -------------------------------------------------------------------------------------------------


def test_missing_control_tokens_stand_above_the_vocabulary(gpt2: Any) -> None:
    names = ["<|b|>", "<|a|>", "<|endoftext|>", "<|b|>"]
    more = with_control_tokens(gpt2, names)
    assert (more.control("<|b|>"), more.control("<|a|>"), more.vocab_size) == (50257, 50258, 50259)
    assert "<|a|>" not in gpt2.control_ids
    assert 50258 not in more.encode("<|a|>")
    assert more.encode_documents(["x<|a|>y"])[0].tolist() == [*gpt2.encode("x"), 50258, *gpt2.encode("y")]
    assert more.decode([50258]) == "<|a|>"
    assert load_tokenizer(unpacked("gpt2"), control_tokens=names).control_ids == more.control_ids


def test_documents_recognise_control_tokens_as_the_whole_tokenizer_does(named: tuple[str, Any]) -> None:
    name, tokenizer = named
    whole = whole_reference(name)
    if name == "tiny_torchtitan":  # its control tokens stand in tokenizer_config.json alone
        whole = tokenizers.Tokenizer.from_file(str(unpacked(name) / "tokenizer.json"))
        assert not whole.get_added_tokens_decoder()
        whole.add_special_tokens([*tokenizer.control_ids])
    some = list(tokenizer.control_ids)[:40]
    documents = ["", "plain", " ".join(some), "".join(some), *(f"a {control}\n b{control}" for control in some)]
    theirs = [whole.encode(text, add_special_tokens=False).ids for text in documents]
    assert rows(tokenizer.encode_documents(documents)) == theirs


def test_token_bytes(gpt2: Any, qwen3: Any) -> None:
    assert b"".join(map(gpt2.token_bytes, gpt2.encode("né 中"))) == "né 中".encode()
    assert qwen3.token_bytes(qwen3.control("<think>")) == b"<think>"
    with pytest.raises(TokenizerError, match="9999999"):
        gpt2.token_bytes(9_999_999)


def test_byte_points_are_the_tokens_that_start_at_a_prefix_s_end(named: tuple[str, Any]) -> None:
    """Against the offsets of the reference library, for short and long prefixes, ASCII and not."""
    name, tokenizer = named
    cases = [("user\n", "\n\nhello"), ("user\n", ""), ("", "abc"), ("naïve ", "x"), ("é" * 40, " and more text " * 5)]
    cases += [("system\n", "é\u0301"), ("\n" * 50, "\n" * 9)]
    whole = [prefix + rest for prefix, rest in cases]
    encoded = tokenizer.encode_batch(whole)
    which = np.arange(len(cases), dtype=np.int64)
    sizes = np.array([len(prefix.encode()) for prefix, _ in cases], dtype=np.int64)
    points = tokenizer.byte_points(encoded, which, sizes, Texts.of(whole)) - encoded[1][:-1]
    reference = HuggingFaceBackend(pure_text_reference(name).to_str().encode())
    expected = reference.tokens_before(whole, [len(prefix) for prefix, _ in cases])
    assert points.tolist() == expected.tolist()


# -- other models and faults ----------------------------------------------------------------------------------------


def trained(model: Any, trainer: Any, pre_tokenizer: Any, normalizer: Any = None, decoder: Any = None) -> Any:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.train_from_iterator(
        ["the quick brown fox", "jumps over the lazy dog", "he said: hello, world!"] * 20, trainer
    )
    return tokenizer


def unigram() -> Any:
    return trained(
        tokenizers.models.Unigram(),
        tokenizers.trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>", "<eos>"]),
        tokenizers.pre_tokenizers.Metaspace(),
        tokenizers.normalizers.NFKC(),
        tokenizers.decoders.Metaspace(),
    )


def wordpiece() -> Any:
    return trained(
        tokenizers.models.WordPiece(unk_token="[UNK]"),
        tokenizers.trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "[CLS]"]),
        tokenizers.pre_tokenizers.BertPreTokenizer(),
        tokenizers.normalizers.BertNormalizer(lowercase=True),
        tokenizers.decoders.WordPiece(),
    )


@pytest.mark.parametrize("make", [unigram, wordpiece])
def test_models_that_gigatoken_lacks_fall_back_with_the_same_results(make: Callable[[], Any]) -> None:
    theirs = make()
    ours = load_tokenizer(theirs)
    assert ours.backend.name == "tokenizers"
    for text in ("the lazy fox", "Hello,  World!", "zzz unknown \u4e2d", ""):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
    assert ours.decode(ours.encode("the lazy fox")) == "the lazy fox"
    control = next(name for name in ours.control_ids if "unk" not in name.lower())
    assert ours.control(control) not in ours.encode(f"the {control}")


def test_an_engine_that_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    original = GigatokenBackend.encode_batch

    def wrong(self: GigatokenBackend, texts: Any) -> Any:
        ids, offsets = original(self, texts)
        return (ids[::-1].copy() if len(ids) > 5 else ids), offsets

    monkeypatch.setattr(GigatokenBackend, "encode_batch", wrong)
    assert load_tokenizer(unpacked("gpt2")).backend.name == "tokenizers"
    with pytest.raises(TokenizerError, match="differ on"):
        load_tokenizer("o200k")


def test_the_file_of_o200k_is_o200k_and_no_other_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_tokenizer(assets.find_o200k()).fingerprint == load_tokenizer("o200k").fingerprint
    path = tmp_path / "x.tiktoken"
    path.write_text("aA== 0\n")
    with pytest.raises(TokenizerError, match=r"x\.tiktoken .*not the o200k vocabulary.*tokenizer\.json"):
        load_tokenizer(path)
    monkeypatch.setattr(tiktoken_file, "PATTERN", r"\S+|\s+")
    with pytest.raises(TokenizerError, match="differ on"):
        load_tokenizer("o200k")


def test_paths_that_are_nothing(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no tokenizer 'nowhere'"):
        load_tokenizer("nowhere")
    with pytest.raises(TokenizerError, match=r"holds no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="is not a tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="cannot use a int"):
        load_tokenizer(7)


MODEL = {"type": "BPE", "vocab": {"a": 0}, "merges": []}


@pytest.mark.parametrize(
    "damage",
    [
        {"added_tokens": [{"id": 1}]},
        {"added_tokens": [{"content": "<x>", "id": "1"}]},
        {"added_tokens": {"<x>": 1}},
        {"normalizer": "NFC"},
        {"normalizer": {"type": "Sequence"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [1]}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": 1}},
    ],
)
def test_a_damaged_tokenizer_json_is_a_clear_error(damage: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": MODEL, **damage}))
    with pytest.raises(TokenizerError, match=tmp_path.name):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("damage", [{"x": {"content": "<a>"}}, {"1": "<a>"}, {"1": {}}, ["<a>"]])
def test_damaged_files_beside_a_tokenizer_are_a_clear_error(damage: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": MODEL}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": damage}))
    with pytest.raises(TokenizerError, match="added_tokens_decoder"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "default"}]}))
    with pytest.raises(ConfigError, match="no object with a name and a template"):
        find_template(tmp_path)
    (tmp_path / "tokenizer.json").rename(tmp_path / "tokenizer.json.xz")
    with pytest.raises(TokenizerError, match="cannot be unpacked"):
        load_tokenizer(tmp_path)


def test_a_lone_surrogate_is_a_clear_error(gpt2: Any) -> None:
    with pytest.raises(TokenizerError, match="text 1 has a lone surrogate at character 2"):
        gpt2.encode_batch(["fine", "ab\ud800"])


def test_tokenizers_travel_to_other_processes(gpt2: Any) -> None:
    more = with_control_tokens(gpt2, ["<|x|>", "<|y|>"])
    back = pickle.loads(pickle.dumps(more))
    assert back.fingerprint == more.fingerprint
    assert back.encode("hello <|x|>") == more.encode("hello <|x|>")
