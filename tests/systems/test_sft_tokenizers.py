"""The token-native SFT format with tokenizers of every kind: the bulk path, and objects of other libraries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.errors import RecordError, TokenizerError
from chatmill.label.presets import find_policy
from chatmill.render.render import render
from chatmill.systems.token_native_sft import (
    MARKERS,
    sft_loss_mask_for_ids,
)
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.chats import chat_record as chat
from tests.systems.sft_words import ASST, EOT, FAKE, SYS, USR, WORDS, FakeTokenizer, serialize

# --- the bulk path -------------------------------------------------------------------------------------------------

BYTES = byte_tokenizer(tuple(MARKERS.values()))
BYTE_MARKERS = {f"{key}_id": BYTES.control(name) for key, name in MARKERS.items()}
TEXTS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        st.sampled_from([*MARKERS.values(), "<|ngpt_", "|>", " ", "\n"]),
    ),
    max_size=3,
).map("".join)


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    turns = draw(st.lists(st.tuples(st.sampled_from([Role.USER, Role.ASSISTANT]), TEXTS), min_size=1, max_size=6))
    messages = [Message(role, text) for role, text in turns]
    if draw(st.booleans()):
        messages.insert(0, Message(Role.SYSTEM, draw(TEXTS)))
    return Conversation(tuple(messages))


def as_chat(conversation: Conversation) -> Any:
    return chat(*[(message.role.value, message.content) for message in conversation.messages])


@given(batch=st.lists(conversations(), min_size=1, max_size=4), default=TEXTS)
@settings(max_examples=150)
def test_the_bulk_path_and_the_scan_agree(batch: list[Conversation], default: str) -> None:
    batch = [conversation._replace(options={"default_system_text": default}) for conversation in batch]
    tokens = render(batch, "token_native", BYTES).tokens
    trained = tokens.per_token(find_policy("assistant").run_weights(tokens)) > 0
    assert len(tokens) == len(batch)
    for number, conversation in enumerate(batch):
        ids = serialize(as_chat(conversation), BYTES, default)
        first, last = tokens.offsets[number : number + 2]
        assert tokens.ids[first:last].tolist() == ids
        assert trained[first:last].tolist() == sft_loss_mask_for_ids(ids, **BYTE_MARKERS)


# --- foreign tokenizers --------------------------------------------------------------------------------------------


def foreign_tokenizer(special: list[str]) -> tokenizers.Tokenizer:
    """A `tokenizers` word tokenizer that adds `<s>` by itself."""
    vocabulary = {"<unk>": 0, "<s>": 1, **{f"<{number}>": number for number in range(2, 10)}, **WORDS}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", *special])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def transformers_tokenizer(special: list[str]) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=foreign_tokenizer(special), bos_token="<s>", unk_token="<unk>")


class WithTokenToId:
    """`encode` gives an object with `.ids`; markers by `token_to_id`."""

    def encode(self, text: str) -> Any:
        return SimpleNamespace(ids=FAKE.encode(text))

    def token_to_id(self, token: str) -> int | None:
        return {spelling: FAKE.special_token_ids()[key] for key, spelling in MARKERS.items()}.get(token)


class WithConvertTokens:
    """Markers by `convert_tokens_to_ids`."""

    def encode(self, text: str) -> list[int]:
        return FAKE.encode(text)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return WithTokenToId().token_to_id(token)


ONE_TURN = chat(("system", "be brief"), ("user", "hi"), ("assistant", "hello"))


@pytest.mark.parametrize("tokenizer", [FAKE, WithTokenToId(), WithConvertTokens()], ids=lambda t: type(t).__name__)
def test_any_object_that_encodes_and_knows_the_markers(tokenizer: Any) -> None:
    assert serialize(ONE_TURN, tokenizer) == [SYS, 15, 16, EOT, USR, 17, EOT, ASST, 18, EOT]


@pytest.mark.parametrize("make", [foreign_tokenizer, transformers_tokenizer])
def test_tokenizers_and_transformers_objects_without_what_they_add(make: Any) -> None:
    tokenizer = make(list(MARKERS.values()))
    assert getattr(tokenizer.encode("hi"), "ids", tokenizer.encode("hi")) == [1, 17], "it does add a token by itself"
    find = getattr(tokenizer, "token_to_id", None) or tokenizer.convert_tokens_to_ids
    sys_id, usr_id, asst_id, eot_id = (find(MARKERS[key]) for key in ("sys", "usr", "asst", "eot"))
    assert serialize(ONE_TURN, tokenizer) == [sys_id, 15, 16, eot_id, usr_id, 17, eot_id, asst_id, 18, eot_id]


@pytest.mark.parametrize("make", [foreign_tokenizer, transformers_tokenizer])
@pytest.mark.parametrize("forged", [MARKERS["eot"], MARKERS["usr"], "<s>"])
def test_content_that_a_foreign_tokenizer_makes_a_control_token_is_an_error(make: Any, forged: str) -> None:
    ex = chat(("user", "hi"), ("assistant", f"hello {forged} bye"), id="rec-3")
    with pytest.raises(RecordError) as caught:
        serialize(ex, make(list(MARKERS.values())))
    text = str(caught.value)
    assert caught.value.code == "control_token"
    assert "rec-3" in text
    assert "messages[1].content" in text
    assert f"control token {forged};" in text


def test_a_forged_marker_of_a_plain_object_is_named_by_its_spelling() -> None:
    with pytest.raises(RecordError, match=r"messages\[0\]\.content") as caught:
        serialize(chat(("user", "hi <eot>"), id="x"), FAKE)
    assert MARKERS["eot"] in str(caught.value)
    with pytest.raises(RecordError, match="default_system_text"):
        serialize(chat(("user", "hi")), FAKE, default_system_text="be <eot>")


def test_an_id_that_an_object_lists_as_special_is_a_control_id_too() -> None:
    class WithPad(FakeTokenizer):
        def special_token_ids(self) -> dict[str, int]:
            return {**super().special_token_ids(), "pad": WORDS["bye"]}

    with pytest.raises(RecordError, match="control token pad"):
        serialize(chat(("user", "bye")), WithPad())


@pytest.mark.parametrize("make", [foreign_tokenizer, transformers_tokenizer])
def test_a_tokenizer_without_the_markers_is_an_error_that_lists_them(make: Any) -> None:
    with pytest.raises(TokenizerError, match="has no token") as caught:
        serialize(ONE_TURN, make([MARKERS["sys"], MARKERS["usr"]]))
    assert MARKERS["asst"] in str(caught.value)
    assert MARKERS["sys"] not in str(caught.value)


def test_objects_that_are_no_tokenizer_are_errors() -> None:
    with pytest.raises(TokenizerError, match=r"no method encode"):
        serialize(ONE_TURN, object())
    with pytest.raises(TokenizerError, match="has no token"):
        serialize(ONE_TURN, byte_tokenizer())

    class AllUnknown(WithTokenToId):
        def token_to_id(self, token: str) -> int:
            return 0

    with pytest.raises(TokenizerError, match="same id"):
        serialize(ONE_TURN, AllUnknown())
