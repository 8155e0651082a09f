"""The ledger as a picture: tokens flow from sources through roles to what became of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from chatmill.core.ledger import Ledger, short_fate
from chatmill.look.report.templates import page_of
from chatmill.look.stats import FATE_NAMES, Share

WIDTH = 960
NODE = 14
"""Width of the bar of a node."""
GAP = 14
HEIGHT = 320
"""Height of all tokens of a column, without gaps."""
LEFT, MIDDLE, RIGHT = 240, 490, 740
MOST_SOURCES = 10
TOP = 28
LINE = 15
"""Height of a line of text."""
NAME_WIDTH = 28
"""Characters of a name in a line left of its bar; longer names take more lines, and none is cut."""
LABEL_WIDTH = 34
"""Characters of a name and its numbers that fit one line."""
ROLE_ORDER = ("system", "developer", "user", "assistant", "tool", "document", "repeated", "padding")


class Flow(NamedTuple):
    """Tokens between three columns: where they come from, whose they are, and what became of them."""

    left: Counter[tuple[str, str]]
    """From each source to each role."""
    right: Counter[tuple[str, str]]
    """From each role to each fate."""

    def add(self, source: str, role: str, fate: str, tokens: int) -> None:
        """Tokens that go all the way."""
        self.left[source, role] += tokens
        self.right[role, fate] += tokens

    def flowing(self) -> Flow:
        """Without what nothing flows through."""
        return Flow(+self.left, +self.right)


def flow_of_ledger(ledger: Ledger) -> Flow:
    """The flow of a build; small sources are drawn as one, repeated heads and padding come from nowhere."""
    rendered: Counter[str] = Counter()
    for (source, _, fate), count in ledger.tokens.items():
        rendered[source] += count if fate == "rendered" else 0
    shown = sorted(rendered, key=lambda name: (-rendered[name], name))
    if len(shown) > MOST_SOURCES + 1:
        shown = shown[:MOST_SOURCES]
    others = f"({len(rendered) - len(shown)} more sources)"
    flow = Flow(Counter(), Counter())
    for (source, role, fate), count in ledger.tokens.items():
        if fate == "rendered":
            flow.left[source if source in shown else others, role] += count
        elif fate == "injected":
            flow.add("(repeated heads)", "repeated", "injected", count)
        else:
            flow.right[role, short_fate(fate)] += count
    flow.add("(filled up)", "padding", "padding", ledger.padding)
    return flow.flowing()


def flow_of_roles(name: str, roles: Sequence[Share], padding: int) -> Flow:
    """The flow of a dataset without a ledger, where nothing was cut or dropped as far as is known."""
    flow = Flow(Counter(), Counter())
    for one in roles:
        flow.add(name, one.name, "trained", one.trained)
        flow.add(name, one.name, "context", one.tokens - one.trained)
    flow.add("(filled up)", "padding", "padding", padding)
    return flow.flowing()


@dataclass(slots=True)
class _Bar:
    """A node of a column, as it is drawn: its name is left of a source, and right of the others."""

    name: str
    css: str
    x: int
    tokens: int
    words: str
    lines: list[str]
    """Those of the name."""
    y: float = 0.0
    height: float = 0.0
    used_in: float = 0.0
    """Height that bands into it have taken."""
    used_out: float = 0.0

    @property
    def beside(self) -> bool:
        """Whether the numbers fit beside the last line of the name."""
        return len(self.lines[-1]) + len(self.words) < LABEL_WIDTH

    @property
    def label_height(self) -> int:
        """Of the lines behind the first."""
        return LINE * (len(self.lines) - 1 + (not self.beside))

    @property
    def anchor(self) -> str:
        """Which end of the label is at the bar."""
        return "end" if self.x == LEFT else "start"

    @property
    def text_x(self) -> int:
        """Where the label is."""
        return self.x - 8 if self.x == LEFT else self.x + NODE + 8

    @property
    def text_y(self) -> float:
        """Its first line; the label is in the middle of the bar."""
        return self.y + self.height / 2 - self.label_height / 2


class _Band(NamedTuple):
    path: str
    css: str
    words: str


def _column(names: Sequence[str], sums: Mapping[str, int], total: int, x: int) -> tuple[dict[str, _Bar], float]:
    """The bars of a column from top to bottom, and where it ends."""
    bars: dict[str, _Bar] = {}
    y = float(TOP)
    for name in names:
        shown = FATE_NAMES[name] if x == RIGHT else name
        css = {LEFT: "source", MIDDLE: f"role-{name}", RIGHT: f"fate-{name}"}[x]
        words = f"{sums[name]:,} \u00b7 {sums[name] / total:.1%}"
        bar = bars[name] = _Bar(shown, css, x, sums[name], words, _lines(shown))
        bar.height = max(HEIGHT * sums[name] / total, 1.5)
        # room that a label of many lines needs above and below its bar
        more = max(0.0, (bar.label_height + LINE - bar.height - GAP) / 2)
        bar.y = y + more
        y += bar.height + 2 * more + GAP
    return bars, y


def _lines(name: str) -> list[str]:
    """A name in lines that fit, broken where a word or a part of a path ends if it can be."""
    lines, rest = [], name
    while len(rest) > NAME_WIDTH:
        at = max((rest.rfind(sign, NAME_WIDTH // 2, NAME_WIDTH) for sign in " /-_."), default=-1) + 1
        at = at or NAME_WIDTH
        lines.append(rest[:at].rstrip())
        rest = rest[at:].lstrip()
    return [*lines, rest]


def flow_svg(flow: Flow, label: str) -> Markup:
    """The picture: bars joined by bands whose width is tokens. Every band and bar says its numbers when pointed at."""
    sums: tuple[Counter[str], Counter[str], Counter[str]] = (Counter(), Counter(), Counter())
    for (source, role), tokens in flow.left.items():
        sums[0][source] += tokens
        sums[1][role] += tokens
    for (_, fate), tokens in flow.right.items():
        sums[2][fate] += tokens
    total = max(1, sums[0].total())
    sources = sorted(sums[0], key=lambda name: (name.startswith("("), -sums[0][name], name))
    roles = [role for role in ROLE_ORDER if role in sums[1]] + sorted(set(sums[1]) - set(ROLE_ORDER))
    fates = [fate for fate in FATE_NAMES if fate in sums[2]]
    left, bottom_left = _column(sources, sums[0], total, LEFT)
    middle, bottom_middle = _column(roles, sums[1], total, MIDDLE)
    right, bottom_right = _column(fates, sums[2], total, RIGHT)
    return page_of(
        Path(__file__).with_name("flow.svg"),
        label=label,
        width=WIDTH,
        bottom=max(bottom_left, bottom_middle, bottom_right),
        bar_width=NODE,
        line_height=LINE,
        heads=((LEFT + NODE, "end", "from"), (MIDDLE + NODE / 2, "middle", "whose"), (RIGHT, "start", "became")),
        bands=[*_bands(flow.left, left, middle, total), *_bands(flow.right, middle, right, total)],
        bars=[*left.values(), *middle.values(), *right.values()],
    )


def _bands(
    links: Counter[tuple[str, str]], sources: Mapping[str, _Bar], targets: Mapping[str, _Bar], total: int
) -> Iterator[_Band]:
    """One curved band per link, laid against each other in the order of the bars, so that few of them cross."""
    for name, source in sources.items():
        for other, target in targets.items():
            tokens = links[name, other]
            if not tokens:
                continue
            height = max(HEIGHT * tokens / total, 0.6)
            x0, x1 = source.x + NODE, target.x
            a, b = source.y + source.used_out, target.y + target.used_in
            source.used_out += height
            target.used_in += height
            bend = (x0 + x1) / 2  # both curves leave and arrive level
            upper = f"M{x0:.1f} {a:.1f}C{bend:.1f} {a:.1f} {bend:.1f} {b:.1f} {x1:.1f} {b:.1f}"
            a, b = a + height, b + height
            path = f"{upper}v{height:.1f}C{bend:.1f} {b:.1f} {bend:.1f} {a:.1f} {x0:.1f} {a:.1f}z"
            css = target.css  # a band into a role has its colour, and one into a fate that of the fate
            yield _Band(path, css, f"{source.name} \u2192 {target.name}: {tokens:,} tokens")
