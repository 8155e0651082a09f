"""Sample conversations of the report: chosen the same way every time, shown as coloured runs, cut where long."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import groupby

import numpy as np

from chatmill.look.decoder import Decoder
from chatmill.look.item_view import DocumentView, ItemView, RunView, view_item
from chatmill.look.items import Item, LookSplit
from chatmill.look.safe_text import visible

MOST_CHARACTERS = 700
"""Characters of a run that are shown."""
MOST_RUNS = 120
"""Runs of a document that are shown."""


def sample_items(split: LookSplit, count: int) -> list[Item]:
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


def sample_html(item: Item, decoder: Decoder | None, name: str) -> str:
    """One item as a card: its facts, then its messages."""
    view = view_item(item, decoder, name)
    facts = [f"{item.split} \u00b7 {name} {item.number:,}", f"{len(item):,} tokens", f"{item.trained:,} trained"]
    if item.documents is not None and len(item.documents) == 1:
        facts.insert(1, f"document {int(item.documents[0]):,}")
    title = escape(visible(view.facts or facts.pop(0), mark_newlines=False))
    messages = "".join(_messages(view, document) for document in view.documents)
    words = escape(" \u00b7 ".join(facts))
    return f'<article class="sample"><header><b>{title}</b><span>{words}</span></header>{messages}</article>'


def _messages(view: ItemView, document: DocumentView) -> str:
    parts: list[str] = []
    for (_, label), group in groupby(document.runs[:MOST_RUNS], key=lambda run: (run.message, run.label)):
        runs = list(group)
        body = "".join(part for run in runs for part in _run(view, run))
        css = f"role-{escape(label)}" if label else "role-document"
        parts.append(
            f'<div class="message {css}"><div class="who">{escape(label)}</div><div class="text">{body}</div></div>'
        )
    if len(document.runs) > MOST_RUNS:
        parts.append(f'<p class="more">{len(document.runs) - MOST_RUNS:,} more runs of tokens</p>')
    return "".join(parts)


def _run(view: ItemView, run: RunView) -> Iterator[str]:
    """The spans of a run. All text passes through `visible` and `escape`: content is data, never markup."""
    title, css = escape(view.title(run)), "t" if run.trained else "c"
    for is_control, text in view.parts(run):
        kind = f"{css} control" if is_control else css
        yield f'<span class="{kind}" title="{title}">{escape(visible(text[:MOST_CHARACTERS]))}</span>'
        if len(text) > MOST_CHARACTERS:
            yield f"<em>\u2026 {len(text) - MOST_CHARACTERS:,} more characters</em>"
