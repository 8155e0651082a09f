"""Numbers of a split: shares, bars of histograms, and all of them together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import RoleCode, role_name
from chatmill.look.counting import TokenCounts


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
        """Its range in words."""
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
    """`count`, `tokens`, and the least and largest `height` and `width` in pixels; empty where there are none."""
    teacher: dict[str, int] = field(default_factory=dict)
    """How far a teacher has answered (`TeacherColumn.coverage`); empty where nothing was added."""

    def as_json(self) -> dict[str, Any]:
        """Plain values; shares as numbers from 0 to 1."""
        out = asdict(self)
        for name in ("roles", "kinds", "parts", "turns", "sources", "spans"):
            out[name] = [{**asdict(one), "share": one.share} for one in getattr(self, name)]
        return out


def shares(names: Iterable[str], counted: NDArray[np.int64]) -> tuple[Share, ...]:
    """What was counted as (tokens, trained tokens), by name; nothing for what has no tokens."""
    pairs = zip(names, counted.tolist(), strict=True)
    return tuple(Share(name=name, tokens=tokens, trained=trained) for name, (tokens, trained) in pairs if tokens)


def role_shares(counts: TokenCounts) -> tuple[Share, ...]:
    """Tokens and trained tokens of each role; those of no message are `document`."""
    return shares(map(role_name, RoleCode), counts.by_role_and_part.sum(axis=1))
