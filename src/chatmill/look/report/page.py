"""The report: reads a dataset, gathers what the page says, and writes the page whole or not at all."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.core.ledger import LEFT_OUT
from chatmill.core.whole_file import whole_file
from chatmill.errors import ConfigError
from chatmill.look.dataset import LookDataset
from chatmill.look.item_view import ItemView, view_item
from chatmill.look.items import Item, LookSplit, Progress
from chatmill.look.report.flow import flow_of_ledger, flow_of_roles, flow_svg
from chatmill.look.report.templates import page_of
from chatmill.look.spelled_controls import SpelledControls, spelled_controls
from chatmill.look.stats import (
    FATE_NAMES,
    DatasetStats,
    Share,
    dataset_stats,
    fine_bins,
)

NOTES = {
    "untrained_terminators": "assistant turns are trained although their end is not: a model may not learn to stop",
    "records_without_trained_tokens": "records were built and train nothing",
    "stripped_characters": "characters are not shown by the template, as it declares",
    "records_beyond_max_records": "records were left out by max_records",
}
"""What the notes of the ledger mean, after their number."""
FATE_WORDS = {
    "trained": "targets of the loss",
    "context": "read by the model, not trained",
    "cut": "left out of a conversation of which something was kept",
    "dropped": "of conversations of which nothing was kept",
    "injected": "repeated without being trained (heads of later windows)",
    "padding": "fills rows up to their size",
}
LAYOUTS = {"episodes": "episodes", "rows": "packed rows", "packed": "packed rows", "kd": "distillation set"}
MAP_ROWS = 32
"""Rows of the map; of more, evenly spaced ones are drawn."""


def make_report(dataset: LookDataset, *, samples: int = 6, version: str = "", progress: Progress | None = None) -> str:
    """Read a dataset and make its page: one HTML text without scripts that loads nothing."""
    decoder = dataset.decoder
    total = (1 if decoder is None else 2) * sum(split.total_tokens for split in dataset.splits.values())
    stats = dataset_stats(dataset, None, None if progress is None else lambda done, _: progress(done, total))
    done = sum(split.tokens for split in stats.splits)
    spelled: dict[str, SpelledControls] = {}
    for name, split in dataset.splits.items() if decoder is not None else ():
        assert decoder is not None
        spelled[name] = spelled_controls(split, decoder)
        done += split.total_tokens
        if progress is not None:
            progress(done, total)
    inputs = dataset.about.get("inputs")
    splits = list(zip(stats.splits, dataset.splits.values(), strict=True))
    return page_of(
        Path(__file__).with_name("report.html"),
        name=dataset.path,
        version=version,
        subtitle=list(_subtitle(dataset)),
        tiles=list(_tiles(stats)),
        **_flow(stats),
        fate_words=[(fate, name, FATE_WORDS[fate]) for fate, name in FATE_NAMES.items()],
        splits=stats.splits,
        fine_lengths={found.name: fine_bins(split.document_lengths) for found, split in splits},
        maps={found.name: _map(split) for found, split in splits if found.documents_bins},
        notes=sorted(_notes(dataset, stats, spelled), key=lambda note: not note[0]),
        samples=list(_samples(dataset, samples)),
        about=dataset.about,
        inputs=inputs if isinstance(inputs, list) else [],
    )


def _subtitle(dataset: LookDataset) -> Iterator[str]:
    yield LAYOUTS[dataset.layout]
    for key in ("template", "tokenizer", "policy"):
        named = dataset.about.get(key)
        if isinstance(named, Mapping) and named.get("name"):
            yield f"{key} {named['name']}"
    created = dataset.about.get("created_unix_s")
    if isinstance(created, int | float):
        yield time.strftime("built %Y-%m-%d %H:%M UTC", time.gmtime(created))


def _tiles(stats: DatasetStats) -> Iterator[tuple[int | str, str]]:
    """Numbers and what they are."""
    items, documents, tokens, trained, lost = (
        sum(getattr(split, name) for split in stats.splits)
        for name in ("items", "documents", "tokens", "trained", "nothing_trained")
    )
    item = stats.splits[0].item
    yield items, f"{item}s in {', '.join(split.name for split in stats.splits)}"
    if documents != items:
        yield documents, "documents"
    yield tokens, "tokens"
    yield trained, "trained tokens"
    yield f"{trained / max(1, tokens):.1%}", "trained share"
    room = sum((split.capacity or 0) * split.items for split in stats.splits)
    if room:
        yield f"{tokens / room:.2%}", f"fill of rows of {stats.splits[0].capacity:,}"
    yield lost, f"{item}s that train nothing"


def _flow(stats: DatasetStats) -> dict[str, Any]:
    """The picture of where tokens went, the numbers of it, and the words above it."""
    if (accounts := stats.accounts) is not None:
        flow, fates = flow_of_ledger(accounts), accounts.fates()
        words = (
            "The ledger of the build, all splits together: every token that the template wrote, and what became of it."
        )
    else:
        shares = [
            share
            for split in stats.splits
            for share in split.roles
            or split.spans
            or (Share(name="document", tokens=split.tokens, trained=split.trained),)
        ]
        padding = sum(split.padding for split in stats.splits)
        flow = flow_of_roles("the dataset", shares, padding)
        trained = sum(share.trained for share in shares)
        fates = {"trained": trained, "context": sum(share.tokens for share in shares) - trained, "padding": padding}
        words = "There is no ledger of a build here; this is what the files hold."
    return {"flow_words": words, "flow_picture": flow_svg(flow, words), "fates": fates}


def _map(split: LookSplit) -> tuple[list[Item], int, str]:
    """Some rows of a split, how wide they are, and what they are."""
    numbers = np.unique(np.linspace(0, len(split) - 1, min(len(split), MAP_ROWS)).astype(np.int64)).tolist()
    words = f"map of {len(numbers)} of {len(split):,} rows of {split.name}"
    return [split.item(number) for number in numbers], split.capacity or int(split.tokens.max()), words


def _notes(
    dataset: LookDataset, stats: DatasetStats, spelled: Mapping[str, SpelledControls]
) -> Iterator[tuple[bool, str]]:
    """What is worth knowing, and whether it is a warning."""
    for split in stats.splits:
        if split.nothing_trained:
            yield True, f"{split.nothing_trained:,} {split.item}s of {split.name} train nothing"
    if (accounts := stats.accounts) is not None:
        for note, count in accounts.all_notes().items():
            if note in NOTES:
                yield note.startswith(("untrained", "records_w")), f"{count:,} {NOTES[note]}"
        for reason, count in accounts.reasons(*LEFT_OUT).items():
            yield True, f"{count:,} records were left out: {reason.replace('_', ' ')}"
    for name, found in spelled.items():
        if found.documents:
            listed = ", ".join(f"{text} ({count:,})" for text, count in found.spellings.most_common(6))
            words = f"{found.documents:,} documents of {name} hold text that spells control tokens, and it stayed text"
            yield False, f"{words}: {listed}; the first in {stats.splits[0].item} {found.first_items[0]:,}"
        else:
            yield False, f"no text of {name} spells a control token"
    if dataset.decoder_problem:
        yield True, dataset.decoder_problem


def _samples(dataset: LookDataset, count: int) -> Iterator[tuple[ItemView, str, list[str]]]:
    """Some items, each with a title and facts."""
    splits = [split for split in dataset.splits.values() if len(split)]
    total = sum(map(len, splits))
    items: list[Item] = []
    for split in splits:
        items += _sample_items(split, max(1, round(count * len(split) / total)))[: count - len(items)]
    name = dataset.layout.item
    for item in items:
        view = view_item(item, dataset.decoder, name)
        facts = [f"{item.split} \u00b7 {name} {item.number:,}", f"{len(item):,} tokens", f"{item.trained:,} trained"]
        if item.documents is not None and len(item.documents) == 1:
            facts.insert(1, f"document {int(item.documents[0]):,}")
        yield view, view.facts or facts.pop(0), facts


def _sample_items(split: LookSplit, count: int) -> Sequence[Item]:
    """Some items: of each of the largest sources one of middle length, else evenly spaced ones; one document each."""
    numbers: list[int] = []
    sources, tokens = split.sources, split.tokens
    if sources is not None and len(split.source_names) > 1:
        sizes = np.bincount(sources, weights=tokens, minlength=len(split.source_names))
        for code in np.argsort(-sizes, kind="stable")[:count].tolist():
            mine = np.flatnonzero(sources == code)
            if len(mine):
                numbers.append(int(mine[np.argsort(tokens[mine], kind="stable")[len(mine) // 2]]))
    if len(numbers) < min(count, len(split)):
        spread = np.linspace(0, len(split) - 1, min(count, len(split))).astype(np.int64).tolist()
        numbers = list(dict.fromkeys([*numbers, *spread]))[:count]
    items = [split.item(number) for number in numbers]
    return [item.part(len(item.starts) // 2) if len(item.starts) > 1 else item for item in items]


def check_place(path: Path) -> None:
    """Refuse a place that no page can be written to; asked before a dataset is read for nothing."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: give the name of the page, such as {path / 'report.html'}")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent}: no such folder for {path.name}: make it first")


def write_report(path: Path, page: str) -> None:
    """Write the page: it is there whole or not at all."""
    check_place(path)
    with whole_file(path) as partial:
        partial.write_bytes(page.encode("utf-8", errors="replace"))
