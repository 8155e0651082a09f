"""Objects in JSON files that others write: what cannot be used is one short error that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chatmill.errors import ChatmillError, FormatError


def read_object(path: Path, error: type[ChatmillError] = FormatError) -> dict[str, Any]:
    """The object in a file; an `error` where it cannot be read, is no JSON, or holds anything else."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror or problem}") from None
    except (ValueError, RecursionError) as problem:
        raise error(f"{path} is not JSON: {problem}") from None
    if not isinstance(found, dict):
        raise error(f"{path} must hold an object")
    return found
