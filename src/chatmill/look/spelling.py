"""Which tokens of a vocabulary can take part in spelling some words, without a look at every token in Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
EDGE = 8
"""Bytes at both ends of a token that are compared as one number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """For each token of a vocabulary: what part of the words it can be. One value per id."""

    whole: Bools
    """It holds all of the words."""
    begins: Bools
    """It ends with a beginning of the words."""
    goes_on: Bools
    """It begins with an end of the words, or lies inside them, or has no bytes."""


class SpellingTable:
    """The bytes of all tokens with their first and last eight as numbers."""

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._lengths = np.array([len(raw) for raw in table], dtype=np.int64)
        # first byte lowest in the heads, last byte lowest in the tails: a mask then takes the outermost bytes
        heads = b"".join(raw[:EDGE].ljust(EDGE, b"\0") for raw in table)
        tails = b"".join(raw[-EDGE:][::-1].ljust(EDGE, b"\0") for raw in table)
        self._heads: NDArray[np.uint64] = np.frombuffer(heads, dtype="<u8")
        self._tails: NDArray[np.uint64] = np.frombuffer(tails, dtype="<u8")
        self._numbers: dict[bytes, int] = {}  # several ids may have the same bytes, above all in lower case
        self._number_of = np.array([self._numbers.setdefault(raw, len(self._numbers)) for raw in table], dtype=np.int32)
        self._longest = int(self._lengths.max(initial=0))

    def spelling(self, words: bytes) -> Spelling:
        """The tokens that may take part in spelling `words`."""
        whole = np.array([words in raw for raw in self._table], dtype=np.bool_)
        begins, goes_on = np.zeros(len(whole), dtype=np.bool_), self._lengths == 0
        for size in range(1, min(len(words) - 1, self._longest) + 1):
            begins |= self._with_edge(self._tails, words[:size][::-1], bytes.endswith, words[:size])
            goes_on |= self._with_edge(self._heads, words[-size:], bytes.startswith, words[-size:])
        inside = {words[i:j] for i in range(len(words)) for j in range(i + 1, min(len(words), i + self._longest) + 1)}
        is_inside = np.zeros(len(self._numbers), dtype=np.bool_)
        is_inside[[self._numbers[part] for part in inside if part in self._numbers]] = True
        goes_on |= is_inside[self._number_of]
        return Spelling(whole=whole, begins=begins, goes_on=goes_on)

    def _with_edge(self, edges: NDArray[np.uint64], outermost: bytes, check: Any, wanted: bytes) -> Bools:
        """Tokens with these bytes at one end; longer ones than fit a number are looked at one by one."""
        compared = outermost[:EDGE]
        mask = np.uint64((1 << (8 * len(compared))) - 1)
        value = np.uint64(int.from_bytes(compared, "little"))
        found: Bools = ((edges & mask) == value) & (self._lengths >= len(wanted))
        if len(wanted) > EDGE:
            for token_id in np.flatnonzero(found).tolist():
                found[token_id] = check(self._table[token_id], wanted)
        return found
