"""The rows of stored trees, as documents: for what has no place for trees, and to compare them row by row."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

import numpy as np

from chatmill.core.kinds import REPEATED
from chatmill.core.tokens import offsets_of
from chatmill.core.trees import rows_of_tree
from chatmill.store.split import Documents, Ints, Split, TokenColumns


class RowsOfTrees(Split):
    """One document for each row of each tree: the trunk, and then each branch after the path that leads to it.

    A token is trained in the first row that has it; in the others it is context, as in rows per turn.
    """

    def __init__(self, stored: Split) -> None:
        self.stored, self.shards = stored, stored.shards
        self.has_masks, self.has_kinds = stored.has_masks, stored.has_kinds
        self.has_logprobs = stored.has_logprobs
        self.has_sides = stored.has_sides
        branches = stored.branches(np.arange(len(stored), dtype=np.int64))
        self._rows = branches.counts + 1
        self._firsts = offsets_of(self._rows)
        """The first row of each tree."""
        trunks = self._firsts[:-1]
        begins, depths = np.zeros((2, int(self._firsts[-1])), dtype=np.int64)
        others = np.delete(np.arange(len(begins)), trunks)
        begins[others], depths[others] = branches.starts, branches.depths
        after = np.append(begins[1:], 0)
        after[self._firsts[1:] - 1] = stored.lengths
        self._lengths: Ints = depths + after - begins

    @property
    def lengths(self) -> Ints:
        """Tokens of every row."""
        return self._lengths

    @cached_property
    def fingerprint(self) -> str:
        """That of the trees, taken apart."""
        return hashlib.sha256(f"rows of {self.stored.fingerprint}".encode()).hexdigest()

    def shard_columns(self, shard: int) -> TokenColumns:
        """Return those of the trees: every value of a row is among them."""
        return self.stored.shard_columns(shard)

    def facts(self, name: str, numbers: Ints) -> list[Any] | None:
        """Return those of the tree of each row; how many turns a row has is not known."""
        return None if name == "turns" else self.stored.facts(name, self.trees_of(numbers))

    def trees_of(self, numbers: Ints) -> Ints:
        """Return the tree of each row."""
        return np.searchsorted(self._firsts, numbers, side="right") - 1

    def locate(self, numbers: Ints) -> tuple[Ints, Ints, Ints]:
        """Return where the tree of each row is, with the length of the row: a row is no piece of a file."""
        shards, starts, _ = self.stored.locate(self.trees_of(numbers))
        return shards, starts, self._lengths[numbers]

    def gather(self, numbers: Ints, lengths: Ints | None = None) -> Documents:
        """Return some rows in the order asked for, or only the first `lengths` tokens of each."""
        trees, place = np.unique(self.trees_of(numbers), return_inverse=True)
        stored = self.stored.gather(trees)
        sizes, branches = np.diff(stored.offsets), self.stored.branches(trees)
        ends = branches.positions_and_ends(sizes)[1]
        apart = []
        for tree, first in enumerate(stored.offsets[:-1].tolist()):
            starts = branches.starts[branches.offsets[tree] : branches.offsets[tree + 1]]
            its_ends = ends[first : first + int(sizes[tree])]
            apart.append([(first + path, older) for path, older in rows_of_tree(its_ends, starts)])
        wanted = numbers - self._firsts[trees[place]]
        kept = self._lengths[numbers] if lengths is None else lengths
        rows = [apart[tree][row] for tree, row in zip(place.tolist(), wanted.tolist(), strict=True)]
        at = np.concatenate(
            [np.empty(0, dtype=np.int64), *(path[:size] for (path, _), size in zip(rows, kept.tolist(), strict=True))]
        )
        offsets = offsets_of(kept)
        older = np.arange(len(at)) - np.repeat(offsets[:-1], kept) < np.repeat([old for _, old in rows], kept)
        weights = (
            None if stored.weights is None else np.where(older, 0, stored.weights[at]).astype(stored.weights.dtype)
        )
        kinds = None if stored.kinds is None else stored.kinds[at]
        if kinds is not None:
            repeated = older & (stored.full_weights[at] > 0)
            kinds = np.where(repeated, kinds | np.uint8(REPEATED), kinds)
        logprobs = None if stored.logprobs is None else stored.logprobs[at]
        return Documents(ids=stored.ids[at], offsets=offsets, weights=weights, kinds=kinds, logprobs=logprobs)
