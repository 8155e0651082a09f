"""Find lines that a fork copied, by their times."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any


def timestamp_seconds(record: Mapping[str, Any]) -> float | None:
    """Read the time of a line in seconds.

    Returns None for lines without a time.
    """
    stamp = record.get("timestamp")
    if not isinstance(stamp, str):
        return None
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except (ValueError, OverflowError):
        return None


def copied_before(record: Mapping[str, Any], start: float | None, seconds: float) -> bool:
    """Check for a line older than the beginning of its file."""
    stamp = timestamp_seconds(record)
    return start is not None and stamp is not None and stamp < start - seconds
