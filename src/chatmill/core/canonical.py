"""The one JSON spelling of a value, made for hashing."""

from __future__ import annotations

import json

from chatmill.errors import DataError


def canonical_json(value: object) -> bytes:
    """Return the one JSON spelling of a value with texts as keys: sorted, no spaces, ASCII, no newline at the end."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except ValueError as error:
        raise DataError(f"no canonical JSON for this value: {error}") from error
    return text.encode("ascii")
