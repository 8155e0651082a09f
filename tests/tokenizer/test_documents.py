"""Finished documents with control tokens that match in ways of their own, and ones that were added later."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from chatmill.errors import TokenizerError
from chatmill.tokenizer.load import load_tokenizer


def stripping_tokenizer() -> Any:
    """One id per byte, and a control token that swallows the white space before it."""
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    return made


def test_documents_know_control_tokens_that_strip_and_ones_that_were_added() -> None:
    theirs = stripping_tokenizer()
    ours = load_tokenizer(theirs, control_tokens=["<|USER|>", "<|END|>"])
    ids, offsets = ours.encode_documents(["a  <mask>b", "<|USER|>a <mask><|END|>", "", "<|END|>"])
    assert ids[: offsets[1]].tolist() == theirs.encode("a  <mask>b").ids
    a, mask = theirs.encode("a").ids[0], theirs.token_to_id("<mask>")
    assert ids[offsets[1] : offsets[2]].tolist() == [mask + 1, a, mask, mask + 2]
    assert ids[offsets[2] :].tolist() == [mask + 2]
    assert offsets.tolist() == [0, 3, 7, 7, 8]
    assert mask not in ours.encode("a <mask>")


def test_a_missing_control_token_says_how_to_add_it() -> None:
    tokenizer = load_tokenizer("bytes")
    with pytest.raises(TokenizerError, match=r"It has: <\|.*load_tokenizer\(\.\.\., control_tokens="):
        tokenizer.control("<|USER|>")
    assert load_tokenizer("bytes", control_tokens=["<|USER|>"]).control("<|USER|>") == tokenizer.vocab_size
