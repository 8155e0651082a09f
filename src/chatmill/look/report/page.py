"""The page of the report: head, tiles and sections put together, and written whole or not at all."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

from chatmill.errors import ConfigError
from chatmill.look.dataset import LookDataset
from chatmill.look.items import Progress
from chatmill.look.report.charts import short
from chatmill.look.report.sections import ReportData, sections
from chatmill.look.report.style import CSS
from chatmill.look.safe_text import visible
from chatmill.look.spelled import SpelledControls, spelled_controls
from chatmill.look.stats import DatasetStats, dataset_stats
from chatmill.store.durable import sync_folder, write_synced


def make_report(dataset: LookDataset, *, samples: int = 6, version: str = "", progress: Progress | None = None) -> str:
    """Read a dataset and make its page: one HTML text without scripts that loads nothing."""
    passes = 2 if dataset.decoder is not None else 1
    total = passes * sum(split.total_tokens for split in dataset.splits.values())
    stats = dataset_stats(dataset, None, None if progress is None else lambda done, _: progress(done, total))
    done = sum(split.tokens for split in stats.splits)
    spelled: dict[str, SpelledControls] = {}
    for name, split in dataset.splits.items() if dataset.decoder is not None else ():
        assert dataset.decoder is not None
        spelled[name] = spelled_controls(split, dataset.decoder)
        done += split.total_tokens
        if progress is not None:
            progress(done, total)
    return report_page(ReportData(dataset=dataset, stats=stats, spelled=spelled, samples=samples), version=version)


def report_page(data: ReportData, *, version: str = "") -> str:
    """The whole page; all content of the dataset is escaped."""
    name = escape(visible(str(data.dataset.path), mark_newlines=False))
    made = [section for section in sections(data) if section.body]
    links = "".join(f'<a href="#{section.key}">{section.title}</a>' for section in made)
    body = "".join(f'<section id="{section.key}"><h2>{section.title}</h2>{section.body}</section>' for section in made)
    head = f'<p class="soft">{escape(_subtitle(data.dataset))}</p>{_tiles(data.stats)}<nav>{links}</nav>'
    return html_page(name, "report", f"{head}\n{body}", version)


def html_page(name: str, kind: str, body: str, version: str, css: str = "") -> str:
    """A page without scripts around HTML; `name` is escaped already."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{name} \u00b7 Chatmill {kind}</title><style>{CSS}{css}</style></head>\n<body><main><h1>{name}</h1>"
        f"{body}\n<footer>Made by Chatmill {escape(version)}. This page holds no scripts and loads nothing.</footer>"
        "</main></body></html>\n"
    )


def tile_boxes(tiles: Iterable[tuple[str, str]]) -> str:
    """Numbers with a word below each; numbers are HTML already."""
    boxes = "".join(f'<div class="tile"><b>{number}</b><span>{escape(words)}</span></div>' for number, words in tiles)
    return f'<div class="tiles">{boxes}</div>'


def _subtitle(dataset: LookDataset) -> str:
    about = dataset.about
    words = [
        {"episodes": "episodes", "rows": "packed rows", "packed": "packed rows", "kd": "distillation set"}[
            dataset.layout
        ]
    ]
    for key in ("template", "tokenizer", "policy"):
        named = about.get(key)
        if isinstance(named, Mapping) and named.get("name"):
            words.append(f"{key} {named['name']}")
    created = about.get("created_unix_s")
    if isinstance(created, int | float):
        words.append(time.strftime("built %Y-%m-%d %H:%M UTC", time.gmtime(created)))
    return " \u00b7 ".join(words)


def _tiles(stats: DatasetStats) -> str:
    tokens, trained = (sum(getattr(split, name) for split in stats.splits) for name in ("tokens", "trained"))
    items, documents = (sum(getattr(split, name) for split in stats.splits) for name in ("items", "documents"))
    tiles = [(_count(items), f"{stats.splits[0].item}s in {', '.join(split.name for split in stats.splits)}")]
    if documents != items:
        tiles.append((_count(documents), "documents"))
    tiles += [(_count(tokens), "tokens"), (_count(trained), "trained tokens")]
    tiles.append((f"{trained / max(1, tokens):.1%}", "trained share"))
    room = sum((split.capacity or 0) * split.items for split in stats.splits)
    if room:
        tiles.append((f"{tokens / room:.2%}", f"fill of rows of {stats.splits[0].capacity:,}"))
    lost = sum(split.nothing_trained for split in stats.splits)
    tiles.append((_count(lost), f"{stats.splits[0].item}s that train nothing"))
    return tile_boxes(tiles)


def _count(number: int) -> str:
    """A number that fits a tile, with all its digits when pointed at."""
    return f"{number:,}" if number < 10**8 else f'<span title="{number:,}">{short(number)}</span>'


def check_place(path: Path) -> None:
    """Refuse a place that no page can be written to; asked before a dataset is read for nothing."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: give the name of the page, such as {path / 'report.html'}")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent}: no such folder for {path.name}: make it first")


def write_report(path: Path, page: str) -> None:
    """Write the page under a temporary name and rename it: it is there whole or not at all."""
    check_place(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write_synced(temporary, page.encode("utf-8", errors="replace"))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
