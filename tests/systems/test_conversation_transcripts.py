"""Conversations as transcripts of the post-training stream: which pairs fit, and what cannot be written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.errors import RecordError
from chatmill.pack.stream import post_training_loss_mask
from chatmill.systems.post_training import (
    MARKERS,
    TranscriptOutcome,
    conversation_to_transcript,
    encode_transcripts,
    pack_transcripts,
    transcribe,
)
from tests.chats import chat_record as chat
from tests.systems.marker_texts import BYTES, ids_of, qwen3, real_conversations

# ---- conversations to transcripts


def write(conversation: Any, context_length: int = 1000) -> str | None:
    return conversation_to_transcript(conversation, tokenizer=BYTES, context_length=context_length)


def outcome(conversation: Any, context_length: int = 1000) -> TranscriptOutcome:
    return transcribe([conversation], tokenizer=BYTES, context_length=context_length)[0].outcome


AB = "<|USER|>a<|END|><|ASSISTANT|>b<|END|>"
LONG = [("system", "sss"), ("user", "uu"), ("assistant", "a"), ("user", "12345678"), ("assistant", "1")]
"""The system span has 3 + 2 tokens, the first pair 2 + 2 + 1 + 2, and the second 8 + 2 + 1 + 2: more than both."""
FIRST = "<|SYSTEM|>sss<|END|><|USER|>uu<|END|><|ASSISTANT|>a<|END|>"
TALK = [("system", " s"), ("user", "u\n"), ("assistant", ""), ("user", "v"), ("assistant", "w")]
WHOLE, CUT, UNPAIRED = TranscriptOutcome.WHOLE, TranscriptOutcome.CUT_TOO_LONG, TranscriptOutcome.CUT_UNPAIRED
TOO_LONG, NO_PAIR = TranscriptOutcome.SKIPPED_TOO_LONG, TranscriptOutcome.SKIPPED_NO_PAIR
PAIR = [("User", "a"), ("ASSISTANT", "b")]
NEXT = [("user", "y"), ("assistant", "z")]


@pytest.mark.parametrize(
    ("messages", "room", "text", "found"),
    [
        (
            TALK,
            1000,
            "<|SYSTEM|> s<|END|><|USER|>u\n<|END|><|ASSISTANT|><|END|><|USER|>v<|END|><|ASSISTANT|>w<|END|>",
            WHOLE,
        ),
        (LONG, 11, None, TOO_LONG),
        (LONG, 12, FIRST, CUT),
        (LONG, 13, FIRST + "<|USER|>12345678<|END|><|ASSISTANT|>1<|END|>", WHOLE),
        ([*PAIR, ("user", "x" * 50), ("assistant", ""), *NEXT], 20, AB, CUT),
        *(
            ([*PAIR, *tail], 1000, AB, UNPAIRED)
            for tail in (
                [("user", "x")],
                [("user", "x"), *NEXT],
                [("assistant", "x"), *NEXT],
                [("system", "x"), *NEXT],
                [("tool", "x"), *NEXT],
                [("user", "x"), ("tool", "y"), ("assistant", "z")],
            )
        ),
        *(
            (start, 1000, None, NO_PAIR)
            for start in (
                [],
                [("system", "s")],
                [("system", "s"), ("user", "u")],
                [("assistant", "a"), *NEXT],
                [("system", "s"), ("system", "t"), *NEXT],
                [("developer", "d"), *NEXT],
            )
        ),
    ],
)
def test_which_pairs_are_written(
    messages: list[tuple[str, str]], room: int, text: str | None, found: TranscriptOutcome
) -> None:
    assert write(chat(*messages), room) == text
    assert outcome(chat(*messages), room) is found


def test_a_message_that_calls_a_tool_makes_no_pair() -> None:
    calls = Message(Role.ASSISTANT, "wait", tool_calls=(ToolCall("f", "{}"),))
    pair = (Message(Role.USER, "a"), Message(Role.ASSISTANT, "b"))
    assert write(Conversation((*pair, Message(Role.USER, "c"), calls))) == "<|USER|>a<|END|><|ASSISTANT|>b<|END|>"
    assert write(Conversation((pair[0], calls))) is None
    assert write(Conversation((pair[0], Message(Role.ASSISTANT, "x", recipient="functions.f")))) is None


@pytest.mark.parametrize("marker", MARKERS)
def test_content_that_spells_a_marker_cannot_be_written(marker: str) -> None:
    conversation = chat(("system", "s"), ("user", "u"), ("assistant", f"say {marker}"), id="r9")
    with pytest.raises(ValueError, match=r"record 'r9', field messages\[2\].content: the content spells") as caught:
        write(conversation)
    assert marker in str(caught.value)
    assert outcome(conversation) is TranscriptOutcome.UNWRITABLE
    assert write(chat(("user", "a"), ("assistant", "b"), ("user", marker))) is not None, "it would not be written"


def test_bad_arguments_are_errors() -> None:
    with pytest.raises(ValueError, match="context_length is 0"):
        write(chat(("user", "u"), ("assistant", "a")), 0)
    with pytest.raises(ValueError, match=r"record 'x', field messages\[0\].content"):
        write({"id": "x", "messages": [{"role": "user", "content": 5}]})
    with pytest.raises(ValueError, match="messages"):
        write({"id": "x"})


roles = st.sampled_from(["user", "assistant", "user", "assistant", "system", "tool"])
content = st.one_of(st.text(alphabet="ab é", max_size=12), st.just("x<|END|>"))
loose = st.lists(st.tuples(roles, content), max_size=7)
paired = st.tuples(content, st.lists(st.tuples(content, content), min_size=1, max_size=4), loose).map(
    lambda parts: [
        ("system", parts[0]),
        *(message for u, a in parts[1] for message in (("user", u), ("assistant", a))),
        *parts[2][:1],
    ]
)


def slow_transcript(messages: list[tuple[str, str]], context_length: int) -> str | None:
    """The rules of the page, one message after the other."""

    def span(role: str, text: str) -> str:
        return f"<|{role.upper()}|>{text}<|END|>"

    def size(text: str) -> int:
        return len(text.encode()) + 2

    rest = list(messages)
    system = rest.pop(0) if rest and rest[0][0] == "system" else None
    text, room = "", context_length
    if system is not None:
        text, room = span(*system), context_length - size(system[1])
    written = [system] if system else []
    pairs = 0
    while len(rest) >= 2 and rest[0][0] == "user" and rest[1][0] == "assistant":
        if size(rest[0][1]) + size(rest[1][1]) > (room if pairs == 0 else context_length):
            break
        text += span(*rest[0]) + span(*rest[1])
        written += rest[:2]
        rest = rest[2:]
        pairs += 1
    if not pairs:
        return None
    if any("<|END|>" in content for _, content in written):
        raise ValueError
    return text


@settings(max_examples=300)
@given(st.lists(st.one_of(loose, paired), min_size=1, max_size=4), st.integers(1, 40))
def test_transcripts_equal_the_slow_rules(chats: list[list[tuple[str, str]]], context_length: int) -> None:
    results = transcribe([chat(*one) for one in chats], tokenizer=BYTES, context_length=context_length)
    assert len(results) == len(chats)
    for messages, result in zip(chats, results, strict=True):
        try:
            expected = slow_transcript(messages, context_length)
        except ValueError:
            assert result.outcome is TranscriptOutcome.UNWRITABLE
            with pytest.raises(RecordError):
                write(chat(*messages), context_length)
            continue
        assert result.error is None
        assert result.text == expected == write(chat(*messages), context_length)
        assert result.messages == (expected or "").count("<|END|>")
        assert result.tokens == (len(ids_of(expected)) if expected else 0)
        assert (0 < result.messages == len(messages)) == (result.outcome is TranscriptOutcome.WHOLE)


@pytest.mark.parametrize("name", ["oasst_en100", "crosswoz_zh"])
def test_real_conversations_go_to_transcripts_and_back_to_trained_spans(name: str) -> None:
    tokenizer = qwen3()
    chats = real_conversations(name, 60)
    results = transcribe(chats, tokenizer=tokenizer, context_length=512)
    written = [(chat, result) for chat, result in zip(chats, results, strict=True) if result.text is not None]
    assert len(written) > 20
    encoded = encode_transcripts([result.text or "" for _, result in written], tokenizer=tokenizer)
    keywords = encoded.markers
    for (one, result), ids in zip(written, encoded.records, strict=True):
        mask = post_training_loss_mask(ids, **keywords)
        answers = [m["content"] for m in one["messages"][: result.messages] if m["role"] == "assistant"]
        assert encoded.tokenizer.decode(ids) == result.text
        trained = encoded.tokenizer.decode(ids[mask == 1])
        assert trained == "".join(f"<|ASSISTANT|>{tokenizer.normalize(answer)}<|END|>" for answer in answers)
    packed = pack_transcripts([result.text or "" for _, result in written], tokenizer=tokenizer, block_size=512)
    stream = np.concatenate([np.append(ids, keywords["eos_id"]) for ids in encoded.records])
    assert packed.tokens.sum() == len(stream) - packed.report.left_out
    assert packed.report.injected > 0
