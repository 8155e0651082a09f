"""Tool definitions as chat templates show them: lines of JSON."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

_LISTED: dict[int, tuple[tuple[Any, ...], str]] = {}
_LISTED_KEPT = 256


def listed_tools(tools: tuple[Any, ...]) -> str:
    """Tool definitions, a line each with a newline before it, as the chat templates of transformers write them.

    Records of one source share the same tuple, so the texts of the last ones are kept; each with its tuple, which must
    live on for its identity to mean something.
    """
    known = _LISTED.get(id(tools))
    if known is not None:
        return known[1]
    if len(_LISTED) >= _LISTED_KEPT:
        _LISTED.clear()
    text = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in tools)
    _LISTED[id(tools)] = tools, text
    return text


@lru_cache(maxsize=_LISTED_KEPT)
def tools_of(listed: str) -> tuple[Any, ...]:
    """The tool definitions that `listed_tools` has written; equal texts mostly give the same tuple."""
    return tuple(json.loads(line) for line in listed.split("\n")[1:])
