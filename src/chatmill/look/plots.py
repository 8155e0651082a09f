"""Plots for a terminal: bars of eighth blocks, or of # where Unicode cannot be shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from chatmill.core.kinds import RoleCode
from chatmill.look.item_lines import COLOURS
from chatmill.look.stats import Bin, Share

EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589\u2588"

ROLE_COLOURS = {"document" if role is RoleCode.NONE else role.name.lower(): COLOURS[role] for role in RoleCode}


def bar(share: float, width: int, *, ascii_only: bool = False, track: bool = False) -> str:
    """A bar of `share` (0 to 1) of `width` columns; anything above 0 can be seen. `track` fills the rest."""
    share = min(max(share, 0.0), 1.0)
    if ascii_only:
        full = max(round(share * width), 1 if share > 0 else 0)
        return "#" * full + ("." if track else " ") * (width - full)
    eighths = max(round(share * width * 8), 1 if share > 0 else 0)
    full, rest = divmod(eighths, 8)
    drawn = EIGHTHS[8] * full + (EIGHTHS[rest] if rest else "")
    return drawn + ("\u00b7" if track else " ") * (width - len(drawn))


@dataclass(frozen=True, slots=True)
class Plots:
    """Tables and plots for a terminal of `width` columns."""

    width: int
    ascii_only: bool

    def histogram(
        self, title: str, bins: Sequence[Bin], label: str, *, percent: bool = False, what: str = "tokens"
    ) -> Table:
        """One row per bin: its range (of `what`, or of shares), its count, and a bar against the largest."""
        most = max((one.count for one in bins), default=0)
        labels = [one.bounds("-", percent) for one in bins]
        header = "share" if percent else what
        room = self.width - max(len(header), *map(len, labels), 0) - max(len(label), len(f"{most:,}")) - 4
        table = _table(title)
        table.add_column(header, justify="right", no_wrap=True)
        table.add_column(label, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for one, name in zip(bins, labels, strict=True):
            drawn = bar(one.count / most if most else 0.0, max(room, 8), ascii_only=self.ascii_only)
            table.add_row(name, f"{one.count:,}", Text(drawn, style="cyan"))
        return table

    def share_table(self, title: str, shares: Sequence[Share], what: str, items: str = "") -> Table:
        """One row per role, source or turn: tokens, trained tokens, their share, and the share as a bar.

        `items` names the column of items, where they are counted. Roles have their colours.
        """
        table = _table(title)
        table.add_column(what, overflow="fold", max_width=28)
        if items:
            table.add_column(items, justify="right", no_wrap=True)
        for name in ("tokens", "trained", "share"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for one in shares:
            drawn = bar(one.share, 20 if self.width >= 80 else 10, ascii_only=self.ascii_only, track=True)
            table.add_row(
                Text(one.name, style=ROLE_COLOURS.get(one.name, "default")),
                *([f"{one.items:,}"] if items else []),
                f"{one.tokens:,}",
                f"{one.trained:,}",
                f"{one.share:.1%}",
                Text(drawn, style="green"),
            )
        return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
