"""The reference engine: the same tokenizer without gigatoken."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from chatmill.core.conversation import Conversation
from chatmill.errors import TokenizerError, UnknownNameError
from chatmill.tokenizer.assets import find_o200k
from chatmill.tokenizer.backends import Engine
from chatmill.tokenizer.load import load_tokenizer
from chatmill.tokenizer.tiktoken_file import load_tiktoken
from tests.data.tokenizer_files import unpacked


@pytest.mark.parametrize(("name", "engine"), [("o200k", "tiktoken"), ("gpt2", "tokenizers")])
def test_both_engines_are_one_tokenizer(
    name: str, engine: str, o200k: Any, gpt2: Any, real_conversations: Callable[[int], list[Conversation]]
) -> None:
    fast = {"o200k": o200k, "gpt2": gpt2}[name]
    reference: Any = load_tokenizer(name if name == "o200k" else unpacked(name), engine="reference")
    assert (fast.backend.name, reference.backend.name) == ("gigatoken", engine)
    assert reference.fingerprint == fast.fingerprint
    assert (reference.vocab_size, reference.control_ids) == (fast.vocab_size, fast.control_ids)
    texts = [message.content for one in real_conversations(3) for message in one.messages]
    assert len(texts) > 150
    ids, offsets = fast.encode_batch(texts)
    slow_ids, slow_offsets = reference.encode_batch(texts)
    assert np.array_equal(ids, slow_ids)
    assert np.array_equal(offsets, slow_offsets)
    assert reference.decode(slow_ids) == fast.decode(ids)
    assert pickle.loads(pickle.dumps(reference)).backend.name == engine


@pytest.mark.parametrize("name", ["o200k", "gpt2"])
def test_an_unchecked_tokenizer_is_the_fast_one_without_the_comparison(
    name: str, o200k: Any, gpt2: Any, real_conversations: Any
) -> None:
    fast = {"o200k": o200k, "gpt2": gpt2}[name]
    unchecked: Any = load_tokenizer(name if name == "o200k" else unpacked(name), engine="unchecked")
    assert (unchecked.backend.name, unchecked.bytes_add_up, unchecked.fingerprint) == (
        "gigatoken",
        True,
        fast.fingerprint,
    )
    texts = [message.content for one in real_conversations(3) for message in one.messages]
    ids, offsets = fast.encode_batch(texts)
    assert np.array_equal(unchecked.encode_batch(texts)[0], ids)
    which = np.arange(len(texts))
    prefixes = [text[:5] for text in texts]
    wanted = fast.split_points((ids, offsets), which, prefixes, texts)
    assert np.array_equal(unchecked.split_points((ids, offsets), which, prefixes, texts), wanted)
    assert unchecked.normalize("Cafe\u0301") == fast.normalize("Cafe\u0301")


def test_what_has_no_reference_engine_is_said() -> None:
    with pytest.raises(UnknownNameError, match="fast, unchecked, reference"):
        load_tokenizer("bytes", engine="slow")
    with pytest.raises(TokenizerError, match="no reference engine encodes the pattern 'qwen2'"):
        load_tiktoken(find_o200k(), pattern="qwen2", engine=Engine.REFERENCE)
