"""HTML pages from the Jinja templates here: every text of a dataset is made visible and escaped by default."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from chatmill.core.publish import whole_file
from chatmill.core.words import counted
from chatmill.errors import ConfigError
from chatmill.look.ledger import source_rows
from chatmill.look.safe_text import visible

FOLDER = Path(__file__).parent
NEWLINE = Markup('<i class="newline" aria-hidden="true">\u23ce</i>\n')


def page_of(template: Path | str, **values: Any) -> Markup:
    """Render a page or a part of one; a template of another folder may extend and import those in this one."""
    place = FOLDER / template
    return Markup(environment(place.parent).get_template(place.name).render(**values))


@cache
def environment(folder: Path = FOLDER) -> jinja2.Environment:
    """Load templates of a folder, and of this one."""
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, FOLDER]),
        autoescape=True,
        finalize=_safe,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {
        "fmt": format,
        "count": "{:,}".format,
        "compact": compact,
        "marked": _marked,
        "one_line": lambda text: " ".join(str(text).split()),
        "plain_json": _plain_json,
        "plural": counted,
        "percent": percent,
        "source_rows": source_rows,
    }
    return env


def _safe(value: Any) -> Any:
    """Make the value of an expression safe; markup is safe already."""
    return value if isinstance(value, Markup) else visible(str(value), mark_newlines=False)


def _marked(text: str) -> Markup:
    """Mark newlines and tabs in the text of a conversation."""
    return NEWLINE.join(escape(visible(line)) for line in text.split("\n"))


def _plain_json(value: Any, indent: int | None = None) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=indent)


def compact(number: float) -> str:
    """Shorten a number: 9,500, 20.9K, 4.1M."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "K")):
        if number >= max(size, 10**4):
            return f"{number / size:.1f}".removesuffix(".0") + letter
    return f"{int(number):,}"


def percent(part: float, whole: float = 1) -> str:
    """Format a share with one digit; more than nothing is never 0.0%, and less than all is never 100.0%."""
    if not whole:
        return "\u2013"
    text = f"{100 * part / whole:.1f}%"
    if part and text == "0.0%":
        return "<0.1%"
    return ">99.9%" if part != whole and text == "100.0%" else text


def check_place(path: Path) -> None:
    """Refuse a path that no page can be written to, before a dataset is read for nothing."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: give the name of the page, such as {path / 'page.html'}")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent}: no such folder for {path.name}: make it first")


def write_page(path: Path, page: str) -> None:
    """Write a page atomically."""
    check_place(path)
    with whole_file(path) as partial:
        partial.write_bytes(page.encode("utf-8", errors="replace"))
