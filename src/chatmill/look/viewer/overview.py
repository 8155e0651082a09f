"""What an overview shows: sums, plots, notes and provenance; for the page of a split, and for one that is saved."""

from __future__ import annotations

import datetime
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from chatmill.core.ledger import FATE_NAMES, LEFT_OUT
from chatmill.core.words import counted
from chatmill.look.counting import Bin, Share, SplitStats, count_tokens
from chatmill.look.dataset import LookDataset
from chatmill.look.item_view import ItemView, view_item
from chatmill.look.ledger import losses
from chatmill.look.pages import page_of
from chatmill.look.splits import LookSplit, Progress
from chatmill.look.stats import doubling_bins, split_stats
from chatmill.look.viewer.opened import OpenedSplit, Sort, open_splits

REJECTED = "rejected.jsonl"
"""Where a build lists the records that it could not use."""
FEW_BINS = 8
LISTED = 200
"""Those of them that a page shows."""
NOTHING_TRAINED = "records_without_trained_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """Something that a build left out, or that is worth a look: a row of a card."""

    words: str
    count: int
    is_warning: bool
    code: str = ""
    """The reason or the note."""
    url: str = ""
    """Address of the items that it is about."""
    url_words: str = ""
    records: tuple[Mapping[str, str], ...] = ()
    """Records that are left out for this reason: location, id and message."""


def overview_values(opened: OpenedSplit) -> dict[str, Any]:
    """Return what the page of a split shows; sums follow when the labels are counted."""
    stats = split_stats(opened.split, opened.counts) if opened.done else None
    noted = _list_noted(opened.look, [stats] if stats else [], opened)
    return {"opened": opened, "stats": stats, "policies": _policies(opened, stats), "noted": noted, **_HELPERS}


def saved_page(look: LookDataset, *, items: int = 6, version: str = "", progress: Progress | None = None) -> str:
    """Render the overview of all splits and some items as one self-contained page."""
    splits = []
    for opened in open_splits(look).values():
        count_tokens(opened.split, progress, opened.counts)
        stats = split_stats(opened.split, opened.counts)
        splits.append((opened, stats, _policies(opened, stats)))
    noted = _list_noted(look, [stats for _, stats, _ in splits])
    shown = list(_some_items(look, items))
    return page_of(
        "saved.html", saved=True, version=version, look=look, splits=splits, noted=noted, items=shown, **_HELPERS
    )


def _policies(opened: OpenedSplit, stats: SplitStats | None) -> list[Share]:
    """Count the tokens that each policy would train, next to those that are trained."""
    if stats is None or not opened.split.has_kinds:
        return []
    stored = [("as stored", stats.trained)] if opened.split.has_weights else []
    tried = zip((policy.name for policy in opened.policies), opened.counts.trained_under.tolist(), strict=True)
    return [Share(name=name, tokens=stats.tokens, trained=trained) for name, trained in (*stored, *tried)]


def _list_noted(look: LookDataset, all_stats: Sequence[SplitStats], opened: OpenedSplit | None = None) -> list[Noted]:
    """List what was left out or is worth a look, warnings first; pages of `opened` are linked."""
    noted = []

    for stats in all_stats:
        if stats.nothing_trained:
            is_one = stats.nothing_trained == 1
            words = f"{stats.item}{'' if is_one else 's'} of {stats.name} that train{'s' if is_one else ''} nothing"
            url = "" if opened is None else opened.url("browse", max_share=0)
            noted.append(
                Noted(words=words, count=stats.nothing_trained, is_warning=True, url=url, url_words="show them")
            )

    if look.ledger is not None:
        records = _quarantined(look)
        left_out = look.ledger.reasons(*LEFT_OUT)
        for loss in losses(look.ledger, fields=False):
            # Splits say it of what is stored, and link it, once all are counted.
            if loss.code == NOTHING_TRAINED and len(all_stats) == len(look.splits):
                continue
            is_reason = loss.code in left_out and loss.words.endswith(loss.code)
            # What overflow cuts is as long as rows may be.
            is_cut = loss.code in ("cut", "injected") and opened is not None
            noted.append(
                Noted(
                    words="records left out" if is_reason else loss.words,
                    count=loss.count,
                    is_warning=loss.is_warning,
                    code=loss.code if is_reason else "",
                    url=opened.url("browse", sort=Sort.LONGEST) if is_cut and opened else "",
                    url_words="the longest",
                    records=tuple(records.get(loss.code, ())) if is_reason else (),
                )
            )

    return sorted(noted, key=lambda row: not row.is_warning)


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


def _quarantined(look: LookDataset) -> dict[str, list[dict[str, str]]]:
    """Read the first records of rejected.jsonl, by reason; none if it cannot be read."""
    try:
        with (look.path / REJECTED).open(encoding="utf-8") as file:
            entries = [json.loads(line) for line in itertools.islice(file, LISTED)]
    except (OSError, ValueError):
        return {}

    by_reason: dict[str, list[dict[str, str]]] = {}
    for entry in entries:
        if isinstance(entry, dict):
            record = {name: str(entry.get(name) or "") for name in ("where", "id", "message")}
            by_reason.setdefault(str(entry.get("reason") or ""), []).append(record)
    return by_reason


def _summarize(noted: Sequence[Noted]) -> str:
    """Write one line about what was left out, lost or trains nothing; empty if nothing was."""
    parts = []
    if records := sum(row.count for row in noted if row.code):
        parts.append(f"{counted(records, 'record')} left out")
    parts += [f"{row.count:,} {row.words}" for row in noted if row.is_warning and not row.code]
    return ", ".join(parts)


def _lengths(split: LookSplit, stats: SplitStats) -> tuple[Bin, ...]:
    """Choose the bars of a plot of lengths: half doublings if there are few of them."""
    return stats.length_bins if len(stats.length_bins) > FEW_BINS else doubling_bins(split.document_lengths, 2)


_HELPERS = {"lengths": _lengths, "summarize": _summarize, "provenance": _provenance, "fate_names": FATE_NAMES}
"""What templates call."""
