"""What a Chatmill tokenizer is: text in, flat ids out, and control tokens by name only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from chatmill.core.texts import Texts

Encoded = tuple[NDArray[np.int32], NDArray[np.int64]]
"""Flat token ids of many texts, and one more offset than there are texts."""


@runtime_checkable
class Tokenizer(Protocol):
    """Turns text into ids. Text is text: only `encode_documents` ever gives a control id."""

    name: str
    vocab_size: int
    """One above the largest id, control tokens included."""
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None

    @property
    def fingerprint(self) -> str:
        """sha256 over the vocabulary bytes, the control map and the rules of splitting."""
        ...

    @property
    def control_ids(self) -> Mapping[str, int]:
        """Control token -> id: all added tokens, flagged special or not."""
        ...

    def control(self, name: str) -> int:
        """The id of a control token, or a `TokenizerError` that lists the ones there are."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Encode many texts in one call; control tokens are not recognised."""
        ...

    def encode_documents(self, texts: Sequence[str]) -> Encoded:
        """Encode finished documents: control tokens spelled in the text become their ids; nothing is added."""
        ...

    def encode(self, text: str) -> list[int]:
        """Encode one text; control tokens are not recognised."""
        ...

    def split_points(
        self, encoded: Encoded, which: NDArray[np.int64], prefixes: Sequence[str], texts: Sequence[str]
    ) -> NDArray[np.int64]:
        """For each pair: how many tokens of `texts[which[i]]` start inside its beginning `prefixes[i]`.

        `encoded` is what `encode_batch(texts)` gave.
        """
        ...

    def byte_points(
        self, encoded: Encoded, which: NDArray[np.int64], prefix_bytes: NDArray[np.int64], texts: Texts
    ) -> NDArray[np.int64]:
        """For each pair: the first token of `texts[which[i]]`, counted among all, that starts at or behind a byte."""
        ...

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Text of the ids; control tokens are spelled out, broken UTF-8 becomes U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one id stands for."""
        ...

    def normalize(self, text: str) -> str:
        """What the tokenizer's declared normalizer makes of a text before encoding it."""
        ...
