"""The ledger as a picture: tokens flow from sources through roles to what became of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Tokens on their way from a node of one column to one of the next."""

    source: str
    target: str
    tokens: int
    css: str
    """Class of its colour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Three columns: where tokens come from, whose they are, and what became of them."""

    left: tuple[Link, ...]
    """Sources to roles."""
    right: tuple[Link, ...]
    """Roles to fates."""


FATE_NAMES = {
    "trained": "trained",
    "context": "context",
    "cut": "cut",
    "dropped": "dropped",
    "injected": "repeated",
    "padding": "padding",
}
"""Fates in the order in which they are drawn, and what they are called."""
ROLE_ORDER = ("system", "developer", "user", "assistant", "tool", "document", "repeated", "padding")


def flow_of_ledger(ledger: Mapping[str, Any]) -> Flow:
    """The flow of a build; small sources are drawn as one, repeated heads and padding come from nowhere."""
    rendered: dict[str, int] = defaultdict(int)
    for source, roles in ledger["tokens"].items():
        rendered[source] = sum(fates.get("rendered", 0) for fates in roles.values())
    shown = sorted(rendered, key=lambda name: (-rendered[name], name))
    if len(shown) > MOST_SOURCES + 1:
        shown = shown[:MOST_SOURCES]
    others = f"({len(rendered) - len(shown)} more sources)"
    left: dict[tuple[str, str], int] = defaultdict(int)
    right: dict[tuple[str, str], int] = defaultdict(int)
    for source, roles in ledger["tokens"].items():
        for role, fates in roles.items():
            left[source if source in shown else others, role] += fates.get("rendered", 0)
            for fate, count in fates.items():
                name = fate.split("_")[0]
                if name == "injected":
                    left["(repeated heads)", "repeated"] += count
                    right["repeated", "injected"] += count
                elif name in FATE_NAMES:
                    right[role, name] += count
    if ledger.get("padding"):
        left["(filled up)", "padding"] += ledger["padding"]
        right["padding", "padding"] += ledger["padding"]
    return Flow(
        left=tuple(
            Link(source=source, target=role, tokens=count, css=f"role-{role}")
            for (source, role), count in left.items()
            if count
        ),
        right=tuple(
            Link(source=role, target=fate, tokens=count, css=f"fate-{fate}")
            for (role, fate), count in right.items()
            if count
        ),
    )


def flow_of_roles(name: str, roles: Sequence[tuple[str, int, int]], padding: int) -> Flow:
    """The flow of a dataset without a ledger: (role, tokens, trained) to trained and context."""
    left = [Link(source=name, target=role, tokens=tokens, css=f"role-{role}") for role, tokens, _ in roles if tokens]
    right = []
    for role, tokens, trained in roles:
        for fate, count in (("trained", trained), ("context", tokens - trained)):
            if count:
                right.append(Link(source=role, target=fate, tokens=count, css=f"fate-{fate}"))
    if padding:
        left.append(Link(source="(filled up)", target="padding", tokens=padding, css="role-padding"))
        right.append(Link(source="padding", target="padding", tokens=padding, css="fate-padding"))
    return Flow(left=tuple(left), right=tuple(right))


@dataclass(slots=True)
class _Node:
    name: str
    tokens: int
    y: float = 0.0
    height: float = 0.0
    used_in: float = 0.0
    """Height that links into it have taken."""
    used_out: float = 0.0


def _column(names: Sequence[str], sums: Mapping[str, int], total: int) -> tuple[dict[str, _Node], float]:
    nodes: dict[str, _Node] = {}
    y = float(TOP)
    for name in names:
        height = max(HEIGHT * sums[name] / total, 1.5)
        lines, beside = _label(name, _words(sums[name], total))
        label = LINE * (len(lines) + (not beside))
        more = max(0.0, (label - height - GAP) / 2)  # room that a label of many lines needs above and below its bar
        nodes[name] = _Node(name, sums[name], y + more, height)
        y += height + 2 * more + GAP
    return nodes, y


def _words(tokens: int, total: int) -> str:
    return f"{tokens:,} \u00b7 {tokens / total:.1%}"


def _label(name: str, words: str) -> tuple[list[str], bool]:
    """The lines of a name, and whether its numbers fit beside the last of them."""
    lines = _lines(name)
    return lines, len(lines[-1]) + len(words) < LABEL_WIDTH


def _lines(name: str) -> list[str]:
    """A name in lines that fit, broken where a word or a part of a path ends if it can be."""
    lines, rest = [], name
    while len(rest) > NAME_WIDTH:
        at = max((rest.rfind(sign, NAME_WIDTH // 2, NAME_WIDTH) for sign in " /-_."), default=-1) + 1
        at = at or NAME_WIDTH
        lines.append(rest[:at].rstrip())
        rest = rest[at:].lstrip()
    return [*lines, rest]


def flow_svg(flow: Flow, label: str) -> str:
    """The picture: bars joined by bands whose width is tokens. Every band and bar says its numbers when pointed at."""
    sums: list[dict[str, int]] = [defaultdict(int), defaultdict(int), defaultdict(int)]
    for link in flow.left:
        sums[0][link.source] += link.tokens
        sums[1][link.target] += link.tokens
    for link in flow.right:
        sums[2][link.target] += link.tokens
    total = max(1, sum(sums[0].values()))
    order_left = sorted(sums[0], key=lambda name: (name.startswith("("), -sums[0][name], name))
    order_middle = [role for role in ROLE_ORDER if role in sums[1]] + sorted(set(sums[1]) - set(ROLE_ORDER))
    order_right = [fate for fate in FATE_NAMES if fate in sums[2]]
    columns = [
        _column(names, counts, total)
        for names, counts in zip((order_left, order_middle, order_right), sums, strict=True)
    ]
    bottom = max(y for _, y in columns)
    left, middle, right = (nodes for nodes, _ in columns)
    parts = _bands(flow.left, left, middle, LEFT + NODE, MIDDLE, total, order_left, order_middle)
    parts += _bands(flow.right, middle, right, MIDDLE + NODE, RIGHT, total, order_middle, order_right)
    for nodes, x, kind in ((left, LEFT, "source"), (middle, MIDDLE, "role"), (right, RIGHT, "fate")):
        parts += [_bar(node, x, kind, total) for node in nodes.values()]
    heads = "".join(
        f'<text class="head" x="{x}" y="14" text-anchor="{anchor}">{words}</text>'
        for x, anchor, words in (
            (LEFT + NODE, "end", "from"),
            (MIDDLE + NODE / 2, "middle", "whose"),
            (RIGHT, "start", "became"),
        )
    )
    return (
        f'<svg class="flow" viewBox="0 0 {WIDTH} {bottom:.0f}" role="img" aria-label="{escape(label)}">'
        f"{heads}{''.join(parts)}</svg>"
    )


def _bands(
    links: Sequence[Link],
    sources: Mapping[str, _Node],
    targets: Mapping[str, _Node],
    x0: float,
    x1: float,
    total: int,
    source_order: Sequence[str],
    target_order: Sequence[str],
) -> list[str]:
    """One curved band per link, laid against each other in the order of the nodes, so that few of them cross."""
    parts = []
    for link in sorted(links, key=lambda one: (source_order.index(one.source), target_order.index(one.target))):
        source, target = sources[link.source], targets[link.target]
        height = max(HEIGHT * link.tokens / total, 0.6)
        a, b = source.y + source.used_out, target.y + target.used_in
        source.used_out += height
        target.used_in += height
        bend = (x0 + x1) / 2  # both curves leave and arrive level
        upper = f"M{x0:.1f} {a:.1f}C{bend:.1f} {a:.1f} {bend:.1f} {b:.1f} {x1:.1f} {b:.1f}"
        a, b = a + height, b + height
        path = f"{upper}v{height:.1f}C{bend:.1f} {b:.1f} {bend:.1f} {a:.1f} {x0:.1f} {a:.1f}z"
        words = f"{link.source} \u2192 {FATE_NAMES.get(link.target, link.target)}: {link.tokens:,} tokens"
        parts.append(f'<path class="band {escape(link.css)}" d="{path}"><title>{escape(words)}</title></path>')
    return parts


def _bar(node: _Node, x: float, kind: str, total: int) -> str:
    """The bar of a node with its name and tokens: names of sources are left of it, the others right."""
    name = FATE_NAMES.get(node.name, node.name) if kind == "fate" else node.name
    css = {"source": "source", "role": f"role-{node.name}", "fate": f"fate-{node.name}"}[kind]
    words = _words(node.tokens, total)
    at, anchor = (x - 8, "end") if kind == "source" else (x + NODE + 8, "start")
    lines, beside = _label(name, words)
    y = node.y + node.height / 2 - LINE * (len(lines) - 1 + (not beside)) / 2
    named = "".join(
        f'<tspan class="name" x="{at}" dy="{LINE if number else 0}">{escape(line)}</tspan>'
        for number, line in enumerate(lines)
    )
    place = "" if beside else f' x="{at}" dy="{LINE}"'
    return (
        f'<rect class="node {escape(css)}" x="{x}" y="{node.y:.1f}" width="{NODE}" height="{node.height:.1f}" rx="2">'
        f"<title>{escape(name)}: {node.tokens:,} tokens</title></rect>"
        f'<text x="{at}" y="{y:.1f}" text-anchor="{anchor}">{named} '
        f'<tspan class="count"{place}>{words}</tspan></text>'
    )
