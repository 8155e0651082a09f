"""Counts tokens of a split by kind, turn and span in one pass: run by run, never token by token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import KINDS, PARTS, PLAIN, RoleCode, role_name, roles_of
from chatmill.core.tokens import segment_sums
from chatmill.label.policy import Policy
from chatmill.look.items import Ints
from chatmill.look.splits import LookSplit, Progress, TokenBatch

MOST_TURNS = 64
"""Turns that are counted apart; later ones are counted with this one."""
SPANS = 3


class TokenCounts:
    """Tokens and trained tokens of a split, by kind, turn and span; what is not stored stays 0."""

    def __init__(self, items: int, policies: Sequence[Policy] = ()) -> None:
        """`policies` are those to try on the kinds."""
        self.kinds: NDArray[np.int64] = np.zeros((KINDS, 2), dtype=np.int64)
        """Per kind: tokens, trained tokens."""
        self.turns: NDArray[np.int64] = np.zeros((MOST_TURNS + 1, 2), dtype=np.int64)
        """Per turn (0: before the first user): tokens, trained tokens."""
        self.spans: NDArray[np.int64] = np.zeros(SPANS, dtype=np.int64)
        """Tokens per span of a KD set."""
        self.trained: Ints = np.zeros(items, dtype=np.int64)
        """Trained tokens of every item."""
        self.roles: NDArray[np.uint8] = np.zeros(items, dtype=np.uint8)
        """Bit `r` of an item is set when it has tokens of role `r`."""
        self.documents = 0
        self.tokens = 0
        self.policies = policies
        self.trained_under = np.zeros(len(policies), dtype=np.int64)
        """Tokens that each policy would train."""

    @property
    def by_role_and_part(self) -> NDArray[np.int64]:
        """The counts of kinds, as a table of roles and parts."""
        return self.kinds.reshape(len(RoleCode), PARTS, 2)

    @property
    def role_names(self) -> list[str]:
        """Roles that some item has."""
        tokens = self.by_role_and_part[:, :, 0].sum(axis=1)
        return [role_name(role) for role in RoleCode if role is not RoleCode.NONE and tokens[role]]

    def add(self, batch: TokenBatch) -> None:
        """Count some items."""
        if not len(batch.items):
            return
        trained = batch.trained
        self.documents += len(batch.items)
        self.tokens += int(batch.offsets[-1])
        np.add.at(self.trained, batch.items, segment_sums(trained, batch.offsets))
        if batch.spans is not None:
            self.spans += np.bincount(batch.spans, minlength=SPANS)[:SPANS]
        if batch.kinds is not None and len(batch.kinds):
            self._add_kinds(batch.kinds, trained, batch)

    def _add_kinds(self, kinds: NDArray[np.uint8], trained: NDArray[np.bool_], batch: TokenBatch) -> None:
        full = np.diff(batch.offsets) > 0
        firsts = batch.offsets[:-1][full]
        begins = np.zeros(len(kinds), dtype=np.bool_)
        begins[firsts] = True
        begins[1:] |= (kinds[1:] != kinds[:-1]) | (trained[1:] != trained[:-1])
        runs = np.flatnonzero(begins)
        codes, lengths, documents = kinds[runs], np.diff(runs, append=len(kinds)), np.searchsorted(runs, firsts)
        counted = np.stack([lengths, lengths * trained[runs]], axis=1)
        turns = turns_of_runs(codes, documents)
        for table, keys in (
            (self.kinds, np.minimum(codes & PLAIN, KINDS - 1)),
            (self.turns, np.minimum(turns, MOST_TURNS)),
        ):
            for column in (0, 1):
                sums = np.bincount(keys, weights=counted[:, column], minlength=len(table))
                table[:, column] += sums.astype(np.int64)
        bits = np.left_shift(np.uint8(1), roles_of(codes))
        np.bitwise_or.at(self.roles, batch.items[full], np.bitwise_or.reduceat(bits, documents))
        for number, policy in enumerate(self.policies):
            weights = policy.token_weights(codes, np.append(documents, len(codes)))
            self.trained_under[number] += lengths[weights > 0].sum()


def turns_of_runs(kinds: NDArray[np.uint8], firsts: Ints) -> Ints:
    """The turn of each run, counted in its document: 0 before the first user, then one more with each user who
    speaks after someone else. `firsts` are the first runs of the documents.
    """
    if not len(kinds):
        return np.empty(0, dtype=np.int64)
    user = roles_of(kinds) == RoleCode.USER
    begins = user.copy()
    begins[1:] &= ~user[:-1]
    begins[firsts] = user[firsts]
    seen = np.cumsum(begins)
    before = seen[firsts] - begins[firsts]
    return np.asarray(seen - np.repeat(before, np.diff(firsts, append=len(kinds))), dtype=np.int64)


def count_tokens(split: LookSplit, progress: Progress | None = None, counts: TokenCounts | None = None) -> TokenCounts:
    """Read a whole split once, in memory that does not grow with it. `counts` are filled."""
    counts = TokenCounts(len(split)) if counts is None else counts
    total = split.total_tokens
    for batch in split.batches():
        counts.add(batch)
        if progress is not None:
            progress(counts.tokens, total)
    return counts
