"""Real tokenizers: ids equal to the reference library, text never becomes control, and where tokens begin."""

from __future__ import annotations

import gzip
import json
import sys
import unicodedata
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from chatmill.core.conversation import Conversation
from chatmill.core.message_parser import is_encodable
from chatmill.core.native.gather import token_points
from chatmill.core.texts import Texts
from chatmill.errors import TokenizerError
from chatmill.tokenizer.backends import HuggingFaceBackend
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens
from chatmill.tokenizer.probe import PROBE
from chatmill.tokenizer.tiktoken_file import harmony_control_ids
from chatmill.tokenizer.tokenizer import SURELY_NFC
from tests.conftest import DATA
from tests.data.tokenizer_files import loaded, unpacked
from tests.oracles import points_by_numpy

NAMED_IDS = {
    "qwen3": (None, 151645, 151643),
    "gpt2": (50256, 50256, None),
    "mistral_nemo": (1, 2, None),
    "deepseek_v3": (0, 1, 1),
    "tiny_torchtitan": (2002, 2003, 2001),
    "tiny_torchtune": (None, None, None),
}
"""Vocabularies with their bos, eos and pad; the tiny ones are not known to the fast engine."""


@pytest.fixture(scope="module", autouse=True)
def _references_go() -> Iterator[None]:
    """A gigabyte that no other module needs."""
    yield
    for kept in (whole_reference, pure_text_reference, loaded_strictly):
        kept.cache_clear()


@pytest.fixture(scope="session")
def every_text(real_conversations: Callable[[int], list[Conversation]]) -> list[str]:
    found = [*PROBE]
    for line in gzip.decompress((DATA / "nasty.jsonl.gz").read_bytes()).splitlines():
        messages = json.loads(line)["messages"]
        contents = [one.get("content") for one in messages if isinstance(one, dict)] if messages else []
        texts = [text for text in contents if isinstance(text, str)]
        found += [text for text in texts if len(text) < 50_000 and is_encodable(text)]
    assert len(found) > 125
    for conversation in real_conversations(6):
        for message in conversation.messages:
            found += [message.content, message.reasoning or "", *(call.arguments for call in message.tool_calls)]
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


@cache
def loaded_strictly(name: str) -> Any:
    return load_tokenizer(unpacked(name), strict_text=True)


def rows(encoded: tuple[np.ndarray, np.ndarray]) -> list[list[int]]:
    ids, offsets = encoded
    return [ids[a:b].tolist() for a, b in pairwise(offsets)]


def by_reference(reference: Any, texts: list[str]) -> list[list[int]]:
    return [one.ids for one in reference.encode_batch_fast(texts, add_special_tokens=False)]


@pytest.fixture(scope="session", params=NAMED_IDS)
def named(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, loaded(request.param)


@pytest.fixture(scope="session")
def texts(every_text: list[str], named: tuple[str, Any]) -> list[str]:
    """Fewer for the small vocabularies."""
    return every_text[::5] if named[0].startswith("tiny") else every_text


def test_ids_of_text_equal_the_reference_library(named: tuple[str, Any], texts: list[str]) -> None:
    """Without added tokens where text is strict, else with those that are not special."""
    name, tokenizer = named
    assert rows(loaded_strictly(name).encode_batch(texts)) == by_reference(pure_text_reference(name), texts)
    special = [control for control in tokenizer.control_ids if control not in tokenizer.ordinary]
    ordinary = [f"a {token}b\n{token}" for token in sorted(tokenizer.ordinary)]
    plain = [text for text in [*texts, *ordinary] if not any(control in text for control in special)]
    assert len(plain) > (100 if name.startswith("tiny") else 600)
    assert rows(tokenizer.encode_batch(plain)) == by_reference(whole_reference(name), plain)


def test_text_never_becomes_a_special_token(named: tuple[str, Any], texts: list[str]) -> None:
    name, tokenizer = named
    strict = loaded_strictly(name)
    spelled = [*texts, *tokenizer.control_ids, " ".join(tokenizer.control_ids), "".join(tokenizer.control_ids)]
    special = [token_id for control, token_id in tokenizer.control_ids.items() if control not in tokenizer.ordinary]
    assert not np.isin(tokenizer.encode_batch(spelled)[0], special).any()
    assert strict.control_ids == tokenizer.control_ids
    assert not np.isin(strict.encode_batch(spelled)[0], list(strict.control_ids.values())).any()


def test_added_tokens_that_are_not_special_are_part_of_the_vocabulary_unless_text_is_strict(qwen3: Any) -> None:
    """As when the model is served: the model writes `<think>` as one token, and so does text that spells it."""
    think, end, text = qwen3.control("<think>"), qwen3.control("</think>"), "<think>\nhello</think>"
    assert {"<think>", "</think>", "<tool_call>"} <= set(qwen3.ordinary)
    assert "<|im_end|>" not in qwen3.ordinary
    found, strict = qwen3.encode(text), loaded_strictly("qwen3")
    assert (found[0], found[-1]) == (think, end)
    assert not {think, end} & set(strict.encode(text))
    assert strict.control("<think>") == think, "a template still writes it"
    assert strict.fingerprint != qwen3.fingerprint


def test_texts_of_sure_characters_are_in_nfc() -> None:
    """None is changed alone, is a mark that may move, or joins what is before it: so no text of them changes."""
    joins = {chr(point) for point in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))}
    for point in range(sys.maxunicode + 1):
        parts = unicodedata.decomposition(chr(point)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            joins.add(chr(int(parts[1], 16)))
    assert SURELY_NFC.ravel().tolist() == sorted(SURELY_NFC.ravel().tolist())
    for first, last in SURELY_NFC.tolist():
        inside = "".join(map(chr, range(first, last + 1)))
        assert unicodedata.is_normalized("NFC", inside)
        assert joins.isdisjoint(inside)
        assert not any(unicodedata.combining(one) or unicodedata.category(one) == "Cn" for one in inside)


def test_decoding_gives_the_normalised_text(named: tuple[str, Any], texts: list[str]) -> None:
    name, tokenizer = named
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == NAMED_IDS[name]
    assert tokenizer.backend.name == ("tokenizers" if name.startswith("tiny") else "gigatoken")
    if name.startswith("tiny"):  # these test vocabularies lack bytes: they lose text by design
        assert tokenizer.decode(tokenizer.encode("h\u00e9")) != "h\u00e9"
        return
    for text, row in zip(texts, rows(tokenizer.encode_batch(texts)), strict=True):
        assert tokenizer.decode(row) == tokenizer.normalize(text)
    assert any(tokenizer.normalize(text) != text for text in texts) == (name == "qwen3")


def test_o200k_is_the_official_one_and_lossless(o200k: Any, every_text: list[str]) -> None:
    from chatmill.render.official_harmony import encoding

    official = encoding()
    for text, row in zip(every_text, rows(o200k.encode_batch(every_text)), strict=True):
        assert row == official.encode(text, disallowed_special=())
        assert o200k.decode(row) == text
    assert (o200k.vocab_size, o200k.eos_id, o200k.bos_id, o200k.pad_id) == (201088, 199999, None, None)
    known = set(official.special_tokens_set) - {"<|reserved_201088|>"}  # one past the padded vocabulary of spec 5
    assert known <= set(harmony_control_ids())
    for name in known:
        assert official.encode(name, allowed_special="all") == [o200k.control(name)]


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
    with pytest.raises(TokenizerError, match=r"It has: <\|.*load_tokenizer\(\.\.\., control_tokens="):
        gpt2.control("<|USER|>")


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


def test_documents_know_control_tokens_that_strip_and_ones_that_were_added() -> None:
    """One id per byte, and a control token that swallows the white space before it."""
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    theirs: Any = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    theirs.pre_tokenizer, theirs.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    theirs.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    ours = load_tokenizer(theirs, control_tokens=["<|USER|>", "<|END|>"])
    found = rows(ours.encode_documents(["a  <mask>b", "<|USER|>a <mask><|END|>", "", "<|END|>"]))
    a, mask = theirs.encode("a").ids[0], theirs.token_to_id("<mask>")
    assert found == [theirs.encode("a  <mask>b").ids, [mask + 1, a, mask, mask + 2], [], [mask + 2]]
    assert mask not in ours.encode("a <mask>")


def trained_model(model: Any, trainer: Any, pre_tokenizer: Any, normalizer: Any, decoder: Any) -> Any:
    made: Any = Tokenizer(model)
    made.pre_tokenizer, made.normalizer, made.decoder = pre_tokenizer, normalizer, decoder
    corpus = ["the quick brown fox", "jumps over the lazy dog", "he said: hello, world!"] * 20
    made.train_from_iterator(corpus, trainer)
    return made


def unigram() -> Any:
    trainer = trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>", "<eos>"])
    space = pre_tokenizers.Metaspace()
    return trained_model(models.Unigram(), trainer, space, normalizers.NFKC(), decoders.Metaspace())


def wordpiece() -> Any:
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "[CLS]"])
    model, words = models.WordPiece(unk_token="[UNK]"), pre_tokenizers.BertPreTokenizer()
    return trained_model(model, trainer, words, normalizers.BertNormalizer(lowercase=True), decoders.WordPiece())


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


# -- bytes of tokens, and where parts of a piece begin among them ---------------------------------------------------


def test_token_bytes(gpt2: Any, qwen3: Any) -> None:
    assert b"".join(map(gpt2.token_bytes, gpt2.encode("né 中"))) == "né 中".encode()
    assert qwen3.token_bytes(qwen3.control("<think>")) == b"<think>"
    with pytest.raises(TokenizerError, match="9999999"):
        gpt2.token_bytes(9_999_999)


def points(tokenizer: Any, cases: list[tuple[int, str]], whole: list[str]) -> np.ndarray:
    """Where texts have the tokens that start at the ends of prefixes, each of the text with that number."""
    which = np.array([number for number, _ in cases], dtype=np.int64)
    sizes = np.array([len(prefix.encode()) for _, prefix in cases], dtype=np.int64)
    encoded = tokenizer.encode_batch(whole)
    return tokenizer.byte_points(encoded, which, sizes, Texts.of(whole)) - encoded[1][which]


def test_byte_points_are_the_tokens_that_start_at_a_prefix_s_end(named: tuple[str, Any]) -> None:
    """Against the offsets of the reference library, for short and long prefixes, ASCII and not."""
    name, tokenizer = named
    cases = [("user\n", "\n\nhello"), ("user\n", ""), ("", "abc"), ("naïve ", "x"), ("é" * 40, " and more text " * 5)]
    cases += [("system\n", "é\u0301"), ("\n" * 50, "\n" * 9)]
    prefixes, whole = [prefix for prefix, _ in cases], [prefix + rest for prefix, rest in cases]
    reference = HuggingFaceBackend(pure_text_reference(name).to_str().encode())
    expected = reference.tokens_before(whole, list(map(len, prefixes)))
    assert points(tokenizer, list(enumerate(prefixes)), whole).tolist() == expected.tolist()


PARTS = st.lists(
    st.sampled_from(
        ["assistant\n", " and", "\n", "", "e", "\u0301", "\u00e9", "e\u0301x", "\u1112\u1161\u11ab",
         "\ud55c\uad6d", "\u4f60\u597d", "\u304b\u3099", "\U0001f468\u200d\U0001f469", "\ufb01", "\u212b",
         "\u0928\u093f", "</think>\n\n", "12345"]
    ),
    min_size=1,
    max_size=8,
)  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
@given(pieces=st.lists(PARTS, min_size=1, max_size=6))
def test_all_borders_at_once_are_those_found_one_by_one(name: str, pieces: list[list[str]]) -> None:
    tokenizer: Any = loaded(name)
    whole = ["".join(parts) for parts in pieces]
    borders = [(n, "".join(parts[:k])) for n, parts in enumerate(pieces) for k in range(len(parts) + 1)]
    found = points(tokenizer, borders, whole).tolist()
    for (number, prefix), point in zip(borders, found, strict=True):
        size, passed, at = len(tokenizer.normalize(prefix).encode()), 0, 0
        ids = tokenizer.encode(whole[number])
        while passed < size and at < len(ids):
            passed += len(tokenizer.token_bytes(ids[at]))
            at += 1
        assert point == at, (prefix, pieces[number])


@given(st.lists(st.lists(st.integers(0, 6), max_size=9), min_size=1, max_size=5), st.data())
def test_compiled_points_are_those_of_numpy(texts: list[list[int]], data: st.DataObject) -> None:
    sizes = np.array([1, 2, 3, 1, 7, 4, 2], dtype=np.int32)
    ids = np.array([token for text in texts for token in text], dtype=np.int32)
    offsets = np.cumsum([0, *map(len, texts)])
    pairs = data.draw(st.lists(st.tuples(st.integers(0, len(texts) - 1), st.integers(0, 40)), max_size=12))
    which, wanted = (np.array([pair[k] for pair in pairs], dtype=np.int64) for k in (0, 1))
    expected = points_by_numpy(ids, sizes, offsets, which, wanted)
    assert token_points(ids, sizes, offsets, which, wanted).tolist() == expected.tolist()


def test_what_lies_outside_is_an_error() -> None:
    ids, sizes, offsets = np.array([0, 1], dtype=np.int32), np.array([1], dtype=np.int32), np.array([0, 2])
    for text in (0, 3):
        with pytest.raises(IndexError):
            token_points(ids, sizes, offsets, np.array([text]), np.array([5]))
