"""Numbers about a dataset: sizes, lengths, what is trained by role, source and turn, fill of blocks, and the ledger."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.console import plain_console
from chatmill.core.kinds import KINDS, Part, kind_name
from chatmill.core.ledger import LEFT_OUT, Ledger
from chatmill.look.counting import MOST_TURNS, Bin, Share, SplitStats, TokenCounts, count_tokens, role_shares, shares
from chatmill.look.dataset import LookDataset
from chatmill.look.splits import LookSplit, Progress
from chatmill.look.stats_view import stats_parts
from chatmill.look.terminal import show
from chatmill.store.kd_shard import SPAN_NAMES

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
REPR_WIDTH = 100
TURN_NAMES = ("before the first user", *map(str, range(1, MOST_TURNS)), f"{MOST_TURNS} and later")
SPAN_WEIGHTS = np.array([[1, 0], [1, 1], [1, 1]])
"""Tokens and trained tokens of a token of each span: all but the context are trained."""


def split_stats(split: LookSplit, counts: TokenCounts) -> SplitStats:
    """Summarise a split; `counts` are those of a pass over it."""
    lengths, tokens, trained = split.document_lengths, split.tokens, counts.trained
    packed = bool(split.capacity) or bool((split.documents > 1).any())
    fill = None if split.capacity is None else tokens / split.capacity
    trained_shares = trained / np.maximum(tokens, 1)
    return SplitStats(
        name=split.name,
        item=split.layout.item,
        items=len(split),
        documents=counts.documents,
        tokens=split.total_tokens,
        trained=int(trained.sum()),
        capacity=split.capacity,
        padding=(split.capacity * len(split) - split.total_tokens) if split.capacity else 0,
        nothing_trained=int(np.count_nonzero(trained == 0)),
        lengths=_summary(lengths),
        length_bins=doubling_bins(lengths),
        trained_bins=share_bins(trained_shares),
        trained_mean=float(trained_shares.mean()) if len(trained_shares) else 0.0,
        roles=role_shares(counts),
        kinds=shares(map(kind_name, range(KINDS)), counts.kinds),
        parts=shares((part.name.lower().replace("_", " ") for part in Part), counts.by_role_and_part.sum(axis=0)),
        turns=shares(TURN_NAMES, counts.turns),
        sources=_source_shares(split, trained),
        spans=shares(SPAN_NAMES, counts.spans[:, None] * SPAN_WEIGHTS),
        fill={} if fill is None else _summary(fill),
        fill_bins=() if fill is None else share_bins(fill),
        documents_bins=doubling_bins(split.documents) if packed else (),
        pictures=_pictures(split),
        teacher=split.teacher(),
    )


def _pictures(split: LookSplit) -> dict[str, int]:
    sizes = np.array([(p.stop - p.start, p.height, p.width) for p in split.pictures()], dtype=np.int64)
    if not len(sizes):
        return {}
    (least_height, least_width), (height, width) = sizes[:, 1:].min(axis=0).tolist(), sizes[:, 1:].max(axis=0).tolist()
    return {
        "count": len(sizes),
        "tokens": int(sizes[:, 0].sum()),
        "least_height": least_height,
        "least_width": least_width,
        "largest_height": height,
        "largest_width": width,
    }


def _source_shares(split: LookSplit, trained: NDArray[np.integer]) -> tuple[Share, ...]:
    """Count items, tokens and trained tokens of each source; empty if sources are not stored."""
    codes = split.sources
    if codes is None:
        return ()
    size = len(split.source_names)
    items = np.bincount(codes, minlength=size)
    sums = [np.bincount(codes, weights=column, minlength=size).astype(np.int64) for column in (split.tokens, trained)]
    return tuple(
        Share(name=name, items=int(items[code]), tokens=int(sums[0][code]), trained=int(sums[1][code]))
        for code, name in enumerate(split.source_names)
    )


def _summary(values: NDArray[Any]) -> dict[str, float]:
    """Compute the mean and quantiles (0%, 5%, ... 100%); empty if there are no values."""
    if not len(values):
        return {}
    quantiles = np.quantile(values, QUANTILES)
    named = {f"{round(100 * q)}%": float(value) for q, value in zip(QUANTILES, quantiles, strict=True)}
    return {"mean": float(values.mean()), **named}


def doubling_bins(values: NDArray[np.integer], per_doubling: int = 1) -> tuple[Bin, ...]:
    """Count values per doubling (0, 1, 2-3, 4-7, ...), or per part of one, from the least to the largest."""
    if not len(values):
        return ()
    powers = np.arange(int(values.max()).bit_length() * per_doubling + 1) / per_doubling
    edges = np.unique(np.append(0, np.ceil(2.0**powers).astype(np.int64)))
    counts = np.histogram(values, bins=edges)[0]
    there = np.flatnonzero(counts)
    return tuple(
        Bin(low=int(edges[i]), high=int(edges[i + 1]), count=int(counts[i])) for i in range(there[0], there[-1] + 1)
    )


def share_bins(shares: NDArray[np.floating]) -> tuple[Bin, ...]:
    """Count shares per tenth from 0 to 1; per hundredth from 0.9 on if all of them are above it."""
    low = 90 if len(shares) and shares.min() >= 0.9 else 0
    edges = np.linspace(low, 100, 11) / 100
    counts = np.histogram(shares, bins=edges)[0]
    return tuple(Bin(low=float(edges[i]), high=float(edges[i + 1]), count=int(counts[i])) for i in range(10))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DatasetStats:
    """The numbers of a dataset."""

    path: str
    layout: str
    splits: tuple[SplitStats, ...]
    accounts: Ledger | None
    """The ledger of the build, over all its splits; None if no manifest has one."""

    def __repr__(self) -> str:
        """Return the tables and plots of `chatmill stats`."""
        out = io.StringIO()
        show(plain_console(file=out, width=REPR_WIDTH), stats_parts(self.splits, self.accounts, width=REPR_WIDTH))
        return out.getvalue().rstrip("\n")

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        ledger = self.accounts
        return {
            "path": self.path,
            "layout": self.layout,
            "splits": {split.name: split.as_json() for split in self.splits},
            "ledger": ledger
            and {
                "tokens": ledger.fates(),
                "rejected": ledger.reasons(*LEFT_OUT),
                "notes": ledger.all_notes(),
                "by_source": ledger.as_json(),
            },
        }


def dataset_stats(
    dataset: LookDataset, splits: Sequence[str] | None = None, progress: Progress | None = None
) -> DatasetStats:
    """Read the chosen splits (default: all) once each and sum them up; `progress` goes over all of them."""
    chosen = [dataset.split(name) for name in splits] if splits else list(dataset.splits.values())
    total = sum(split.total_tokens for split in chosen)
    stats, before = [], 0
    for split in chosen:
        stats.append(split_stats(split, count_tokens(split, _after(before, total, progress))))
        before += split.total_tokens
    return DatasetStats(
        path=dataset.address,
        layout=str(dataset.layout),
        splits=tuple(stats),
        accounts=dataset.ledger,
    )


def _after(before: int, total: int, progress: Progress | None) -> Progress | None:
    """Turn progress in one split, after `before` tokens of others, into progress over all splits."""
    return None if progress is None else lambda tokens, _: progress(before + tokens, total)
