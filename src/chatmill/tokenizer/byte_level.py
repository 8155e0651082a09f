"""A tokenizer of 256 byte values plus control tokens: for tests, docs and reading bytes as they are."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from chatmill.core.tokens import offsets_of
from chatmill.tokenizer.protocol import Encoded
from chatmill.tokenizer.vocabulary import NamedIds, VocabularyTokenizer


class Utf8Backend:
    """The engine: one id per UTF-8 byte."""

    name = "UTF-8"

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Flat ids and offsets of many texts."""
        parts = [text.encode() for text in texts]
        offsets = offsets_of(np.array([len(part) for part in parts], dtype=np.int64))
        return np.frombuffer(b"".join(parts), dtype=np.uint8).astype(np.int32), offsets


class ByteTokenizer(VocabularyTokenizer):
    """Id `b` is the byte `b`; control tokens are those from 256 on."""

    def __init__(self, control_tokens: Sequence[str] = ("<|bos|>", "<|eos|>", "<|pad|>")) -> None:
        """Control tokens get the ids 256, 257, ... in the order given."""
        ids = {name: 256 + i for i, name in enumerate(control_tokens)}
        super().__init__(
            name="bytes",
            backend=Utf8Backend(),
            token_bytes={byte: bytes([byte]) for byte in range(256)},
            control_ids=ids,
            named=NamedIds(bos=ids.get("<|bos|>"), eos=ids.get("<|eos|>"), pad=ids.get("<|pad|>")),
            rules_fingerprint=lambda: "bytes",
        )
        self.origin = (ByteTokenizer, (tuple(control_tokens),))

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the control map: the rest is the same for all."""
        return hashlib.sha256(repr(("bytes", self.control_ids)).encode()).hexdigest()
