"""Tool definitions as chat templates show them: lines of JSON."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

_ENCODER = json.JSONEncoder(ensure_ascii=False)


def listed_tools(tools: tuple[Any, ...]) -> str:
    """Tool definitions, a line each with a newline before it, as the chat templates of transformers write them."""
    return "".join([f"\n{_ENCODER.encode(tool)}" for tool in tools])


@lru_cache(maxsize=256)
def tools_of(listed: str) -> tuple[Any, ...]:
    """Return the tool definitions that `listed_tools` has written; equal texts mostly give the same tuple."""
    return tuple(json.loads(line) for line in listed.split("\n")[1:])
