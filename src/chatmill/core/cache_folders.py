"""Cache folders: the user's, and Chatmill's."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "CHATMILL_CACHE"


def user_cache() -> Path:
    """`XDG_CACHE_HOME`, else `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


def chatmill_cache() -> Path:
    """`CHATMILL_CACHE`, else `chatmill` in the user's cache."""
    folder = os.environ.get(CACHE_VARIABLE)
    return Path(folder).expanduser() if folder else user_cache() / "chatmill"
