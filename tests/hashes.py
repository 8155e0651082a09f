"""The records of files in manifests, made in one step from the bytes."""

from __future__ import annotations

from typing import Any

import xxhash


def file_entry(data: bytes) -> dict[str, Any]:
    """What a manifest of a dataset says of a file with these bytes."""
    return {"bytes": len(data), "xxh128": xxhash.xxh128_hexdigest(data)}
