"""A tokenizer of 256 byte values plus control tokens: for tests, docs and reading bytes as they are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import TokenizerError
from chatmill.tokenizer.control import control_pattern, lookup
from chatmill.tokenizer.protocol import Encoded


class ByteTokenizer:
    """Id `b` is the byte `b`; control tokens are those from 256 on."""

    def __init__(self, control_tokens: Sequence[str] = ("<|bos|>", "<|eos|>", "<|pad|>")) -> None:
        """Control tokens get the ids 256, 257, ... in the order given."""
        self.name = "bytes"
        self.control_ids: Mapping[str, int] = {name: 256 + i for i, name in enumerate(control_tokens)}
        self._names = {token_id: name for name, token_id in self.control_ids.items()}
        self._pattern = control_pattern(self.control_ids)
        self.vocab_size = 256 + len(self.control_ids)
        self.bos_id = self.control_ids.get("<|bos|>")
        self.eos_id = self.control_ids.get("<|eos|>")
        self.pad_id = self.control_ids.get("<|pad|>")
        self.text_fingerprint = "bytes"
        self.fingerprint = hashlib.sha256(repr(("bytes", self.control_ids)).encode()).hexdigest()

    def control(self, name: str) -> int:
        """The id of a control token."""
        return lookup(self.control_ids, name, self.name)

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """One id per UTF-8 byte."""
        parts = [_utf8(text) for text in texts]
        offsets = np.zeros(len(parts) + 1, dtype=np.int64)
        np.cumsum([len(p) for p in parts], out=offsets[1:])
        return np.frombuffer(b"".join(parts), dtype=np.uint8).astype(np.int32), offsets

    def encode_documents(self, texts: Sequence[str]) -> Encoded:
        """One id per byte, or per control token where the text spells one."""
        rows: list[list[int]] = []
        for text in texts:
            pieces = self._pattern.split(text) if self._pattern else [text]
            row: list[int] = []
            for i, piece in enumerate(pieces):
                row += [self.control_ids[piece]] if i % 2 else list(_utf8(piece))
            rows.append(row)
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(r) for r in rows], out=offsets[1:])
        return np.array([i for r in rows for i in r], dtype=np.int32), offsets

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of a text."""
        return list(_utf8(text))

    def split_points(
        self, encoded: Encoded, which: NDArray[np.int64], prefixes: Sequence[str], texts: Sequence[str]
    ) -> NDArray[np.int64]:
        """Bytes of each prefix."""
        return np.array([len(prefix.encode()) for prefix in prefixes], dtype=np.int64)

    def byte_points(
        self, encoded: Encoded, which: NDArray[np.int64], prefix_bytes: NDArray[np.int64], texts: Sequence[str]
    ) -> NDArray[np.int64]:
        """A token is a byte."""
        return encoded[1][which] + prefix_bytes

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Text of the ids; control tokens are spelled out."""
        return b"".join(self.token_bytes(int(i)) for i in ids).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The byte itself, or the UTF-8 of a control token's name."""
        if 0 <= token_id < 256:
            return bytes([token_id])
        if token_id in self._names:
            return self._names[token_id].encode()
        raise TokenizerError(f"id {token_id} is not in the vocabulary of {self.vocab_size} ids")

    def normalize(self, text: str) -> str:
        """Nothing is normalised."""
        return text

    def with_added(self, names: Sequence[str]) -> ByteTokenizer:
        """A tokenizer with these control tokens too, after the ones there are."""
        return ByteTokenizer(tuple(dict.fromkeys([*self.control_ids, *names])))


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the text has a lone surrogate at character {error.start}: it has no UTF-8 form"
        ) from None
