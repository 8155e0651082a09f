"""Charts of the report as SVG and HTML: histograms, share tables with bars, and the map of packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from chatmill.look.items import Item, LookSplit
from chatmill.look.safe_text import visible
from chatmill.look.stats import Bin, Share

CHART_WIDTH, CHART_HEIGHT = 460, 180
WIDEST_BAR = 72
MAP_ROWS = 32
"""Rows of the map; of more, evenly spaced ones are drawn."""
MAP_WIDTH = 900
ROW_HEIGHT, ROW_GAP = 14, 5


def histogram_svg(bins: Sequence[Bin], label: str, *, percent: bool = False) -> str:
    """Vertical bars with the count above each, and the lower bounds below."""
    if not bins:
        return ""
    most = max(1, *(one.count for one in bins))
    step = min(CHART_WIDTH / len(bins), WIDEST_BAR)
    base, top = CHART_HEIGHT - 26, 22
    every = -(-len(bins) // 12)  # labels that would touch are left out
    parts = [f'<line class="axis" x1="0" x2="{CHART_WIDTH}" y1="{base}" y2="{base}"/>']
    for i, one in enumerate(bins):
        height = (base - top) * one.count / most
        x = i * step
        height = max(height, 1.0) if one.count else 0.0
        words = f"{bounds(one, percent)}: {one.count:,}"
        parts.append(
            f'<rect class="bar" x="{x + 1.5:.1f}" y="{base - height:.1f}" width="{max(step - 3, 1):.1f}" '
            f'height="{height:.1f}" rx="2"><title>{escape(words)}</title></rect>'
        )
        if one.count and len(bins) <= 14:
            parts.append(
                f'<text class="count" x="{x + step / 2:.1f}" y="{base - height - 5:.1f}" text-anchor="middle">'
                f"{short(one.count)}</text>"
            )
        if i % every == 0:
            low = f"{one.low:.0%}" if percent else short(int(one.low))
            parts.append(f'<text x="{x + 2:.1f}" y="{CHART_HEIGHT - 10}" text-anchor="start">{low}</text>')
    return (
        f'<svg class="chart" viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def bounds(one: Bin, percent: bool) -> str:
    """The range of a bin in words."""
    if percent:
        return f"{one.low:.0%} to {one.high:.0%}"
    low, high = int(one.low), int(one.high) - 1
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def short(count: int) -> str:
    """A number in few characters: 950, 1.2k, 38k, 4.1M."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            value = count / size
            return f"{value:.1f}".removesuffix(".0") + letter if value < 10 else f"{value:.0f}{letter}"
    return str(count)


def share_table(shares: Sequence[Share], what: str, items: str = "", css: str = "") -> str:
    """A table with the trained share of each row as a bar; `css` is the prefix of the class of its colour."""
    head = f"<th>{escape(what)}</th>" + (f'<th class="n">{escape(items)}</th>' if items else "")
    rows = []
    for one in shares:
        dot = f'<i class="dot {css}{escape(one.name)}"></i>' if css else ""
        name = escape(visible(one.name, mark_newlines=False))
        counted = f'<td class="n">{one.items:,}</td>' if items else ""
        rows.append(
            f"<tr><td>{dot}{name}</td>{counted}"
            f'<td class="n">{one.tokens:,}</td><td class="n">{one.trained:,}</td><td class="n">{one.share:.1%}</td>'
            f'<td class="meter"><span style="width:{100 * one.share:.2f}%"></span></td></tr>'
        )
    return (
        f'<table><thead><tr>{head}<th class="n">tokens</th><th class="n">trained</th><th class="n">share</th><th></th>'
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def packing_map(split: LookSplit) -> str:
    """Rows of a split as strips: one box per document, its trained share filled in, hatched where padding is."""
    count = min(len(split), MAP_ROWS)
    numbers = np.unique(np.linspace(0, len(split) - 1, count).astype(np.int64)).tolist()
    width = split.capacity or int(split.tokens.max())
    parts = []
    for place, number in enumerate(numbers):
        y = place * (ROW_HEIGHT + ROW_GAP)
        parts.append(f'<text x="44" y="{y + ROW_HEIGHT - 3}" text-anchor="end">{number:,}</text>')
        parts += _strip(split.item(number), y, width)
    height = len(numbers) * (ROW_HEIGHT + ROW_GAP)
    words = f"map of {len(numbers)} of {len(split):,} rows of {split.name}"
    return (
        f'<svg class="map" viewBox="0 0 {MAP_WIDTH + 56} {height}" role="img" aria-label="{escape(words)}">'
        f"{''.join(parts)}</svg>"
    )


def _strip(item: Item, y: float, width: int) -> list[str]:
    scale = MAP_WIDTH / max(1, width)
    trained = item.is_trained
    parts = [f'<rect class="pad" x="52" y="{y}" width="{MAP_WIDTH}" height="{ROW_HEIGHT}"/>']
    for number, (first, last) in enumerate(item.borders):
        x, wide = 52 + first * scale, max((last - first) * scale - 0.8, 0.4)
        share = float(trained[first:last].mean()) if last > first else 0.0
        known = "" if item.documents is None else f"document {int(item.documents[number]):,}, "
        words = f"{known}tokens {first:,} to {last - 1:,}, {share:.0%} trained"
        parts.append(
            f'<g><title>{escape(words)}</title><rect class="doc d{number % 2}" x="{x:.1f}" y="{y}" width="{wide:.1f}" '
            f'height="{ROW_HEIGHT}" rx="1.5"/><rect class="got" x="{x:.1f}" y="{y + ROW_HEIGHT * (1 - share):.1f}" '
            f'width="{wide:.1f}" height="{ROW_HEIGHT * share:.1f}" rx="1.5"/></g>'
        )
    return parts
