"""Which tokens of a vocabulary may take part in spelling some words: perhaps too many of them, never too few."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
EDGE = 8
"""Bytes at both ends of a token that are compared as one number; longer pieces of the words are known by them."""


class Spelling(NamedTuple):
    """For each token what part of the words it may be, A to Z in either case. One value per id."""

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
