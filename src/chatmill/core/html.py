"""Small pieces of HTML for notebooks: tables and coloured messages with their style inside, and nothing to fetch.

All text is escaped: content is data, never markup. Colours are chosen to be read on a dark and on a light page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

COLOURS = {
    "system": "#8f63d2",
    "developer": "#cc5fa8",
    "user": "#2f8fe0",
    "assistant": "#2fa866",
    "tool": "#c48a1c",
}
"""The colour of each role."""
SOFT = "opacity:.68"
TRAINED = "background:rgba(47,168,102,.22);border-radius:2px"
_TABLE = "border-collapse:collapse;margin:4px 0"
_CELL = "padding:2px 14px 2px 0;vertical-align:top;border:0;background:none"
_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:plaintext;font-family:ui-monospace,monospace"

Cell = str | int | float


def table(rows: Iterable[Sequence[Cell]], head: Sequence[str] = ()) -> str:
    """A table; numbers are written with separators and aligned right."""
    lines = []
    if head:
        lines.append("".join(f'<th style="{_CELL};text-align:left;{SOFT}">{escape(name)}</th>' for name in head))
    for row in rows:
        lines.append("".join(map(_cell, row)))
    body = "".join(f'<tr style="background:none">{line}</tr>' for line in lines)
    return f'<table style="{_TABLE}">{body}</table>'


def _cell(value: Cell) -> str:
    if isinstance(value, str):
        return f'<td style="{_CELL};text-align:left">{escape(value)}</td>'
    shown = f"{value:,}" if isinstance(value, int) else f"{value:.1%}"
    return f'<td style="{_CELL};text-align:right;font-variant-numeric:tabular-nums">{shown}</td>'


def counted(number: int, noun: str) -> str:
    """Such as `1 record` or `2,000 records`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def card(title: str, body: str, note: str = "") -> str:
    """A titled block; `body` is HTML, the others are text."""
    more = f'<div style="{SOFT}">{escape(note)}</div>' if note else ""
    return f'<div style="margin:4px 0"><b>{escape(title)}</b>{body}{more}</div>'


def message(role: str, body: str) -> str:
    """One message with its role at the left; `body` is HTML."""
    colour = COLOURS.get(role, "#8a8f94")
    who = f'<div style="flex:0 0 84px;color:{colour};font-weight:600">{escape(role)}</div>'
    text = f'<div style="flex:1;min-width:0;{_TEXT}">{body}</div>'
    return f'<div style="display:flex;gap:10px;padding:3px 10px;border-left:4px solid {colour}">{who}{text}</div>'


def plain(text: str) -> str:
    """Some text as it is."""
    return escape(text)


def span(text: str, *, trained: bool, control: bool = False, title: str = "") -> str:
    """Some text of a message: what is trained has a green ground, control tokens a frame."""
    style = TRAINED if trained else SOFT
    if control:
        style += ";border:1px solid currentColor;border-radius:3px;padding:0 2px;font-size:.88em"
    about = f' title="{escape(title)}"' if title else ""
    return f'<span style="{style}"{about}>{escape(text)}</span>'
