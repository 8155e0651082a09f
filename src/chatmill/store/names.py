"""Names from files that become paths: plain ones, which never lead out of their folder."""

from __future__ import annotations

import re
from typing import Any

PLAIN = re.compile(r"[^/\\\0]+", re.DOTALL)


def is_plain_name(name: Any) -> bool:
    """Whether a value names one file or folder: not empty, no separator of any system, no NUL, not dots alone."""
    return isinstance(name, str) and name not in {".", ".."} and PLAIN.fullmatch(name) is not None


def is_split_name(name: Any) -> bool:
    """Whether a value names a split: plain, and not hidden."""
    return is_plain_name(name) and not name.startswith(".")


def is_inner_path(path: Any) -> bool:
    """Whether a value is a path, with `/`, of a file below the folder it is relative to."""
    return isinstance(path, str) and all(map(is_plain_name, path.split("/")))
