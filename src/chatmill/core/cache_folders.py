"""Where caches are on this machine: the user's, and Chatmill's own."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "CHATMILL_CACHE"


def user_cache() -> Path:
    """`XDG_CACHE_HOME`, else `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


def chatmill_cache() -> Path:
    """`CHATMILL_CACHE`, else the folder `chatmill` of the user's cache."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given).expanduser() if given else user_cache() / "chatmill"
