"""Lines with a label at the left and a text that is wrapped beside it."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from rich.text import Text

from chatmill.look.safe_text import visible

if TYPE_CHECKING:
    from rich.console import Console

GUTTER = 12
"""Columns of the label."""


def print_labelled(
    console: Console, label: str, text: str, *, style: str = "bold", indent: int = 0, gutter: int = GUTTER
) -> None:
    """Print a label and a text; long words are cut, nothing is wider than the console."""
    width = max(20, console.width - gutter - indent)
    shown = visible(text, mark_newlines=False)
    wrapped = textwrap.wrap(shown, width, break_on_hyphens=False, drop_whitespace=True) or [""]
    for number, part in enumerate(wrapped):
        line = Text(" " * indent)
        line.append(f"{'' if number else label:<{gutter}}", style=style)
        line.append(part)
        line.rstrip()
        console.print(line, soft_wrap=True)
