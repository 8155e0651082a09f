"""Texts put into a format (`"%s: %s" % (name, text)`, `"{}: {}".format(name, text)`), with their origins.

A format that only puts texts into their places is written piece by piece. Of what any other makes (widths, attributes)
the origin is lost.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from chatmill.render.jinja.traced import Traced, joined
from chatmill.render.jinja.traced_values import TracedDict, TracedFloat, TracedInt, TracedList, text_of

_DIRECTIVE = re.compile(r"%(.?)", re.DOTALL)
_WRITTEN = frozenset(
    {str, Traced, int, float, bool, type(None), TracedInt, TracedFloat, dict, list, TracedDict, TracedList}
)
"""Types that a format writes as `str` does."""


def by_percent(form: str, values: Any) -> str | None:
    """What `form % values` gives; None where the format does more than put texts into their places."""
    given = values if isinstance(values, tuple) else (values,)
    pieces: list[Any] = []
    at, used = 0, 0
    for found in _DIRECTIVE.finditer(form):
        pieces.append(form[at : found.start()])
        if found.group(1) == "%":
            pieces.append("%")
        elif found.group(1) == "s" and used < len(given):
            pieces.append(given[used])
            used += 1
        else:
            return None
        at = found.end()
    return _written([*pieces, form[at:]]) if used == len(given) else None


def by_braces(form: str, values: Sequence[Any], named: Mapping[str, Any]) -> str | None:
    """What `form.format(*values, **named)` gives; None where the format does more than put texts into their places."""
    pieces: list[Any] = []
    counted, numbered = 0, False
    try:
        for text, name, spec, conversion in string.Formatter().parse(form):
            pieces.append(text)
            if name is None:
                continue
            if spec or conversion:
                return None
            if not name:
                pieces.append(values[counted])
                counted += 1
            elif name.isdecimal():
                pieces.append(values[int(name)])
                numbered = True
            else:
                pieces.append(named[name])
    except (ValueError, LookupError):
        return None
    return None if counted and numbered else _written(pieces)


def _written(pieces: Sequence[Any]) -> str | None:
    return joined(map(text_of, pieces)) if all(type(one) in _WRITTEN for one in pieces) else None
