"""The numbers of a dataset for a terminal: tables and plots that read without colour at 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from chatmill.console import plain_table
from chatmill.core.kinds import RoleCode, role_name
from chatmill.core.ledger import FATE_NAMES, LEFT_OUT, Ledger
from chatmill.core.tokens import Tokens
from chatmill.core.words import counted
from chatmill.look.counting import Bin, Share, SplitStats, TokenCounts, role_shares
from chatmill.look.item_lines import COLOURS
from chatmill.look.ledger import SHOWN_SOURCES, accounts_table
from chatmill.look.safe_text import visible
from chatmill.look.splits import TokenBatch

SHOWN_TURNS = 10
SHOWN_NOTES = 40
"""A record may have any number of fields that nothing reads, each with a note of its own."""
EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589\u2588"
ROLE_COLOURS = {role_name(role): COLOURS[role] for role in RoleCode}


def stats_parts(splits: Sequence[SplitStats], accounts: Ledger | None, *, width: int) -> Iterator[RenderableType]:
    """Yield all tables and plots, for a terminal of `width` columns."""
    parts = [*(_split_parts(split, width) for split in splits), _ledger_parts(accounts, width)]
    for part in chain.from_iterable(parts):
        yield part
        yield Text()


def _split_parts(split: SplitStats, width: int) -> Iterator[RenderableType]:
    name, items = split.name, f"{split.item}s"
    head = Text(_headline(split), style="bold")
    if split.lengths:
        head.append(f"\n{_lengths(split)}", style="not bold")
    if split.pictures:
        head.append(f"\n{_pictures(split.pictures)}", style="not bold")
    if split.teacher:
        head.append(f"\n{_teacher(split.teacher)}", style="not bold")
    yield head
    yield _histogram(f"{name}: documents by length", split.length_bins, "documents", width)
    if split.roles:
        yield _share_table(f"{name}: trained share per role", split.roles, "role", width)
    if split.sources:
        title, sources = f"{name}: trained share per source", sorted(split.sources, key=lambda share: -share.tokens)
        if len(sources) > SHOWN_SOURCES:
            title += f" (the {SHOWN_SOURCES} largest of {len(sources)})"
        yield _share_table(title, sources[:SHOWN_SOURCES], "source", width, items)
    if split.turns:
        title = f"{name}: trained share per turn"
        if len(split.turns) > SHOWN_TURNS:
            title += f" (the first of {len(split.turns)})"
        yield _share_table(title, split.turns[:SHOWN_TURNS], "turn", width)
    if split.spans:
        yield _share_table(f"{name}: tokens per span", split.spans, "span", width)
    yield _histogram(f"{name}: {items} by trained share", split.trained_bins, items, width, percent=True)
    if split.fill:
        full = f"mean {split.fill['mean']:.2%}, least full {split.fill['0%']:.1%}, median {split.fill['50%']:.1%}"
        yield _histogram(f"{name}: fill per {split.item} ({full})", split.fill_bins, items, width, percent=True)
    if split.documents_bins:
        title = f"{name}: documents per {split.item}"
        yield _histogram(title, split.documents_bins, items, width, unit="documents")


def role_table(title: str, tokens: Tokens, run_weights: NDArray[np.float32], *, width: int) -> RenderableType:
    """Make a table of the tokens and trained tokens of rendered conversations, by role and in all."""
    counts = TokenCounts(len(tokens))
    weights = tokens.per_token(run_weights)
    items, ids = np.arange(len(tokens)), tokens.ids.view(np.uint32)
    counts.add(TokenBatch(items=items, offsets=tokens.offsets, ids=ids, weights=weights, kinds=tokens.kinds))
    total = Share(name="all", tokens=counts.tokens, trained=int(counts.trained.sum()))
    return _share_table(title, [*role_shares(counts), total], "role", width)


def _headline(split: SplitStats) -> str:
    words = [counted(split.items, split.item)]
    if split.documents != split.items:
        words.append(counted(split.documents, "document"))
    words += [f"{split.tokens:,} tokens", f"{split.trained:,} trained ({split.trained / max(1, split.tokens):.1%})"]
    if split.capacity:
        words.append(f"{split.padding:,} padding in rows of {split.capacity:,}")
    if split.nothing_trained:
        words.append(f"{counted(split.nothing_trained, split.item)} without a trained token")
    return f"{split.name}: {', '.join(words)}"


def _lengths(split: SplitStats) -> str:
    sizes = split.lengths
    quantiles = ", ".join(f"{name} {sizes[name]:,.0f}" for name in ("5%", "50%", "95%"))
    return f"tokens of a document: {sizes['0%']:,.0f} to {sizes['100%']:,.0f}, mean {sizes['mean']:,.1f}; {quantiles}"


def _pictures(pictures: Mapping[str, int]) -> str:
    sides = (f"{name} {pictures[f'least_{name}']:,} to {pictures[f'largest_{name}']:,}" for name in ("width", "height"))
    return f"{counted(pictures['count'], 'picture')}, {pictures['tokens']:,} tokens; {', '.join(sides)} pixels"


def _teacher(coverage: Mapping[str, int]) -> str:
    share = coverage["distributions"] / max(1, coverage["targets"])
    documents = f"{coverage['answered']:,} of {counted(coverage['documents'], 'document')} with targets"
    targets = f"{coverage['distributions']:,} of {counted(coverage['targets'], 'target')} ({share:.1%})"
    return f"teacher: {documents}, {targets}, {coverage['k']} entries each, {coverage['bytes']:,} bytes"


def _ledger_parts(ledger: Ledger | None, width: int) -> Iterator[RenderableType]:
    if ledger is None:
        return
    fates = ledger.fates()
    total = max(1, sum(fates.values()))
    lines = Text("ledger of the build: where every token went\n", style="bold")
    for fate, count in fates.items():
        drawn = bar(count / total, max(10, width - 34))
        lines.append(f"{FATE_NAMES[fate]:<9} {count:>14,} {count / total:>6.1%} ", style="default not bold")
        lines.append(f"{drawn.rstrip()}\n", style="cyan not bold")
    lines.rstrip()
    yield lines
    if cost := ledger.cost_of_turns():
        yield Text(cost)
    table = accounts_table(ledger)
    table.title, table.title_justify, table.title_style = "ledger: tokens by source", "left", "bold"
    yield table
    for title, counts in (("records left out", ledger.reasons(*LEFT_OUT)), ("notes", ledger.all_notes())):
        if counts:
            shown = sorted(counts.most_common(SHOWN_NOTES))
            words = [f"{name.replace('_', ' ')} {count:,}" for name, count in shown]
            more = f" and {len(counts) - len(shown):,} more" if len(counts) > len(shown) else ""
            yield Text(f"{title}: {', '.join(words)}{more}")


def bar(share: float, width: int, *, track: bool = False) -> str:
    """Draw a bar of `share` (0 to 1) of `width` columns; anything above 0 is visible. `track` fills the rest."""
    share = min(max(share, 0.0), 1.0)
    eighths = max(round(share * width * 8), 1 if share > 0 else 0)
    full, rest = divmod(eighths, 8)
    drawn = EIGHTHS[8] * full + (EIGHTHS[rest] if rest else "")
    return drawn + ("\u00b7" if track else " ") * (width - len(drawn))


def _histogram(
    title: str, bins: Sequence[Bin], label: str, width: int, *, percent: bool = False, unit: str = "tokens"
) -> Table:
    """Draw one row per bin: its range (in `unit`, or of shares), its count, and a bar against the largest."""
    most = max((bin_.count for bin_ in bins), default=0)
    labels = [bin_.bounds("-", percent) for bin_ in bins]
    header = "share" if percent else unit
    room = width - max(len(header), *map(len, labels), 0) - max(len(label), len(f"{most:,}")) - 4
    table = _table(title, right=(header, label))
    table.add_column("", no_wrap=True)
    for bin_, name in zip(bins, labels, strict=True):
        drawn = bar(bin_.count / most if most else 0.0, max(room, 8))
        table.add_row(name, f"{bin_.count:,}", Text(drawn, style="cyan"))
    return table


def _share_table(title: str, shares: Sequence[Share], heading: str, width: int, items: str = "") -> Table:
    """Draw one row per role, source or turn: tokens, trained tokens, their share, and the share as a bar.

    `items` names the column of items, where they are counted. Roles have their colours.
    """
    table = _table(title, heading, right=(*([items] if items else []), "tokens", "trained", "share"))
    table.columns[0].overflow, table.columns[0].max_width = "fold", 28
    table.add_column("", no_wrap=True)
    for share in shares:
        counts = [*([share.items or 0] if items else []), share.tokens, share.trained]
        table.add_row(
            Text(visible(share.name, mark_newlines=False), style=ROLE_COLOURS.get(share.name, "default")),
            *(f"{count:,}" for count in counts),
            f"{share.share:.1%}",
            Text(bar(share.share, 20 if width >= 80 else 10, track=True), style="green"),
        )
    return table


def _table(title: str, *names: str, right: Sequence[str]) -> Table:
    table = plain_table(*names, right=right)
    table.title, table.title_justify, table.title_style = title, "left", "bold"
    return table
