"""Spec 2, transcripts: encoding and packing them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation
from chatmill.core.message_parser import parse_messages
from chatmill.errors import ChatmillError, RecordError
from chatmill.label.presets import find_policy
from chatmill.pack.stream import post_training_loss_mask, post_training_targets
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
from tests.chats import chat_record as chat
from tests.data.tokenizer_files import unpacked
from tests.systems.marker_texts import BYTES, ids_of, qwen3, real_conversations

S, U, A, E, EOS = (BYTES.control(name) for name in MARKERS)


# ---- encoding


def test_each_marker_is_one_id_and_spans_are_verbatim() -> None:
    text = "<|SYSTEM|> be\r\n<|END|>\n \t<|USER|>hi<|END|><|ASSISTANT|>\u3000yo\n<|END|>\n<|EOS|>\n"
    expected = [S, *b" be\r\n", E, U, *b"hi", E, A, *"\u3000yo\n".encode(), E, EOS]
    assert ids_of(text) == expected


def test_only_the_five_strings_become_ids() -> None:
    other = "<|user|><|USER |><|im_end|><|endoftext|><|TOOL|><||USER|><|USER"
    assert ids_of(f"<|USER|>{other}<|END|>") == [U, *other.encode(), E]
    tokenizer = qwen3()
    encoded = encode_transcripts([f"<|USER|>{other}<|END|>"], tokenizer=tokenizer)
    inner = encoded.ids[1:-1]
    assert encoded.tokenizer.decode(inner) == other
    assert not set(inner.tolist()) & set(encoded.tokenizer.control_ids.values())


def test_markers_are_added_above_the_vocabulary_of_a_tokenizer_that_lacks_them() -> None:
    tokenizer = qwen3()
    encoded = encode_transcripts(["<|USER|>hi<|END|><|EOS|>"], tokenizer=tokenizer)
    assert list(encoded.markers.values()) == [tokenizer.vocab_size + i for i in range(5)]
    assert encoded.tokenizer.vocab_size == tokenizer.vocab_size + 5
    assert "<|USER|>" not in tokenizer.control_ids
    assert encoded.tokenizer.decode(encoded.ids) == "<|USER|>hi<|END|><|EOS|>"
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
        ("\ufeff<|USER|>x<|END|>", 0, "\ufeff"),
    ],
)
def test_text_outside_a_span_is_an_error_with_its_position(text: str, position: int, start: str) -> None:
    with pytest.raises(
        ValueError,
        match=f"record 1, character {position}: text outside a span: {start!r}".replace("\\", r"\\"),
    ):
        encode_transcripts(["<|USER|>fine<|END|>", text], tokenizer=BYTES)
    with pytest.raises(ChatmillError, match="a file:7, character"):
        encode_transcripts([text], tokenizer=BYTES, places=["a file:7"])


def test_unclosed_spans_and_stray_end_markers_are_kept_for_the_mask_to_judge() -> None:
    assert ids_of("<|USER|>a<|ASSISTANT|>b<|END|> <|END|><|USER|>c<|EOS|>") == [
        U,
        97,
        A,
        98,
        E,
        E,
        U,
        99,
        EOS,
    ]


def test_nothing_and_empty_spans() -> None:
    assert len(encode_transcripts([], tokenizer=BYTES)) == 0
    assert encode_transcripts([], tokenizer=BYTES).records == []
    assert len(pack_transcripts([], tokenizer=BYTES, block_size=4)) == 0
    assert pack_transcripts([""], tokenizer=BYTES, block_size=2).input_ids.tolist() == [[EOS, EOS]]
    encoded = encode_transcripts(["", " \n", "<|USER|><|END|>", ""], tokenizer=BYTES)
    assert [record.tolist() for record in encoded.records] == [[], [], [U, E], []]


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
    texts = ["".join(f"{m}{t}<|END|>{gap}" for m, t, gap in record) for record in records]
    encoded = encode_transcripts(texts, tokenizer=BYTES)
    expected = []
    for record in records:
        ids: list[int] = []
        for marker, text, gap in record:
            ids += [BYTES.control(marker), *text.encode(), E]
            ids += [EOS] if gap == "<|EOS|>" else []
        expected.append(ids)
    assert [record.tolist() for record in encoded.records] == expected


def test_packing_transcripts_marks_assistant_spans() -> None:
    packed = pack_transcripts(
        ["<|USER|>a<|END|><|ASSISTANT|>b<|END|>", "<|USER|>c<|END|><|ASSISTANT|>d<|END|><|EOS|>"],
        tokenizer=BYTES,
        block_size=7,
    )
    assert packed.input_ids.tolist() == [[U, 97, E, A, 98, E, EOS], [U, 99, E, A, 100, E, EOS]]
    assert packed.loss_mask.tolist() == [[0, 0, 0, 1, 1, 1, 0]] * 2
    _, targets = post_training_targets(packed.input_ids, packed.loss_mask)
    assert targets.tolist() == [[-100, -100, A, 98, E, -100], [-100, -100, A, 100, E, -100]]


# ---- foreign tokenizers


class WordTokenizer:
    """The least a foreign tokenizer can be: words, and the special tokens it finds in any text."""

    def __init__(self, *special: str) -> None:
        self.special = {name: index for index, name in enumerate(special)}
        self.words: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self.special.get(w, 1000 + self.words.setdefault(w, len(self.words))) for w in text.split()]

    def token_to_id(self, token: str) -> int | None:
        return self.special.get(token)

    def special_token_ids(self) -> dict[str, int]:
        return self.special


def test_a_foreign_tokenizer_may_have_the_markers() -> None:
    encoded = encode_transcripts(["<|USER|>a b<|END|><|EOS|>"], tokenizer=WordTokenizer(*MARKERS))
    assert encoded.ids.tolist() == [1, 1000, 1001, 3, 4]
    assert encoded.markers == dict(
        zip(("system_id", "user_id", "assistant_id", "end_id", "eos_id"), range(5), strict=True)
    )


def test_a_foreign_tokenizer_without_the_markers_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"WordTokenizer has no token <\|ASSISTANT\|>, <\|EOS\|>.*load_tokenizer"):
        encode_transcripts([], tokenizer=WordTokenizer("<|SYSTEM|>", "<|USER|>", "<|END|>"))
    with pytest.raises(ValueError, match=r"int is not a tokenizer: it has no method encode"):
        encode_transcripts([], tokenizer=3)


def test_content_that_a_foreign_tokenizer_makes_a_control_token_is_an_error() -> None:
    tokenizer = WordTokenizer(*MARKERS, "<|pad|>")
    with pytest.raises(ValueError, match=r"record 1, message 1: .*control token <\|pad\|>"):
        encode_transcripts(["<|USER|>a<|END|>", "<|USER|>a<|END|><|ASSISTANT|>b <|pad|><|END|>"], tokenizer=tokenizer)
    with pytest.raises(RecordError, match=r"record 'r7', field messages\[2\].content: .*control token <\|pad\|>"):
        conversation_to_transcript(
            chat(("system", "s"), ("user", "u"), ("assistant", "<|pad|> x"), id="r7"),
            tokenizer=tokenizer,
            context_length=99,
        )
    with pytest.raises(RecordError, match="record '0', field messages"):
        conversation_to_transcript({"id": 0, "messages": [{}]}, tokenizer=tokenizer, context_length=99)


def test_transformers_and_tokenizers_objects() -> None:
    import transformers

    hf = transformers.AutoTokenizer.from_pretrained(str(unpacked("qwen3")))
    with pytest.raises(ValueError, match=r"has no token <\|SYSTEM\|>"):
        encode_transcripts(["<|USER|>hi<|END|>"], tokenizer=hf)
    hf.add_special_tokens({"additional_special_tokens": list(MARKERS)})
    text = "<|SYSTEM|>Be kind.<|END|><|USER|>Grüße, 你好!<|END|><|ASSISTANT|> ok\n<|END|>"
    ours = encode_transcripts([text], tokenizer=qwen3())
    for tokenizer in (hf, hf.backend_tokenizer):
        theirs = encode_transcripts([text], tokenizer=tokenizer)
        assert theirs.ids[theirs.ids < 151643].tolist() == ours.ids[ours.ids < 151643].tolist()
        assert list(theirs.markers.values()) == hf.convert_tokens_to_ids(list(MARKERS))
        assert ours.ids[ours.ids > 151668].tolist() == theirs.ids[theirs.ids > 151668].tolist()
        with pytest.raises(ValueError, match=r"record 0, message 0: .*control token <\|im_end\|>"):
            encode_transcripts(["<|USER|>x<|im_end|><|END|>"], tokenizer=tokenizer)
        with pytest.raises(ValueError, match=r"messages\[1\].content: .*control token <\|endoftext\|>"):
            conversation_to_transcript(
                chat(("user", "u"), ("assistant", "<|endoftext|>")), tokenizer=tokenizer, context_length=99
            )


def test_what_a_foreign_tokenizer_adds_by_itself_is_left_off() -> None:
    import transformers

    hf = transformers.AutoTokenizer.from_pretrained(str(unpacked("mistral_nemo")))
    assert hf.encode("hi")[0] == hf.bos_token_id, "this tokenizer begins texts with BOS"
    alone = len(hf.encode("hi", add_special_tokens=False))
    fits = 2 * (alone + 2)
    conversation = chat(("user", "hi"), ("assistant", "hi"))
    assert conversation_to_transcript(conversation, tokenizer=hf, context_length=fits) is not None
    assert conversation_to_transcript(conversation, tokenizer=hf, context_length=fits - 1) is None


def test_the_bulk_renderer_and_its_policy_give_the_same_ids_and_mask() -> None:
    """Kinds written with the tokens against ids that were searched for markers."""
    tokenizer = with_control_tokens(qwen3(), MARKERS)
    chats = [
        Conversation(parse_messages(record["messages"]))
        for name in ("oasst_en100", "crosswoz_zh")
        for record in real_conversations(name, 60)
    ]
    results = transcribe(chats, tokenizer=tokenizer, context_length=100_000)
    whole = [(one, r.text or "") for one, r in zip(chats, results, strict=True) if r.outcome is TranscriptOutcome.WHOLE]
    assert len(whole) > 60
    encoded = encode_transcripts([text for _, text in whole], tokenizer=tokenizer)
    rendered = render([one for one, _ in whole], "markers", tokenizer).tokens
    stream = np.concatenate([[*record, encoded.markers["eos_id"]] for record in encoded.records])
    assert np.array_equal(rendered.ids, stream)
    weights = find_policy("post_training").token_weights(rendered.kinds, rendered.offsets)
    mask = post_training_loss_mask(stream, **encoded.markers)
    assert mask.any()
    assert np.array_equal(weights, mask)
