"""Times of lines, by which lines that a fork copied are known."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any


def timestamp_seconds(record: Mapping[str, Any]) -> float | None:
    """Return the time of a line in seconds; None where it has none."""
    stamp = record.get("timestamp")
    if not isinstance(stamp, str):
        return None
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except (ValueError, OverflowError):
        return None


def copied_before(record: Mapping[str, Any], start: float | None, seconds: float) -> bool:
    """Return whether a line is older than the beginning of its file by more than some seconds."""
    stamp = timestamp_seconds(record)
    return start is not None and stamp is not None and stamp < start - seconds
