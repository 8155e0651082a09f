"""Engines that are compared by the answers of another process."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from chatmill.tokenizer.backends import GigatokenBackend
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens
from chatmill.tokenizer.probe import PROBE, answers_of
from tests.data.tokenizer_files import unpacked


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "o200k"])
def test_a_reference_and_a_fast_engine_give_the_same_answers(name: str) -> None:
    source = name if name == "o200k" else unpacked(name)
    reference: Any = load_tokenizer(source, engine="reference")
    unchecked: Any = load_tokenizer(source, engine="unchecked")
    assert (reference.backend.name != "gigatoken", unchecked.backend.name) == (True, "gigatoken")
    answers = pickle.loads(pickle.dumps(answers_of(reference)))
    assert answers == answers_of(unchecked)
    assert (len(answers.ids), len(answers.normalized)) == (len(PROBE), len(PROBE))
    assert (answers.normalized != PROBE) == (name == "qwen3")  # it has a normalizer
    assert answers.given_by(unchecked)
    assert answers.given_by(with_control_tokens(unchecked, ["<|more|>"]))


def test_other_answers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = answers_of(load_tokenizer(unpacked("gpt2"), engine="reference"))  # type: ignore[arg-type]
    other: Any = load_tokenizer(unpacked("qwen3"), engine="unchecked")
    assert not answers.given_by(other)
    unchecked: Any = load_tokenizer(unpacked("gpt2"), engine="unchecked")
    assert answers.given_by(unchecked)
    original = GigatokenBackend.encode_batch

    def wrong_at(text: str) -> Any:
        def encode(self: GigatokenBackend, texts: Any) -> Any:
            ids, offsets = original(self, texts)
            return (np.roll(ids, 1) if list(texts) == [text] else ids), offsets

        return encode

    telling = [text for text in PROBE if len(set(unchecked.encode(text))) > 1]
    assert len(telling) > 15
    for text in telling:
        monkeypatch.setattr(GigatokenBackend, "encode_batch", wrong_at(text))
        assert not answers.given_by(unchecked)


def test_bytes_that_do_not_add_up_are_noticed() -> None:
    answers = answers_of(load_tokenizer(unpacked("gpt2"), engine="reference"))  # type: ignore[arg-type]
    unchecked: Any = load_tokenizer(unpacked("gpt2"), engine="unchecked")
    unchecked = replace(unchecked, text_tokens={**unchecked.text_tokens, unchecked.encode("world")[0]: b"?"})
    assert unchecked.backend.encode_batch(PROBE)[0].tolist() == [i for row in answers.ids for i in row]
    assert answers.given_by(unchecked) == (unchecked.encode("world")[0] not in {i for row in answers.ids for i in row})
    unchecked = replace(unchecked, text_tokens={**unchecked.text_tokens, answers.ids[5][0]: b"?"})
    assert not answers.given_by(unchecked)
