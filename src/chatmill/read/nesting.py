"""How deep JSON may be nested: one limit, whatever version of Python decodes it and however deep its own calls are."""

from __future__ import annotations

import json
import re
from typing import Any

MAX_NESTING = 500
"""Levels; real records have about ten."""
_MARKS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)


def is_too_deep(data: bytes) -> bool:
    """Whether JSON has more levels than the limit."""
    if data.count(b"[") + data.count(b"{") <= MAX_NESTING:
        return False
    depth = 0
    for mark in _MARKS.finditer(data):
        first = data[mark.start()]
        depth += (first in b"[{") - (first in b"]}")
        if depth > MAX_NESTING:
            return True
    return False


def json_inside(text: Any) -> Any:
    """The value of JSON that a record has as text; errors are those of `json.loads`, which takes nothing but text."""
    if isinstance(text, str) and is_too_deep(text.encode("utf-8", "surrogatepass")):
        raise RecursionError
    return json.loads(text)
