"""The bytes of the tokens of a vocabulary: those of many ids at once, and which tokens may spell some words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of, ranges
from chatmill.errors import TokenizerError
from chatmill.tokenizer.tokenizer import Tokenizer

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
EDGE = 8
"""Bytes at both ends of a token that are compared as one number; longer pieces of the words are known by them."""


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

    def __init__(self, tokenizer: Tokenizer, control: bytes | None = None) -> None:
        """`control` are the bytes of every control token; default: those of its name."""
        self.tokenizer = tokenizer
        table = [*vocabulary_bytes(tokenizer), None]  # the last place is that of ids which are not in the vocabulary
        for token_id in tokenizer.control_ids.values() if control is not None else ():
            table[token_id] = control
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
        return self._bytes[ranges(self._starts[places], lengths)].tobytes(), offsets_of(lengths)


class Spelling(NamedTuple):
    """What part of some words each token may be, A to Z in either case: perhaps too many tokens, never too few.

    One value per id.
    """

    whole: Bools
    """It may hold all of the words."""
    begins: Bools
    """It ends with a beginning of the words."""
    goes_on: Bools
    """It begins with an end of the words, or lies inside them, or has no bytes."""


class SpellingTable:
    """The bytes of all tokens, with their first and last eight as numbers."""

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = [raw.lower() for raw in table]
        self._joined = b"".join(self._table)
        self._ends = np.cumsum([len(raw) for raw in self._table])
        # first byte lowest in the heads, last byte lowest in the tails: a mask then takes the outermost bytes
        heads = b"".join(raw[:EDGE].ljust(EDGE, b"\0") for raw in self._table)
        tails = b"".join(raw[-EDGE:][::-1].ljust(EDGE, b"\0") for raw in self._table)
        self._heads: NDArray[np.uint64] = np.frombuffer(heads, dtype="<u8")
        self._tails: NDArray[np.uint64] = np.frombuffer(tails, dtype="<u8")

    def spelling(self, words: bytes) -> Spelling:
        """The tokens that may take part in spelling `words`."""
        words = words.lower()
        longest = max(map(len, self._table), default=0)
        inside = {words[i : i + size] for i in range(len(words)) for size in range(longest + 1)}
        whole = self._holding(words[:EDGE])
        begins = whole.copy()
        goes_on = self._holding(words[-EDGE:]) | np.array([raw in inside for raw in self._table], dtype=np.bool_)
        for size in range(1, min(len(words), EDGE) + 1):
            mask = np.uint64((1 << (8 * size)) - 1)
            begins |= self._tails & mask == int.from_bytes(words[:size], "big")
            goes_on |= self._heads & mask == int.from_bytes(words[-size:], "little")
        return Spelling(whole, begins, goes_on)

    def _holding(self, piece: bytes) -> Bools:
        """The tokens in which a piece begins; it may end in the next token of the table."""
        places = [found.start() for found in re.finditer(b"(?=%b)" % re.escape(piece), self._joined)]
        holding = np.zeros(len(self._table), dtype=np.bool_)
        holding[np.searchsorted(self._ends, places, side="right")] = True
        return holding
