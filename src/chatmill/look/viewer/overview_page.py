"""The overview of a split: sums, histograms and shares, from columns at once and from the pass when it is done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import KINDS, PARTS, Part, RoleCode
from chatmill.label.policy import Policy, Scope
from chatmill.look.counting import TokenCounts
from chatmill.look.items import LookSplit
from chatmill.look.stats import (
    Bin,
    Share,
    doubling_bins,
    fine_bins,
    role_shares,
    share_bins,
    source_shares,
    span_shares,
    summary,
)
from chatmill.look.viewer.opened import OpenedSplit


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
        "lengths": _histogram(split.document_lengths, fine_bins(split.document_lengths)),
        "fill": _fill(split),
        "documents_per_item": _histogram(split.documents, doubling_bins(split.documents)) if split.capacity else None,
        "shares": None if trained is None else _shares(split, trained),
        "by_role": _shown(role_shares(scan.counts)) if scan.done and split.has_kinds else None,
        "by_part": _shown(_by_part(scan.counts)) if scan.done and split.has_kinds else None,
        "by_span": _shown(span_shares(scan.counts)) if scan.done and split.has_spans else None,
        "by_source": _by_source(split, trained),
        "policies": _policies(opened) if scan.done and split.has_kinds else None,
    }


def _histogram(values: NDArray[Any], bins: Sequence[Bin]) -> dict[str, Any]:
    """The bars of a plot, and what is said beside it."""
    return {"bins": [asdict(one) for one in bins], **summary(values)}


def _fill(split: LookSplit) -> dict[str, Any] | None:
    if split.fill is None or not len(split):
        return None
    full = int(np.count_nonzero(split.tokens == split.capacity))
    return {**_histogram(split.fill, share_bins(split.fill)), "full": full}


def _shares(split: LookSplit, trained: NDArray[np.integer]) -> dict[str, Any] | None:
    some = split.tokens > 0
    if not some.any():
        return None
    shares = trained[some] / split.tokens[some]
    return {**_histogram(shares, share_bins(shares)), "without": int(np.count_nonzero(shares == 0))}


def _shown(shares: Iterable[Share]) -> list[dict[str, Any]]:
    return [asdict(one) for one in shares]


def _by_part(counts: TokenCounts) -> Iterator[Share]:
    by_part = counts.kinds.reshape(len(RoleCode), PARTS, 2).sum(axis=0).tolist()
    for part, (tokens, trained) in zip(Part, by_part, strict=True):
        if tokens:
            yield Share(name=part.name.lower().replace("_", " "), tokens=tokens, trained=trained)


def _by_source(split: LookSplit, trained: NDArray[np.integer] | None) -> list[dict[str, Any]] | None:
    if split.sources is None:
        return None
    shares = source_shares(split, np.zeros(len(split), dtype=np.int64) if trained is None else trained)
    unknown = {"trained": None} if trained is None else {}
    return [{**one, **unknown} for one in sorted(_shown(shares), key=lambda source: -source["tokens"])]


def _policies(opened: OpenedSplit) -> list[dict[str, Any]]:
    """Tokens that each policy would train."""
    return [{"name": policy.name, "trained": trained_under(opened, policy)} for policy in opened.policies]


def trained_under(opened: OpenedSplit, policy: Policy) -> int:
    """Tokens of the split that a policy would train, from the sums of the pass."""
    scan = opened.scan
    counts = scan.last_turn if policy.scope is Scope.LAST_TURN else scan.trainable
    return int(counts[policy.table()[:KINDS] > 0].sum())
