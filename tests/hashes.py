"""The records of files in manifests, made in one step from the bytes."""

from __future__ import annotations

import hashlib
from typing import Any

import xxhash


def file_entry(data: bytes) -> dict[str, Any]:
    """What a manifest of a dataset says of a file with these bytes."""
    return {"bytes": len(data), "xxh128": xxhash.xxh128_hexdigest(data)}


def old_entry(data: bytes) -> dict[str, Any]:
    """The same as it was written before xxh128."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
