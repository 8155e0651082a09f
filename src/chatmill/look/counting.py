"""Count the tokens of a split by kind, turn and span in one pass, run by run; the counts as dataclasses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

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
    """Return the turn of each run, counted in its document: 0 before the first user, then one more with each user who
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Tokens of one role, source, turn or kind, and how many of them are trained."""

    name: str
    tokens: int
    trained: int
    items: int | None = None
    """Items of a source; None where that makes no sense."""

    @property
    def share(self) -> float:
        """Trained tokens among all."""
        return self.trained / self.tokens if self.tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """One bar of a histogram: values from `low` up to and without `high` (the last bin: with it)."""

    low: float
    high: float
    count: int

    def bounds(self, between: str, percent: bool) -> str:
        """Return its range in words."""
        if percent:
            return f"{self.low:.0%}{between}{self.high:.0%}"
        low, high = int(self.low), int(self.high) - 1
        return f"{low:,}" if low == high else f"{low:,}{between}{high:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitStats:
    """The numbers of one split."""

    name: str
    item: str
    """What an item is called."""
    items: int
    documents: int
    tokens: int
    """Without padding."""
    trained: int
    capacity: int | None
    padding: int
    nothing_trained: int
    """Items without a trained token."""
    lengths: dict[str, float]
    """Tokens of a document: mean, and the value below which 0%, 5%, ... 100% of them lie."""
    length_bins: tuple[Bin, ...]
    """Documents by their tokens, a bar for each doubling."""
    trained_bins: tuple[Bin, ...]
    """Items by their trained share (`share_bins`)."""
    trained_mean: float
    """The mean trained share of items."""
    roles: tuple[Share, ...] = ()
    kinds: tuple[Share, ...] = ()
    parts: tuple[Share, ...] = ()
    turns: tuple[Share, ...] = ()
    sources: tuple[Share, ...] = ()
    spans: tuple[Share, ...] = ()
    fill: dict[str, float] = field(default_factory=dict)
    """Share of a block that is not padding: mean and quantiles; empty where rows have no fixed size."""
    fill_bins: tuple[Bin, ...] = ()
    """Blocks by their fill (`share_bins`)."""
    documents_bins: tuple[Bin, ...] = ()
    """Blocks by their number of documents."""
    pictures: dict[str, int] = field(default_factory=dict)
    """`count`, `tokens`, and the least and largest `height` and `width` in pixels; empty if there are none."""
    teacher: dict[str, int] = field(default_factory=dict)
    """How far a teacher has answered (`TeacherColumn.coverage`); empty where nothing was added."""

    def as_json(self) -> dict[str, Any]:
        """Plain values; shares as numbers from 0 to 1."""
        out = asdict(self)
        for name in ("roles", "kinds", "parts", "turns", "sources", "spans"):
            out[name] = [{**asdict(share), "share": share.share} for share in getattr(self, name)]
        return out


def shares(names: Iterable[str], counted: NDArray[np.int64]) -> tuple[Share, ...]:
    """Name counts of (tokens, trained tokens); names without tokens are left out."""
    pairs = zip(names, counted.tolist(), strict=True)
    return tuple(Share(name=name, tokens=tokens, trained=trained) for name, (tokens, trained) in pairs if tokens)


def role_shares(counts: TokenCounts) -> tuple[Share, ...]:
    """Count tokens and trained tokens of each role; those of no message are `document`."""
    return shares(map(role_name, RoleCode), counts.by_role_and_part.sum(axis=1))
