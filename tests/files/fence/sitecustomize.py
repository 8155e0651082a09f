"""Keeps a Python process to its own machine's folders, so that machines of one test share none.

With this folder first in PYTHONPATH: what is below the folders in TEST_FENCE (joined by `:`) is not there.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

FENCED = tuple(f"{folder}/" for folder in os.environ.get("TEST_FENCE", "").split(":") if folder)
CALLS = ("open", "os.listdir", "os.scandir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink")


def refuse(path: object) -> None:
    """Raise what a machine without this folder would."""
    text = os.fsdecode(path) if isinstance(path, str | bytes) else ""
    if text and f"{os.path.abspath(text)}/".startswith(FENCED):
        raise FileNotFoundError(errno.ENOENT, "the folder of another machine", text)


def watch(event: str, given: tuple[Any, ...]) -> None:
    """Refuse an operation on a path of another machine."""
    if event in CALLS:
        for path in given[:2]:
            refuse(path)


def fenced(original: Any) -> Any:
    """Return a function of `os` that finds nothing behind the fence."""

    def call(path: Any, *more: Any, **options: Any) -> Any:
        refuse(os.fspath(path) if not isinstance(path, int) else None)
        return original(path, *more, **options)

    return call


if FENCED:
    sys.addaudithook(watch)
    os.stat = fenced(os.stat)
    os.lstat = fenced(os.lstat)
