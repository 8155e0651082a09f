"""Stencils: the texts of rows that differ from a known row in nothing else, without decoding each row.

A stencil is what such rows have in common, byte for byte, with a hole for each text. Where a row consists of the
literal parts with JSON string bodies between them, it says what the known row says, with other texts. Compiled code
reads the bodies of a batch; a body with a quote of its own is none, so no row can end a string early and go on in a way
of its own. What does not fit is left to the decoder; without the compiled part that is every row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.library import library
from chatmill.core.native.unescape import unescaped
from chatmill.core.texts import Texts
from chatmill.distill.columns import RowTexts


class Filled(NamedTuple):
    """The rows of a batch that fit a stencil, and what stands in its holes."""

    places: NDArray[np.int64]
    """Their places in the batch."""
    texts: Texts
    """Row by row, without escapes."""


NOTHING = Filled(np.empty(0, dtype=np.int64), Texts.of(()))


class Stencil:
    """The literal parts of rows, with holes between them."""

    def __init__(self, literals: Sequence[bytes]) -> None:
        """What stands before, between and behind the texts; the quotes of the texts belong to it."""
        self.literals = tuple(literals)
        self.holes = len(literals) - 1

    @classmethod
    def of(cls, row: bytes, start: int, spelled: Sequence[bytes]) -> Stencil | None:
        """The stencil of a row, from its texts as they are spelled in it from `start` on, quotes included.

        A text is taken where its spelling is first found, which may be a wrong place: compare what a filled stencil
        says with what it should say before it is used.
        """
        literals, at = [], 0
        for text in spelled:
            found = row.find(text, max(at, start))
            if found < 0:
                return None
            literals.append(row[at : found + 1])
            at = found + len(text) - 1
        return cls([*literals, row[at:]]) if literals else None

    def filled(self, bodies: Sequence[bytes]) -> bytes:
        """The row with these string bodies."""
        return b"".join(part for pair in zip(self.literals, (*bodies, b""), strict=True) for part in pair)

    def fit(self, rows: RowTexts) -> Filled | None:
        """The rows that certainly fit, with their texts; None where there are none."""
        if library() is None:
            return None
        places, cuts = self._cut(rows)
        found = unescaped(rows.data, cuts[:, ::2].reshape(-1), cuts[:, 1::2].reshape(-1))
        if found is None:
            return None
        texts, read = found
        good = read.reshape(-1, self.holes).all(axis=1)
        if not good.any():
            return None
        return Filled(places[good], texts if good.all() else texts.take(np.repeat(good, self.holes)))

    def _cut(self, rows: RowTexts) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The rows with all literals at their places, and for each the begin and the end of every hole in turn."""
        first, *between, last = self.literals
        sized = [(literal, len(literal)) for literal in between]
        begin, end, missing = len(first), len(last), rows.missing
        starts_with, ends_with, find = rows.data.startswith, rows.data.endswith, rows.data.find
        places: list[int] = []
        cuts: list[int] = []
        for place, (start, stop) in enumerate(itertools.pairwise(rows.offsets.tolist())):
            at, stop = start + begin, stop - end
            if not starts_with(first, start, stop) or not ends_with(last, at, stop + end) or place in missing:
                continue
            own = [at]
            for literal, size in sized:
                found = find(literal, at, stop)
                if found < 0:
                    break
                at = found + size
                own += (found, at)
            else:
                places.append(place)
                cuts += own
                cuts.append(stop)
        return np.array(places, dtype=np.int64), np.array(cuts, dtype=np.int64).reshape(-1, 2 * self.holes)
