"""Trees: the rows of a conversation with their shared beginnings stored once, and what every token of them sees.

The tokens of a tree are in depth-first order. A branch begins with a copy of the last token that it shares, which is
never a target, so that every target follows the token that predicts it. Where each branch begins, and the position of
its first token, says all: the *position* of a token is its depth, and its *end* the place after the last token that
may look at it. Token q sees token k when `k <= q < end[k]`. A document is a tree without branches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.trees import tree_ends
from chatmill.core.tokens import offsets_of, ranges
from chatmill.errors import DataError

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """The branches of some trees; the trunk, which begins every tree, is not among them."""

    offsets: Ints
    """One more than there are trees."""
    starts: Ints
    """Where each branch begins, counted in its tree."""
    depths: Ints
    """The position of its first token."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def none(cls, trees: int) -> Branches:
        """Trees that are plain documents."""
        empty = np.empty(0, dtype=np.int64)
        return cls(offsets=np.zeros(trees + 1, dtype=np.int64), starts=empty, depths=empty)

    @property
    def counts(self) -> Ints:
        """Branches of each tree."""
        return np.diff(self.offsets)

    def take(self, trees: Ints) -> Branches:
        """Return some trees, in the order asked for."""
        counts = self.counts[trees]
        at = ranges(self.offsets[trees], counts)
        return Branches(offsets=offsets_of(counts), starts=self.starts[at], depths=self.depths[at])

    def cut(self, lengths: Ints) -> Branches:
        """Return the first tokens of each tree: branches that begin after them are gone."""
        stays = self.starts < np.repeat(lengths, self.counts)
        return Branches(offsets=offsets_of(stays)[self.offsets], starts=self.starts[stays], depths=self.depths[stays])

    def flat_starts(self, lengths: Ints) -> Ints:
        """Return where branches begin, counted over trees of these lengths that follow each other."""
        return self.starts + np.repeat(offsets_of(lengths)[:-1], self.counts)

    def positions_and_ends(self, lengths: Ints) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Position and end of every token of trees that follow each other; ends are counted in their tree."""
        try:
            return tree_ends(lengths, self.counts, self.starts, self.depths)
        except IndexError:
            raise DataError(
                "a branch does not fit its tree: branches begin inside of it, one after another, at the position of "
                "a token of the branch before. The column of branches is damaged, or is that of another dataset"
            ) from None


def joined(parts: list[Branches]) -> Branches:
    """Return the trees of several batches, one batch after the other."""
    return Branches(
        offsets=offsets_of(np.concatenate([np.empty(0, dtype=np.int64), *(part.counts for part in parts)])),
        starts=np.concatenate([np.empty(0, dtype=np.int64), *(part.starts for part in parts)]),
        depths=np.concatenate([np.empty(0, dtype=np.int64), *(part.depths for part in parts)]),
    )


def rows_of_tree(ends: NDArray[np.integer], starts: NDArray[np.integer]) -> Iterator[tuple[Ints, int]]:
    """The rows of one tree: for each branch, the trunk first, the tokens on its path, and how many are older than it.

    `ends` are those of its tokens, `starts` those of its branches. A row that another one begins with is not there.
    """
    for begin, after in zip([0, *starts.tolist()], [*starts.tolist(), len(ends)], strict=True):
        path = np.flatnonzero(ends[:after] >= after)
        yield path, int(np.searchsorted(path, begin))
