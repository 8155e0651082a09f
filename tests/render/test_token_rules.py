"""Vocabularies whose added tokens match in ways of their own, in small: ids equal to transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.errors import TokenizerError
from chatmill.tokenizer.load import load_tokenizer
from tests.render.against_transformers import bound, compare

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ between }}{{ m.content }}{{ between }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{{ between }}{% endif %}"
)
NAMES = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
TEXTS = ["a", " a", "a ", "\n a\n\n", "Hello  world", "  ", "\tx y\u3000", "x\u00a0", "été ▁ a▁b", "it's <b> x</b>"]
CORPUS = ["Hello world, it is a test of words", " a b c  d\n\ne\t x y z", "the quick brown fox  jumps", *TEXTS] * 5


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return made


def metaspace(scheme: str) -> Tokenizer:
    """Like Llama 2's and Mistral's: words begin with ▁, unknown characters become bytes."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)  # type: ignore[arg-type]
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return trained(made)


def legacy_sentencepiece() -> Tokenizer:
    """Like Llama 2's first files: a normalizer puts ▁ in front of every text between special tokens."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # type: ignore[arg-type]
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return trained(made)


def gemma_like() -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return trained(made)


def trained(made: Tokenizer) -> Tokenizer:
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False))
    # The bytes are plain entries of the vocabulary, not added tokens, in real files.
    parts = json.loads(made.to_str())
    parts["added_tokens"] = [token for token in parts["added_tokens"] if token["content"] == "<unk>"]
    return Tokenizer.from_str(json.dumps(parts))


def folder_of(path: Path, made: Tokenizer, tokens: Sequence[AddedToken], between: str, *, bos: bool = False) -> Path:
    """A model folder."""
    special = [AddedToken("<s>", special=True, normalized=False), *tokens]
    made.add_special_tokens([token for token in special if token.special])
    made.add_tokens([token for token in special if not token.special])
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", made.token_to_id("<s>"))]
        )
    path.mkdir(exist_ok=True)
    made.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "chat_template.jinja").write_text(TEMPLATE.replace("{{ between }}", between))
    return path


@cache
def chats() -> list[Conversation]:
    """Every text before, after and between two others."""
    roles = (Role.USER, Role.ASSISTANT) * 2
    pairs = [(text, TEXTS[(at + step) % len(TEXTS)]) for at, text in enumerate(TEXTS) for step in (0, 4)]
    return [Conversation(tuple(map(Message, roles, (*pair, *reversed(pair))))) for pair in pairs]


def compared(folder: Path, maker: str) -> dict[str, int]:
    import transformers

    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    anchor = "" if maker == "byte_level" else "\u2603"
    return compare(str(folder), load_tokenizer(folder), theirs, chats(), anchor=anchor)


def plain_tokens(**flags: bool) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False, **flags) for name in NAMES]


MAKERS = {
    "byte_level": byte_level,
    "metaspace_first": lambda: metaspace("first"),
    "metaspace_always": lambda: metaspace("always"),
    "metaspace_never": lambda: metaspace("never"),
    "legacy_sentencepiece": legacy_sentencepiece,
    "gemma_like": gemma_like,
}


@pytest.mark.parametrize("between", ["", " ", pytest.param("\n", marks=pytest.mark.slow)])
@pytest.mark.parametrize("maker", MAKERS)
def test_special_tokens_of_any_vocabulary(tmp_path: Path, maker: str, between: str) -> None:
    counts = compared(folder_of(tmp_path / "model", MAKERS[maker](), plain_tokens(), between), maker)
    assert counts["compared"] == len(chats()), counts


@pytest.mark.parametrize("flags", [{"rstrip": True}, {"lstrip": True}, {"lstrip": True, "rstrip": True}], ids=str)
@pytest.mark.parametrize("maker", ["byte_level", "metaspace_first", "legacy_sentencepiece"])
def test_tokens_that_take_white_space_away(tmp_path: Path, maker: str, flags: dict[str, bool]) -> None:
    counts = compared(folder_of(tmp_path / "model", MAKERS[maker](), plain_tokens(**flags), "\n"), maker)
    assert counts["compared"] == len(chats()), counts


@pytest.mark.parametrize("maker", ["byte_level", "gemma_like", "metaspace_first"])
def test_ordinary_tokens_that_text_spells(tmp_path: Path, maker: str) -> None:
    ordinary = [AddedToken("<b>", special=False, normalized=True), AddedToken("</b>", special=False, normalized=False)]
    counts = compared(folder_of(tmp_path / "model", MAKERS[maker](), [*plain_tokens(), *ordinary], "\n"), maker)
    assert counts["compared"] == len(chats()), counts


@pytest.mark.parametrize("maker", ["byte_level", "metaspace_first"])
def test_a_post_processor_that_writes_bos_does_not_write_it_twice(tmp_path: Path, maker: str) -> None:
    folder = folder_of(tmp_path / "model", MAKERS[maker](), plain_tokens(), "\n", bos=True)
    assert compared(folder, maker)["compared"] == len(chats())


def test_a_prefix_behind_tokens_that_text_may_spell_is_refused_with_the_way_out(tmp_path: Path) -> None:
    ordinary = [AddedToken("<b>", special=False, normalized=False)]
    folder = folder_of(tmp_path / "model", legacy_sentencepiece(), [*plain_tokens(), *ordinary], "\n")
    with pytest.raises(TokenizerError, match="strict_text: true"):
        bound(str(folder), load_tokenizer(folder))
    bound(str(folder), load_tokenizer(folder, strict_text=True))


def test_a_single_word_token_is_refused_by_name(tmp_path: Path) -> None:
    tokens = [*plain_tokens(), AddedToken("<x>", special=True, normalized=False, single_word=True)]
    folder = folder_of(tmp_path / "model", byte_level(), tokens, "<x>")
    with pytest.raises(TokenizerError, match=r"'<x>'.*single_word"):
        bound(str(folder), load_tokenizer(folder))
    unused = folder_of(tmp_path / "other", byte_level(), tokens, "\n")
    assert compared(unused, "byte_level")["compared"] == len(chats())
