"""What an overview shows: sums, plots, notes and provenance; for the page of a split, and for one that is saved."""

from __future__ import annotations

import datetime
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from chatmill.core.ledger import FATE_NAMES
from chatmill.look.counting import Bin, Share, SplitStats, count_tokens
from chatmill.look.dataset import LookDataset
from chatmill.look.item_view import ItemView, view_item
from chatmill.look.ledger import losses
from chatmill.look.pages import page_of
from chatmill.look.splits import LookSplit, Progress
from chatmill.look.stats import doubling_bins, split_stats
from chatmill.look.viewer.opened import OpenedSplit, open_splits

REJECTED = "rejected.jsonl"
"""Where a build lists the records that it could not use."""
FEW_BINS = 8
LISTED = 200
"""Those of them that a page shows."""


def overview_values(opened: OpenedSplit) -> dict[str, Any]:
    """Return what the page of a split shows; sums follow when the labels are counted."""
    stats = split_stats(opened.split, opened.counts) if opened.done else None
    notes = list(_notes(opened.look, [stats] if stats else []))
    return {"opened": opened, "stats": stats, "policies": _policies(opened, stats), "notes": notes, **_HELPERS}


def saved_page(look: LookDataset, *, items: int = 6, version: str = "", progress: Progress | None = None) -> str:
    """Render the overview of all splits and some items as one self-contained page."""
    splits = []
    for opened in open_splits(look).values():
        count_tokens(opened.split, progress, opened.counts)
        stats = split_stats(opened.split, opened.counts)
        splits.append((opened, stats, _policies(opened, stats)))
    notes = list(_notes(look, [stats for _, stats, _ in splits]))
    shown = list(_some_items(look, items))
    return page_of(
        "saved.html", saved=True, version=version, look=look, splits=splits, notes=notes, items=shown, **_HELPERS
    )


def _policies(opened: OpenedSplit, stats: SplitStats | None) -> list[Share]:
    """Count the tokens that each policy would train, next to those that are trained."""
    if stats is None or not opened.split.has_kinds:
        return []
    stored = [("as stored", stats.trained)] if opened.split.has_weights else []
    tried = zip((policy.name for policy in opened.policies), opened.counts.trained_under.tolist(), strict=True)
    return [Share(name=name, tokens=stats.tokens, trained=trained) for name, trained in (*stored, *tried)]


def _notes(look: LookDataset, all_stats: Sequence[SplitStats]) -> Iterator[tuple[bool, str]]:
    """List what is worth knowing, and whether it is a warning."""
    for stats in all_stats:
        if stats.nothing_trained:
            yield True, f"{stats.nothing_trained:,} {stats.item}s of {stats.name} train nothing"
    ledger = look.ledger
    if ledger is not None:
        for loss in losses(ledger, fields=False):
            yield loss.is_warning, f"{loss.words}: {loss.count:,}"
    if look.decoder_problem:
        yield True, look.decoder_problem


def _some_items(look: LookDataset, count: int) -> Iterator[ItemView]:
    """Evenly spaced documents of all splits; rows of files whole."""
    splits = [split.alone for split in look.splits.values() if len(split)]
    total, left = sum(map(len, splits)), count
    for split in splits:
        wanted = min(left, len(split), max(1, round(count * len(split) / total)))
        chosen = np.linspace(0, len(split) - 1, wanted).astype(np.int64).tolist()
        left -= len(chosen)
        yield from (view_item(split.item(number), look.decoder, split.layout.item) for number in chosen)


def _provenance(about: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """List what a manifest says about how a dataset was made, as names and values."""
    for name in ("tokenizer", "template", "policy"):
        part = about.get(name)
        if isinstance(part, dict):
            yield name, f"{part.get('name', '')} {str(part.get('fingerprint') or part.get('sha256') or '')[:16]}"
    if about.get("package_version"):
        commit = f", commit {str(about['git_sha'])[:12]}" if about.get("git_sha") else ""
        yield "made by", f"chatmill {about['package_version']}{commit}"
    if isinstance(about.get("created_unix_s"), int):
        moment = datetime.datetime.fromtimestamp(about["created_unix_s"], datetime.UTC)
        yield "finished", moment.strftime("%Y-%m-%d %H:%M UTC")
    for name in ("fingerprint", "recipe_sha256", "schema_version"):
        if about.get(name):
            yield name.replace("_", " "), str(about[name])[:16]


def _left_out(look: LookDataset) -> list[dict[str, str]]:
    """Read the first records of rejected.jsonl: place, id, reason and message; none if it cannot be read."""
    try:
        with (look.path / REJECTED).open(encoding="utf-8") as file:
            entries = [json.loads(line) for line in itertools.islice(file, LISTED)]
    except (OSError, ValueError):
        return []
    names = ("where", "id", "reason", "message")
    return [{name: str(entry.get(name) or "") for name in names} for entry in entries if isinstance(entry, dict)]


def _lengths(split: LookSplit, stats: SplitStats) -> tuple[Bin, ...]:
    """Choose the bars of a plot of lengths: half doublings if there are few of them."""
    return stats.length_bins if len(stats.length_bins) > FEW_BINS else doubling_bins(split.document_lengths, 2)


_HELPERS = {"lengths": _lengths, "left_out": _left_out, "provenance": _provenance, "fate_names": FATE_NAMES}
"""What templates call."""
