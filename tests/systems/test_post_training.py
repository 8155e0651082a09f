"""Spec 2, transcripts: conversations written as such, their ids, and packing them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.errors import ChatmillError, RecordError
from chatmill.label.presets import find_policy
from chatmill.pack.stream import post_training_loss_mask, post_training_targets
from chatmill.read.conversations import ConversationFile
from chatmill.render.render import render
from chatmill.systems.post_training import (
    MARKERS,
    TranscriptOutcome,
    conversation_to_transcript,
    encode_transcripts,
    pack_transcripts,
    transcribe,
)
from chatmill.tokenizer.byte_level import byte_tokenizer
from chatmill.tokenizer.load import with_control_tokens
from tests.chats import chat as talk
from tests.chats import chat_record as chat
from tests.conftest import DATA
from tests.data.tokenizer_files import unpacked

BYTES = byte_tokenizer(MARKERS)
S, U, A, E, EOS = (BYTES.control(name) for name in MARKERS)


def ids_of(*transcripts: str, tokenizer: Any = BYTES) -> list[list[int]]:
    return [record.tolist() for record in encode_transcripts(transcripts, tokenizer=tokenizer).records]


def write(conversation: Any, context_length: int = 1000, tokenizer: Any = BYTES) -> str | None:
    return conversation_to_transcript(conversation, tokenizer=tokenizer, context_length=context_length)


def real(name: str) -> list[Conversation]:
    return list(islice(ConversationFile(DATA / "conversations" / f"{name}.jsonl.gz"), 60))


# ---- encoding


def test_each_marker_is_one_id_and_spans_are_verbatim() -> None:
    text = "<|SYSTEM|> be\r\n<|END|>\n \t<|USER|>hi<|END|><|ASSISTANT|>\u3000yo\n<|END|>\n<|EOS|>\n"
    expected = [S, *b" be\r\n", E, U, *b"hi", E, A, *"\u3000yo\n".encode(), E, EOS]
    assert ids_of(text) == [expected]
    odd = "<|USER|>a<|ASSISTANT|>b<|END|> <|END|><|USER|>c<|EOS|>"
    assert ids_of(odd) == [[U, 97, A, 98, E, E, U, 99, EOS]], "the mask judges unclosed spans and stray end markers"
    assert ids_of() == []
    assert ids_of("", " \n", "<|USER|><|END|>", "") == [[], [], [U, E], []]


def test_only_the_five_strings_become_ids_above_the_vocabulary(qwen3: Any) -> None:
    other = "<|user|><|USER |><|im_end|><|endoftext|><|TOOL|><||USER|><|USER"
    assert ids_of(f"<|USER|>{other}<|END|>") == [[U, *other.encode(), E]]
    text = f"<|USER|>{other}<|END|><|EOS|>"
    encoded = encode_transcripts([text], tokenizer=qwen3)
    assert list(encoded.markers.values()) == [qwen3.vocab_size + i for i in range(5)]
    assert encoded.tokenizer.vocab_size == qwen3.vocab_size + 5
    assert "<|USER|>" not in qwen3.control_ids
    assert encoded.tokenizer.decode(encoded.ids) == text
    assert not set(encoded.ids[1:-2].tolist()) & set(encoded.tokenizer.control_ids.values())
    half = encode_transcripts(["<|USER|><|END|>"], tokenizer=byte_tokenizer(("<|END|>", "<|bos|>")))
    assert half.markers["end_id"] == 256
    assert half.ids.tolist() == [259, 256]


@pytest.mark.parametrize(
    ("text", "position", "start"),
    [
        ("hello <|USER|>x<|END|>", 0, "hello"),
        ("<|USER|>x<|END|>\n and then<|ASSISTANT|>y<|END|>", 18, "and then"),
        ("<|USER|>x<|END|><|EOS|>z", 23, "z"),
        ("just text", 0, "just text"),
        ("\ufeff<|USER|>x<|END|>", 0, r"\\ufeff"),
    ],
)
def test_text_outside_a_span_is_an_error_with_its_position(text: str, position: int, start: str) -> None:
    with pytest.raises(ValueError, match=f"record 1, character {position}: text outside a span: '{start}'"):
        ids_of("<|USER|>fine<|END|>", text)
    with pytest.raises(ChatmillError, match="a file:7, character"):
        encode_transcripts([text], tokenizer=BYTES, places=["a file:7"])


spans = st.lists(
    st.tuples(
        st.sampled_from(MARKERS[:3]),
        st.text(max_size=12).filter(lambda text: not any(marker in text for marker in MARKERS)),
        st.sampled_from(["", " ", "\n\n", "<|EOS|>"]),
    ),
    max_size=6,
)


@settings(max_examples=150)
@given(st.lists(spans, max_size=4))
def test_many_transcripts_equal_one_piece_at_a_time(records: list[list[tuple[str, str, str]]]) -> None:
    expected = []
    for record in records:
        ids: list[int] = []
        for marker, text, gap in record:
            ids += [BYTES.control(marker), *text.encode(), E]
            ids += [EOS] if gap == "<|EOS|>" else []
        expected.append(ids)
    assert ids_of(*["".join(f"{m}{t}<|END|>{gap}" for m, t, gap in record) for record in records]) == expected


def test_packing_transcripts_marks_assistant_spans() -> None:
    texts = ["<|USER|>a<|END|><|ASSISTANT|>b<|END|>", "<|USER|>c<|END|><|ASSISTANT|>d<|END|><|EOS|>"]
    packed = pack_transcripts(texts, tokenizer=BYTES, block_size=7)
    assert packed.input_ids.tolist() == [[U, 97, E, A, 98, E, EOS], [U, 99, E, A, 100, E, EOS]]
    assert packed.loss_mask.tolist() == [[0, 0, 0, 1, 1, 1, 0]] * 2
    _, targets = post_training_targets(packed.input_ids, packed.loss_mask)
    assert targets.tolist() == [[-100, -100, A, 98, E, -100], [-100, -100, A, 100, E, -100]]
    assert len(pack_transcripts([], tokenizer=BYTES, block_size=4)) == 0
    assert pack_transcripts([""], tokenizer=BYTES, block_size=2).input_ids.tolist() == [[EOS, EOS]]


# ---- conversations to transcripts

AB = "<|USER|>a<|END|><|ASSISTANT|>b<|END|>"
LONG = [("system", "sss"), ("user", "uu"), ("assistant", "a"), ("user", "12345678"), ("assistant", "1")]
"""The system span has 3 + 2 tokens, the first pair 2 + 2 + 1 + 2, and the second 8 + 2 + 1 + 2: more than both."""
FIRST = "<|SYSTEM|>sss<|END|><|USER|>uu<|END|><|ASSISTANT|>a<|END|>"
TALK = [("system", " s"), ("user", "u\n"), ("assistant", ""), ("user", "v"), ("assistant", "w")]
TALKED = "<|SYSTEM|> s<|END|><|USER|>u\n<|END|><|ASSISTANT|><|END|><|USER|>v<|END|><|ASSISTANT|>w<|END|>"
PAIR = [("User", "a"), ("ASSISTANT", "b")]
NEXT = [("user", "y"), ("assistant", "z")]


@pytest.mark.parametrize(
    ("messages", "room", "text", "outcome"),
    [
        (TALK, 1000, TALKED, "whole"),
        (LONG, 11, None, "skipped_too_long"),
        (LONG, 12, FIRST, "cut_too_long"),
        (LONG, 13, FIRST + "<|USER|>12345678<|END|><|ASSISTANT|>1<|END|>", "whole"),
        ([*PAIR, ("user", "x" * 50), ("assistant", ""), *NEXT], 20, AB, "cut_too_long"),
        ([*PAIR, ("user", "x"), *NEXT], 1000, AB, "cut_unpaired"),
        ([*PAIR, ("system", "x"), *NEXT], 1000, AB, "cut_unpaired"),
        ([*PAIR, ("user", "x"), ("tool", "y"), ("assistant", "z")], 1000, AB, "cut_unpaired"),
        ([], 1000, None, "skipped_no_pair"),
        ([("system", "s"), ("system", "t"), *NEXT], 1000, None, "skipped_no_pair"),
        ([("developer", "d"), *NEXT], 1000, None, "skipped_no_pair"),
    ],
)
def test_which_pairs_are_written(messages: list[tuple[str, str]], room: int, text: str | None, outcome: str) -> None:
    assert write(chat(*messages), room) == text
    assert transcribe([chat(*messages)], tokenizer=BYTES, context_length=room)[0].outcome == outcome


def test_a_message_that_calls_a_tool_makes_no_pair() -> None:
    calls = Message(Role.ASSISTANT, "wait", tool_calls=(ToolCall("f", "{}"),))
    pair = (Message(Role.USER, "a"), Message(Role.ASSISTANT, "b"))
    assert write(Conversation((*pair, Message(Role.USER, "c"), calls))) == AB
    assert write(Conversation((pair[0], calls))) is None
    assert write(Conversation((pair[0], Message(Role.ASSISTANT, "x", recipient="functions.f")))) is None


@pytest.mark.parametrize("marker", MARKERS)
def test_content_that_spells_a_marker_cannot_be_written(marker: str) -> None:
    conversation = chat(("system", "s"), ("user", "u"), ("assistant", f"say {marker}"), id="r9")
    with pytest.raises(ValueError, match=r"record 'r9', field messages\[2\].content: the content spells") as caught:
        write(conversation)
    assert marker in str(caught.value)
    assert transcribe([conversation], tokenizer=BYTES, context_length=99)[0].outcome is TranscriptOutcome.UNWRITABLE
    assert write(chat(("user", "a"), ("assistant", "b"), ("user", marker))) is not None, "it would not be written"


@pytest.mark.parametrize(
    ("conversation", "context_length", "says"),
    [
        (chat(("user", "u"), ("assistant", "a")), 0, "context_length is 0"),
        ({"id": "x", "messages": [{"role": "user", "content": 5}]}, 9, r"record 'x', field messages\[0\].content"),
        ({"id": "x"}, 9, "messages"),
        ({"id": 0, "messages": [{}]}, 9, "record '0', field messages"),
    ],
)
def test_bad_arguments_are_errors(conversation: Any, context_length: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        write(conversation, context_length)


roles = st.sampled_from(["user", "assistant", "user", "assistant", "system", "tool"])
content = st.one_of(st.text(alphabet="ab é", max_size=12), st.just("x<|END|>"))
loose = st.lists(st.tuples(roles, content), max_size=7)
pairs = st.lists(st.tuples(content, content), min_size=1, max_size=4)


@st.composite
def paired(draw: st.DrawFn) -> list[tuple[str, str]]:
    turns = [turn for texts in draw(pairs) for turn in zip(("user", "assistant"), texts, strict=True)]
    return [("system", draw(content)), *turns, *draw(loose)[:1]]


def slow_transcript(messages: list[tuple[str, str]], context_length: int) -> str | None:
    """The rules of the page, one message after the other."""

    def span(role: str, text: str) -> str:
        return f"<|{role.upper()}|>{text}<|END|>"

    def size(text: str) -> int:
        return len(text.encode()) + 2

    rest = list(messages)
    written = [rest.pop(0)] if rest and rest[0][0] == "system" else []
    room = context_length - sum(size(text) for _, text in written)
    pairs = 0
    while len(rest) >= 2 and rest[0][0] == "user" and rest[1][0] == "assistant":
        if size(rest[0][1]) + size(rest[1][1]) > (room if pairs == 0 else context_length):
            break
        written += rest[:2]
        rest = rest[2:]
        pairs += 1
    if not pairs:
        return None
    if any("<|END|>" in content for _, content in written):
        raise ValueError
    return "".join(span(*message) for message in written)


@settings(max_examples=300)
@given(st.lists(st.one_of(loose, paired()), min_size=1, max_size=4), st.integers(1, 40))
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
        assert result.tokens == (len(ids_of(expected)[0]) if expected else 0)
        assert (0 < result.messages == len(messages)) == (result.outcome is TranscriptOutcome.WHOLE)


@pytest.mark.parametrize("name", ["oasst_en100", "crosswoz_zh"])
def test_real_conversations_go_to_transcripts_and_back_to_trained_spans(name: str, qwen3: Any) -> None:
    chats = real(name)
    results = transcribe(chats, tokenizer=qwen3, context_length=512)
    written = [(one, result, result.text) for one, result in zip(chats, results, strict=True) if result.text]
    assert len(written) > 20
    encoded = encode_transcripts([text for _, _, text in written], tokenizer=qwen3)
    for (one, result, text), ids in zip(written, encoded.records, strict=True):
        assert encoded.tokenizer.decode(ids) == text
        trained = encoded.tokenizer.decode(ids[post_training_loss_mask(ids, **encoded.markers) == 1])
        answers = [m.content for m in one.messages[: result.messages] if m.role is Role.ASSISTANT]
        assert trained == "".join(f"<|ASSISTANT|>{qwen3.normalize(answer)}<|END|>" for answer in answers)
    packed = pack_transcripts([text for _, _, text in written], tokenizer=qwen3, block_size=512)
    assert packed.tokens.sum() == len(encoded.ids) + len(written) - packed.report.left_out
    assert packed.report.injected > 0


def test_the_bulk_renderer_and_its_policy_give_the_same_ids_and_mask(qwen3: Any) -> None:
    """Kinds written with the tokens against ids that were searched for markers."""
    tokenizer = with_control_tokens(qwen3, MARKERS)
    chats = [*real("oasst_en100"), *real("crosswoz_zh")]
    results = transcribe(chats, tokenizer=tokenizer, context_length=100_000)
    whole = [(one, r.text or "") for one, r in zip(chats, results, strict=True) if r.outcome is TranscriptOutcome.WHOLE]
    assert len(whole) > 60
    encoded = encode_transcripts([text for _, text in whole], tokenizer=tokenizer)
    rendered = render([one for one, _ in whole], "markers", tokenizer).tokens
    stream = np.concatenate([[*record, encoded.markers["eos_id"]] for record in encoded.records])
    assert np.array_equal(rendered.ids, stream)
    mask = post_training_loss_mask(stream, **encoded.markers)
    assert mask.any()
    assert np.array_equal(find_policy("post_training").token_weights(rendered.kinds, rendered.offsets), mask)


# ---- foreign tokenizers


class WordTokenizer:
    """The least a foreign tokenizer can be: words, and the special tokens it finds in any text."""

    def __init__(self, *special: str) -> None:
        self.special = {name: index for index, name in enumerate(special)}
        self.words: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self.special.get(w, 1000 + self.words.setdefault(w, len(self.words))) for w in text.split()]

    def special_token_ids(self) -> dict[str, int]:
        return self.special


WORDS = WordTokenizer(*MARKERS, "<|pad|>")


def test_a_foreign_tokenizer_may_have_the_markers() -> None:
    encoded = encode_transcripts(["<|USER|>a b<|END|><|EOS|>"], tokenizer=WORDS)
    assert encoded.ids.tolist() == [1, 1000, 1001, 3, 4]
    assert encoded.markers == {"system_id": 0, "user_id": 1, "assistant_id": 2, "end_id": 3, "eos_id": 4}


PADDED = ["<|USER|>a<|END|>", "<|USER|>a<|END|><|ASSISTANT|>b <|pad|><|END|>"]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: ids_of(tokenizer=WordTokenizer("<|SYSTEM|>", "<|USER|>", "<|END|>")),
            r"WordTokenizer has no token <\|ASSISTANT\|>, <\|EOS\|>.*load_tokenizer",
        ),
        (lambda: ids_of(*PADDED, tokenizer=WORDS), r"record 1, message 1: .*control token <\|pad\|>"),
        (
            lambda: write(talk(("system", "s"), ("user", "u"), ("assistant", "<|pad|> x"), id="r7"), tokenizer=WORDS),
            r"record 'r7', field messages\[2\].content: .*control token <\|pad\|>",
        ),
    ],
)
def test_foreign_tokenizers_that_will_not_do(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


def test_transformers_and_tokenizers_objects(qwen3: Any) -> None:
    import transformers

    hf = transformers.AutoTokenizer.from_pretrained(str(unpacked("qwen3")))
    with pytest.raises(ValueError, match=r"has no token <\|SYSTEM\|>"):
        ids_of("<|USER|>hi<|END|>", tokenizer=hf)
    hf.add_special_tokens({"additional_special_tokens": list(MARKERS)})
    text = "<|SYSTEM|>Be kind.<|END|><|USER|>Grüße, 你好!<|END|><|ASSISTANT|> ok\n<|END|>"
    ours = encode_transcripts([text], tokenizer=qwen3)
    own_ids = list(ours.markers.values())
    for tokenizer in (hf, hf.backend_tokenizer):
        theirs = encode_transcripts([text], tokenizer=tokenizer)
        their_ids = list(theirs.markers.values())
        assert their_ids == hf.convert_tokens_to_ids(list(MARKERS))
        same = dict(zip(own_ids, their_ids, strict=True))
        assert [same.get(one, one) for one in ours.ids.tolist()] == theirs.ids.tolist()
        with pytest.raises(ValueError, match=r"record 0, message 0: .*control token <\|im_end\|>"):
            ids_of("<|USER|>x<|im_end|><|END|>", tokenizer=tokenizer)
        with pytest.raises(ValueError, match=r"messages\[1\].content: .*control token <\|endoftext\|>"):
            write(chat(("user", "u"), ("assistant", "<|endoftext|>")), tokenizer=tokenizer)
