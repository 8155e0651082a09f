"""The sections of the report: where every token went, lengths and labels, packing, samples, findings and provenance."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from chatmill.look.dataset import LookDataset
from chatmill.look.items import Item
from chatmill.look.report.charts import histogram_svg, packing_map, share_table
from chatmill.look.report.flow import FATE_NAMES, flow_of_ledger, flow_of_roles, flow_svg
from chatmill.look.report.samples import sample_html, sample_items
from chatmill.look.safe_text import visible
from chatmill.look.spelled import SpelledControls
from chatmill.look.stats import DatasetStats, SplitStats, doubling_bins, fates_of, notes_of, rejections_of

MOST_SOURCES = 40
MOST_INPUTS = 100
MOST_TURNS = 13
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """Everything the page is made of."""

    dataset: LookDataset
    stats: DatasetStats
    spelled: Mapping[str, SpelledControls]
    """Per split; empty where no tokenizer is known."""
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of the page."""

    key: str
    title: str
    body: str
    """HTML; empty: there is nothing to say."""


def sections(data: ReportData) -> Iterator[Section]:
    """All sections in order."""
    yield Section(key="flow", title="Where every token went", body=_flow(data))
    yield Section(key="labels", title="What is trained", body="".join(map(_labels, data.stats.splits)))
    yield Section(key="lengths", title="Lengths", body=_lengths(data))
    yield Section(key="packing", title="Packing", body=_packing(data))
    yield Section(key="findings", title="Worth knowing", body=_findings(data))
    yield Section(key="samples", title="Sample conversations", body=_samples(data))
    yield Section(key="provenance", title="Provenance", body=_provenance(data.dataset))


def _flow(data: ReportData) -> str:
    ledger = data.stats.ledger
    if ledger is not None:
        flow, fates = flow_of_ledger(ledger), fates_of(ledger)
        words = (
            "The ledger of the build, all splits together: every token that the template wrote, and what became of it."
        )
    else:
        roles: dict[str, list[int]] = {}
        for split in data.stats.splits:
            for one in split.roles or split.spans:
                tokens, trained = roles.setdefault(one.name, [0, 0])
                roles[one.name] = [tokens + one.tokens, trained + one.trained]
        if not roles:
            tokens, trained = (
                sum(getattr(split, name) for split in data.stats.splits) for name in ("tokens", "trained")
            )
            roles = {"document": [tokens, trained]}
        padding = sum(split.padding for split in data.stats.splits)
        flow = flow_of_roles("the dataset", [(name, counts[0], counts[1]) for name, counts in roles.items()], padding)
        trained = sum(counts[1] for counts in roles.values())
        fates = {"trained": trained, "context": sum(c[0] for c in roles.values()) - trained, "padding": padding}
        words = "There is no ledger of a build here; this is what the files hold."
    total = max(1, sum(fates.values()))
    rows = "".join(
        f'<tr><td><i class="dot fate-{fate}"></i>{FATE_NAMES[fate]}</td><td class="n">{fates[fate]:,}</td>'
        f'<td class="n">{fates[fate] / total:.2%}</td><td class="soft">{FATE_WORDS[fate]}</td></tr>'
        for fate in FATE_NAMES
        if fate in fates
    )
    picture, table = (
        f'<div class="card">{flow_svg(flow, words)}</div>',
        f'<div class="card"><table>{rows}</table></div>',
    )
    return f'<p class="soft">{words}</p>{picture}{table}'


def _labels(split: SplitStats) -> str:
    chart = histogram_svg(split.trained_bins, f"{split.item}s by trained share", percent=True)
    left, right, below = [], [], ""
    shares = _card(f"{split.item}s by trained share", chart)
    if split.roles:
        left.append(_card("by role", share_table(split.roles, "role", css="role-")))
    if split.spans:
        left.append(_card("by span", share_table(split.spans, "span", css="role-")))
    if split.turns:
        later = len(split.turns) - MOST_TURNS
        more = f'<p class="soft">and {later:,} later turns</p>' if later > 0 else ""
        right.append(_card("by turn", share_table(split.turns[:MOST_TURNS], "turn") + more))
    (left if right else right).append(shares)
    if split.sources:
        largest = sorted(split.sources, key=lambda one: -one.tokens)
        more = f'<p class="soft">and {len(largest) - MOST_SOURCES:,} more</p>' if len(largest) > MOST_SOURCES else ""
        below = _card("by source", share_table(largest[:MOST_SOURCES], "source", f"{split.item}s") + more)
    columns = "".join(f"<div>{''.join(cards)}</div>" for cards in (left, right) if cards)
    return f'<h3>{_text(split.name)}</h3><div class="two">{columns}</div>{below}'


def _card(title: str, body: str) -> str:
    return f'<div class="card"><h3>{_text(title)}</h3>{body}</div>'


def _text(value: object) -> str:
    return escape(visible(str(value), mark_newlines=False))


def _lengths(data: ReportData) -> str:
    cards = []
    for found, split in zip(data.stats.splits, data.dataset.splits.values(), strict=True):
        if not found.lengths:
            continue
        bins = doubling_bins(split.document_lengths, per_doubling=2 if len(found.length_bins) <= 8 else 1)
        named = (("shortest", "0%"), ("median", "50%"), ("95% up to", "95%"), ("longest", "100%"))
        words = ", ".join(f"{name} {found.lengths[key]:,.0f}" for name, key in named)
        chart = histogram_svg(bins, f"documents of {found.name} by tokens")
        cards.append(
            _card(
                f"{found.name}: documents by tokens",
                f"{chart}<p class=soft>{words}, mean {found.lengths['mean']:,.1f}</p>",
            )
        )
    return f'<div class="two">{"".join(cards)}</div>'


def _packing(data: ReportData) -> str:
    out = []
    for found, split in zip(data.stats.splits, data.dataset.splits.values(), strict=True):
        if not found.documents_bins or not len(split):
            continue
        key = (
            '<div class="key"><span><i class="dot fate-context"></i>a document</span><span><i class="dot fate-trained">'
            '</i>its trained share</span><span><i class="dot fate-padding"></i>padding</span></div>'
        )
        out.append(_card(f"{found.name}: rows and their documents", packing_map(split) + key))
        cards = [_card("documents per row", histogram_svg(found.documents_bins, "rows by documents"))]
        if found.fill_bins:
            title = f"fill per row: mean {found.fill['mean']:.2%}, least {found.fill['0%']:.1%}"
            cards.append(_card(title, histogram_svg(found.fill_bins, "rows by fill", percent=True)))
        out.append(f'<div class="two">{"".join(cards)}</div>')
    return "".join(out)


def _findings(data: ReportData) -> str:
    notes: list[tuple[bool, str]] = []
    for split in data.stats.splits:
        if split.nothing_trained:
            notes.append((True, f"{split.nothing_trained:,} {split.item}s of {split.name} train nothing"))
    ledger = data.stats.ledger
    if ledger is not None:
        for note, count in notes_of(ledger).items():
            if note in NOTES:
                notes.append((note.startswith(("untrained", "records_w")), f"{count:,} {NOTES[note]}"))
        for reason, count in rejections_of(ledger).items():
            notes.append((True, f"{count:,} records were left out: {reason.replace('_', ' ')}"))
    for name, found in data.spelled.items():
        if found.documents:
            listed = ", ".join(f"{spelled} ({count:,})" for spelled, count in found.spellings.most_common(6))
            notes.append(
                (
                    False,
                    f"{found.documents:,} documents of {name} hold text that spells control tokens, and it stayed "
                    f"text: {listed}; the first in {data.stats.splits[0].item} {found.first_items[0]:,}",
                )
            )
        else:
            notes.append((False, f"no text of {name} spells a control token"))
    if data.dataset.decoder_problem:
        notes.append((True, data.dataset.decoder_problem))
    rows = "".join(
        f'<li class="{"warn" if warn else "good"}">{_text(words)}</li>'
        for warn, words in sorted(notes, key=lambda note: not note[0])
    )
    return f'<ul class="card notes">{rows}</ul>' if rows else ""


def _samples(data: ReportData) -> str:
    splits = [split for split in data.dataset.splits.values() if len(split)]
    total = sum(map(len, splits))
    items: list[Item] = []
    for split in splits:
        items += sample_items(split, max(1, round(data.samples * len(split) / total)))[: data.samples - len(items)]
    if not items:
        return ""
    cards = "".join(sample_html(item, data.dataset.decoder, data.dataset.layout.item) for item in items)
    key = (
        '<p class="soft">Trained tokens have a <span class="t">green ground</span>; control tokens have '
        '<span class="control">frames</span>, text that only spells one has none; \u23ce is a newline.</p>'
    )
    return key + cards


def _provenance(dataset: LookDataset) -> str:
    about = dataset.about
    if not about:
        return '<p class="soft">There is no manifest beside these files: how they were made is not known.</p>'
    rows = []
    for key, value in about.items():
        if key in ("recipe", "ledger", "files", "inputs", "splits"):
            continue
        shown = json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value
        rows.append(f"<tr><td>{_text(key.replace('_', ' '))}</td><td><code>{_text(shown)}</code></td></tr>")
    out = f'<div class="card"><table>{"".join(rows)}</table></div>'
    out += _inputs(about.get("inputs"))
    for key in ("recipe", "splits"):
        if about.get(key):
            dumped = escape(visible_json(about[key]))
            out += f'<div class="card"><details><summary>{key}</summary><pre>{dumped}</pre></details></div>'
    return out


def visible_json(value: Any) -> str:
    """JSON with what could disturb a page made visible; its own newlines stay."""
    return visible(json.dumps(value, ensure_ascii=False, indent=2), mark_newlines=False)


def _inputs(inputs: Any) -> str:
    if not isinstance(inputs, list) or not inputs:
        return ""
    rows = []
    for file in inputs[:MOST_INPUTS]:
        count = file.get("lines", file.get("records"))
        rows.append(
            f"<tr><td><code>{_text(file.get('path'))}</code></td><td>{_text(file.get('shape'))}</td>"
            f'<td class="n">{_number(count)}</td><td class="n">{_number(file.get("bytes"))}</td>'
            f"<td><code>{_text(str(file.get('sha256', ''))[:12])}</code></td></tr>"
        )
    more = f'<p class="soft">and {len(inputs) - MOST_INPUTS:,} more</p>' if len(inputs) > MOST_INPUTS else ""
    return (
        '<div class="card"><h3>inputs</h3><table><thead><tr><th>file</th><th>shape</th><th class="n">records</th>'
        f'<th class="n">bytes</th><th>sha256</th></tr></thead><tbody>{"".join(rows)}</tbody></table>{more}</div>'
    )


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else ""
