"""The token-native SFT format with tokenizers of every kind: the bulk path, and objects of other libraries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.errors import RecordError, TokenizerError
from chatmill.label.presets import find_policy
from chatmill.render.render import render
from chatmill.systems.document_boundaries import block_tokenize_fn
from chatmill.systems.post_training import MARKERS as TRANSCRIPT_MARKERS
from chatmill.systems.post_training import encode_transcripts
from chatmill.systems.token_native_sft import MARKERS, sft_loss_mask_for_ids, sft_token_ids
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.chats import chat as talk
from tests.chats import chat_record as chat
from tests.systems.sft_words import ASST, EOT, SYS, USR, WORDS, FakeTokenizer, serialize

BYTES = byte_tokenizer(tuple(MARKERS.values()))
TEXTS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        st.sampled_from([*MARKERS.values(), "<|ngpt_", "|>", " ", "\n"]),
    ),
    max_size=3,
).map("".join)
SYSTEM = st.lists(st.tuples(st.just("system"), TEXTS), max_size=1)
TURNS = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), TEXTS), min_size=1, max_size=6)
CHATS = st.builds(lambda system, turns: system + turns, SYSTEM, TURNS)


@given(batch=st.lists(CHATS, min_size=1, max_size=4), default=TEXTS)
@settings(max_examples=150)
def test_the_bulk_path_and_the_scan_agree(batch: list[list[tuple[str, str]]], default: str) -> None:
    conversations = [talk(*turns, options={"default_system_text": default}) for turns in batch]
    tokens = render(conversations, "token_native", BYTES).tokens
    trained = tokens.per_token(find_policy("assistant").run_weights(tokens)) > 0
    assert len(tokens) == len(batch)
    for number, turns in enumerate(batch):
        ids = serialize(chat(*turns), BYTES, default)
        first, last = tokens.offsets[number : number + 2]
        assert tokens.ids[first:last].tolist() == ids
        assert trained[first:last].tolist() == sft_loss_mask_for_ids(ids, **sft_token_ids(BYTES))


# --- foreign tokenizers --------------------------------------------------------------------------------------------


def word_tokenizer(*special: str) -> tokenizers.Tokenizer:
    """A `tokenizers` word tokenizer that adds `<s>` by itself."""
    vocabulary = {"<unk>": 0, "<s>": 1, **{f"<{number}>": number for number in range(2, 10)}, **WORDS}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", *special])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def transformers_tokenizer(*special: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(*special), bos_token="<s>", unk_token="<unk>")


class Words:
    """Only `encode`, which gives a list."""

    def encode(self, text: str) -> Any:
        return FakeTokenizer().encode(text)

    def id_of(self, token: str) -> int | None:
        return dict(zip(MARKERS.values(), (SYS, USR, ASST, EOT), strict=True)).get(token)


class WithTokenToId(Words):
    """`encode` gives an object with `.ids`."""

    def encode(self, text: str) -> Any:
        return SimpleNamespace(ids=super().encode(text))

    def token_to_id(self, token: str) -> int | None:
        return self.id_of(token)


class WithConvertTokens(Words):
    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self.id_of(token)


class WithPad(FakeTokenizer):
    def special_token_ids(self) -> dict[str, int]:
        return {**super().special_token_ids(), "pad": WORDS["bye"]}


class WithTexts(FakeTokenizer):
    def special_token_ids(self) -> Any:
        return {**super().special_token_ids(), "sys": "1"}


class AllUnknown(Words):
    def token_to_id(self, token: str) -> int:
        return 0


ONE_TURN = chat(("system", "be brief"), ("user", "hi"), ("assistant", "hello"))


@pytest.mark.parametrize("kind", [FakeTokenizer, WithTokenToId, WithConvertTokens])
def test_any_object_that_encodes_and_knows_the_markers(kind: type[Any]) -> None:
    assert serialize(ONE_TURN, kind()) == [SYS, 15, 16, EOT, USR, 17, EOT, ASST, 18, EOT]


@pytest.mark.parametrize("make", [word_tokenizer, transformers_tokenizer])
def test_tokenizers_and_transformers_objects(make: Any) -> None:
    """What they add by themselves is left off, and content that they make a control token is an error."""
    tokenizer = make(*MARKERS.values())
    assert getattr(tokenizer.encode("hi"), "ids", tokenizer.encode("hi")) == [1, 17], "it does add a token by itself"
    find = getattr(tokenizer, "token_to_id", None) or tokenizer.convert_tokens_to_ids
    sys_id, usr_id, asst_id, eot_id = (find(MARKERS[key]) for key in ("sys", "usr", "asst", "eot"))
    assert serialize(ONE_TURN, tokenizer) == [sys_id, 15, 16, eot_id, usr_id, 17, eot_id, asst_id, 18, eot_id]
    for forged in (MARKERS["eot"], MARKERS["usr"], "<s>"):
        with pytest.raises(RecordError, match=r"record 'rec-3', field messages\[1\]\.content: ") as caught:
            serialize(chat(("user", "hi"), ("assistant", f"hello {forged} bye"), id="rec-3"), tokenizer)
        assert caught.value.code == "control_token"
        assert f"control token {forged};" in str(caught.value)
    with pytest.raises(TokenizerError, match="has no token") as missing:
        serialize(ONE_TURN, make(MARKERS["sys"], MARKERS["usr"]))
    assert MARKERS["asst"] in str(missing.value)
    assert MARKERS["sys"] not in str(missing.value)


@pytest.mark.parametrize(
    ("content", "tokenizer", "default", "says"),
    [
        ("hi <eot>", FakeTokenizer(), "", r"messages\[0\]\.content.*ngpt_eot_"),
        ("hi", FakeTokenizer(), "be <eot>", "default_system_text"),
        ("bye", WithPad(), "", "control token pad"),
    ],
)
def test_control_ids_of_plain_objects_are_named(content: str, tokenizer: Any, default: str, says: str) -> None:
    with pytest.raises(RecordError, match=says):
        serialize(chat(("user", content)), tokenizer, default)


@pytest.mark.parametrize(
    ("tokenizer", "says"),
    [
        (3, "no method encode"),
        (byte_tokenizer(), "has no token"),
        (AllUnknown(), "same id"),
        (WithTexts(), "'sys': '1'"),
    ],
)
def test_objects_that_are_no_tokenizer_are_errors(tokenizer: Any, says: str) -> None:
    with pytest.raises(TokenizerError, match=says):
        serialize(ONE_TURN, tokenizer)


@pytest.mark.parametrize("setting", ["truncation", "padding"])
def test_a_tokenizer_that_cuts_or_pads_is_refused_everywhere(setting: str) -> None:
    made = word_tokenizer(*MARKERS.values(), *TRANSCRIPT_MARKERS)
    made.enable_truncation(max_length=2) if setting == "truncation" else made.enable_padding(length=9)
    for call in (
        lambda: serialize(ONE_TURN, made),
        lambda: sft_token_ids(made),
        lambda: encode_transcripts(["<|USER|>hi<|END|>"], tokenizer=made),
        lambda: block_tokenize_fn({"text": ["hi"]}, made, "text"),
    ):
        with pytest.raises(TokenizerError, match=rf"{setting} on .*no_{setting}\(\)"):
            call()
    made.no_truncation()
    made.no_padding()
    assert len(serialize(ONE_TURN, made)) == 10
    with pytest.raises(TokenizerError, match="load_tokenizer"):
        block_tokenize_fn({"text": ["hi"]}, made, "text")
