"""A tokenizer of 256 byte values plus control tokens: for tests, docs and reading bytes as they are."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property, partial

import numpy as np

from chatmill.core.canonical import canonical_json
from chatmill.core.tokens import offsets_of
from chatmill.tokenizer.backends import Encoded
from chatmill.tokenizer.tokenizer import Tokenizer


class Utf8Backend:
    """The engine: one id per UTF-8 byte."""

    name = "UTF-8"

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Flat ids and offsets of many texts."""
        parts = [text.encode() for text in texts]
        offsets = offsets_of(np.array([len(part) for part in parts], dtype=np.int64))
        return np.frombuffer(b"".join(parts), dtype=np.uint8).astype(np.int32), offsets


class ByteTokenizer(Tokenizer):
    """Id `b` is the byte `b`; control tokens are those from 256 on."""

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the control map: the rest is the same for all."""
        return hashlib.sha256(canonical_json(["bytes", self.control_ids])).hexdigest()


def byte_tokenizer(control_tokens: Sequence[str] = ("<|bos|>", "<|eos|>", "<|pad|>")) -> Tokenizer:
    """Make the tokenizer of bytes; control tokens get the ids 256, 257, ... in the order given."""
    ids = {name: 256 + i for i, name in enumerate(control_tokens)}
    return ByteTokenizer(
        name="bytes",
        backend=Utf8Backend(),
        text_tokens={byte: bytes([byte]) for byte in range(256)},
        control_ids=ids,
        rules_fingerprint=lambda: "bytes",
        bos_id=ids.get("<|bos|>"),
        eos_id=ids.get("<|eos|>"),
        pad_id=ids.get("<|pad|>"),
        origin=partial(byte_tokenizer, tuple(control_tokens)),
    )
