"""Read JSON objects from files that other programs write, with one short error that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chatmill.errors import ChatmillError, FormatError

NO_JSON = (ValueError, RecursionError)
"""What `decoded` raises."""


def decoded(raw: bytes) -> Any:
    """Decode JSON; half of a pair of escapes, text without a UTF-8 form, is a mistake too: it fails when written."""
    value = json.loads(raw)
    if b"\\u" in raw:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def read_object(path: Path, error: type[ChatmillError] = FormatError) -> dict[str, Any]:
    """Read the object in a file; raise `error` if it is unreadable, not JSON, or not an object."""
    try:
        value = decoded(path.read_bytes())
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror or problem}") from None
    except NO_JSON as problem:
        raise error(f"{path} is not JSON: {problem}") from None
    if not isinstance(value, dict):
        raise error(f"{path} must hold an object")
    return value
