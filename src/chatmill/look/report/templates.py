"""HTML pages from Jinja templates: every text of a dataset is made visible and escaped, without being asked to."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from chatmill.look.safe_text import visible


def page_of(template: Path, **values: Any) -> Markup:
    """A page, or a part of one; a template may extend and import those that are beside this file."""
    return Markup(_environment(template.parent).get_template(template.name).render(**values))


@cache
def _environment(folder: Path) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,
        finalize=_safe,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"fmt": format, "short": short, "marked": _marked, "plain_json": _plain_json}
    return environment


def _safe(value: Any) -> Any:
    """What an expression of a template gives; markup is safe already."""
    return value if isinstance(value, Markup) else visible(str(value), mark_newlines=False)


def _marked(text: str) -> Markup:
    """Text of a conversation, its newlines and tabs marked."""
    return escape(visible(text))


def _plain_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def short(count: int) -> str:
    """A number in few characters: 950, 1.2k, 38k, 4.1M."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            value = count / size
            return f"{value:.1f}".removesuffix(".0") + letter if value < 10 else f"{value:.0f}{letter}"
    return str(count)
