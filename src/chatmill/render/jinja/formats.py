"""Texts put into a format (`"%s: %s" % (name, text)`, `"{}: {}".format(name, text)`), with their origins.

A format that only puts texts into their places is written piece by piece; any other (widths, attributes) is refused.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from chatmill.render.jinja.traced import OriginLost, Traced, joined, may_hold
from chatmill.render.jinja.traced_values import TracedDict, TracedList, TracedNumber, text_of

_DIRECTIVE = re.compile(r"%(.?)", re.DOTALL)
_WRITTEN = (Traced, int, float, type(None), TracedNumber, TracedDict, TracedList, list, dict)
"""Types that a format writes as `str` does."""


def by_percent(form: Any, values: tuple[Any, ...]) -> str | None:
    """Return what `form % values` gives; None if no text of the record is in it."""
    if not may_hold([form, values]):
        return None
    if type(form) is not str:
        raise OriginLost("a format that is a text of the record")
    pieces: list[Any] = []
    at, used = 0, 0
    for found in _DIRECTIVE.finditer(form):
        pieces.append(form[at : found.start()])
        if found.group(1) == "%":
            pieces.append("%")
        elif found.group(1) == "s" and used < len(values):
            pieces.append(values[used])
            used += 1
        else:
            raise OriginLost("texts of the record in a format with more than %s")
        at = found.end()
    if used != len(values):
        raise OriginLost("a format with fewer places than values")
    return _written([*pieces, form[at:]])


def by_braces(form: Any, values: Sequence[Any], named: Mapping[str, Any]) -> str | None:
    """Return what `form.format(*values, **named)` gives; None if no text of the record is in it."""
    if not may_hold([form, list(values), dict(named)]):
        return None
    if type(form) is not str:
        raise OriginLost("a format that is a text of the record")
    pieces: list[Any] = []
    counted, numbered = 0, False
    try:
        for text, name, spec, conversion in string.Formatter().parse(form):
            pieces.append(text)
            if spec or conversion:
                raise ValueError
            if name is None:
                continue
            if not name:
                pieces.append(values[counted])
                counted += 1
            elif name.isdecimal():
                pieces.append(values[int(name)])
                numbered = True
            else:
                pieces.append(named[name])
        if counted and numbered:
            raise ValueError
    except (ValueError, LookupError):
        raise OriginLost("texts of the record in a format with more than {}") from None
    return _written(pieces)


def _written(pieces: Sequence[Any]) -> str:
    if not all(type(one) is str or isinstance(one, _WRITTEN) for one in pieces):
        raise OriginLost("a value in a format")
    return joined(map(text_of, pieces))
