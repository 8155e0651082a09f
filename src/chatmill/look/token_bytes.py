"""The bytes of the tokens of a vocabulary, those of many ids at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.gather import gathered
from chatmill.core.tokens import offsets_of
from chatmill.errors import TokenizerError
from chatmill.tokenizer.tokenizer import Tokenizer

Ints = NDArray[np.int64]


def vocabulary_bytes(tokenizer: Tokenizer) -> list[bytes | None]:
    """The bytes of every id; None where the vocabulary has a gap."""
    table: list[bytes | None] = []
    for token_id in range(tokenizer.vocab_size):
        try:
            table.append(tokenizer.token_bytes(token_id))
        except TokenizerError:
            table.append(None)
    return table


class TokenBytes:
    """The bytes of ids, as a table of the whole vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        table = [*vocabulary_bytes(tokenizer), None]  # the last place is that of ids which are not in the vocabulary
        self._known = np.array([raw is not None for raw in table], dtype=np.bool_)
        self._lengths = np.array([len(raw or b"") for raw in table], dtype=np.int64)
        self._starts = offsets_of(self._lengths)[:-1]
        self._bytes = np.frombuffer(b"".join(raw or b"" for raw in table), dtype=np.uint8)

    def _places(self, ids: NDArray[np.integer]) -> Ints:
        """Where the ids are in the table."""
        places: Ints = np.minimum(ids, len(self._known) - 1).astype(np.int64)
        return places

    def has(self, ids: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Which ids the vocabulary has."""
        return self._known[self._places(ids)]

    def joined(self, ids: NDArray[np.integer]) -> tuple[bytes, Ints]:
        """The bytes of all ids, none for those that are not in the vocabulary; and where each begins, with the end."""
        places = self._places(ids)
        lengths = self._lengths[places]
        found = gathered([self._bytes], np.zeros(len(places), dtype=np.uint8), self._starts[places], lengths)
        return found.tobytes(), offsets_of(lengths)
