"""The overview of a split: sums, histograms and shares, from columns at once and from the pass when it is done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import KINDS, PARTS, Part, RoleCode
from chatmill.label.policy import Policy, Scope
from chatmill.look.counting import TokenCounts
from chatmill.look.items import LookSplit
from chatmill.look.stats import Share, role_shares, source_shares, span_shares
from chatmill.look.viewer.opened import OpenedSplit

BARS = 40
"""Bars of a histogram, at most."""


def overview_json(opened: OpenedSplit) -> dict[str, Any]:
    """Everything that the overview draws."""
    split, scan = opened.split, opened.scan
    trained = opened.trained
    return {
        "scan": scan.as_json(),
        "items": len(split),
        "tokens": split.total_tokens,
        "trained": None if trained is None else int(trained.sum()),
        "documents": int(split.documents.sum()),
        "padding": None if split.capacity is None else len(split) * split.capacity - split.total_tokens,
        "capacity": split.capacity,
        "lengths": histogram(split.document_lengths),
        "fill": _fill(split),
        "documents_per_item": histogram(split.documents) if split.capacity else None,
        "shares": None if trained is None else _shares(split, trained),
        "by_role": _shown(role_shares(scan.counts)) if scan.done and split.has_kinds else None,
        "by_part": _shown(_by_part(scan.counts)) if scan.done and split.has_kinds else None,
        "by_span": _shown(span_shares(scan.counts)) if scan.done and split.has_spans else None,
        "by_source": _by_source(split, trained),
        "policies": _policies(opened) if scan.done and split.has_kinds else None,
    }


def histogram(values: NDArray[np.integer]) -> dict[str, Any]:
    """Counts of whole numbers in bars of equal width; what is far above the rest is in the last bar.

    Bar `i` counts `edges[i] <= value < edges[i + 1]`; with `open_end` the last one counts all from its edge on.
    """
    if not len(values):
        return {"edges": [0, 1], "counts": [0], "open_end": False}
    low, high = int(values.min()), int(values.max())
    half, most, nearly_all = (int(v) for v in np.percentile(values, [50, 90, 99], method="lower"))
    top = high if high <= 2 * nearly_all else nearly_all
    width = _nice((top - low + 1) / BARS)
    first = low // width * width
    bars = (top - first) // width + 1
    edges = first + width * np.arange(bars + 1)
    counts = np.bincount(np.minimum((values - first) // width, bars), minlength=bars + 1)
    open_end = bool(counts[bars])
    return {
        "edges": edges.tolist() + ([high + 1] if open_end else []),
        "counts": (counts if open_end else counts[:bars]).tolist(),
        "open_end": open_end,
        "min": low,
        "median": half,
        "p90": most,
        "p99": nearly_all,
        "max": high,
        "mean": float(values.mean()),
    }


def _nice(width: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... that is not below a width."""
    if width <= 1:
        return 1
    ten = 10 ** int(np.floor(np.log10(width)))
    return int(next(step * ten for step in (1, 2, 5, 10) if step * ten >= width))


def _percent_bars(shares: NDArray[np.floating]) -> dict[str, Any]:
    """Counts of shares (0 to 1) in twenty bars; 1 is in the last."""
    counts = np.bincount(np.minimum((shares * 20).astype(np.int64), 19), minlength=20)
    return {"edges": list(range(0, 101, 5)), "counts": counts.tolist(), "mean": float(shares.mean())}


def _fill(split: LookSplit) -> dict[str, Any] | None:
    if split.fill is None or not len(split):
        return None
    # most rows are nearly full: the bars show what is empty, from 0 to the emptiest row
    found = _percent_bars(split.fill)
    found["full"] = int(np.count_nonzero(split.tokens == split.capacity))
    found["min"] = float(split.fill.min())
    return found


def _shares(split: LookSplit, trained: NDArray[np.integer]) -> dict[str, Any] | None:
    tokens = split.tokens
    some = tokens > 0
    if not some.any():
        return None
    found = _percent_bars(trained[some] / tokens[some])
    found["without"] = int(np.count_nonzero(trained[some] == 0))
    return found


def _shown(shares: Iterable[Share]) -> list[dict[str, Any]]:
    return [{"name": one.name, "tokens": one.tokens, "trained": one.trained} for one in shares]


def _by_part(counts: TokenCounts) -> Iterator[Share]:
    by_part = counts.kinds.reshape(len(RoleCode), PARTS, 2).sum(axis=0).tolist()
    for part, (tokens, trained) in zip(Part, by_part, strict=True):
        if tokens:
            yield Share(name=part.name.lower().replace("_", " "), tokens=tokens, trained=trained)


def _by_source(split: LookSplit, trained: NDArray[np.integer] | None) -> list[dict[str, Any]] | None:
    if split.sources is None:
        return None
    shares = source_shares(split, np.zeros(len(split), dtype=np.int64) if trained is None else trained)
    found = [{**one, "items": share.items} for one, share in zip(_shown(shares), shares, strict=True)]
    unknown = {"trained": None} if trained is None else {}
    return [{**one, **unknown} for one in sorted(found, key=lambda source: -source["tokens"])]


def _policies(opened: OpenedSplit) -> list[dict[str, Any]]:
    """Tokens that each policy would train."""
    return [{"name": policy.name, "trained": trained_under(opened, policy)} for policy in opened.policies]


def trained_under(opened: OpenedSplit, policy: Policy) -> int:
    """Tokens of the split that a policy would train, from the sums of the pass."""
    scan = opened.scan
    counts = scan.last_turn if policy.scope is Scope.LAST_TURN else scan.trainable
    return int(counts[policy.table()[:KINDS] > 0].sum())
