"""Recognize files of OpenHands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LOG_MARKS = ("kwargs", "llm_path", "usage_summary", "fncall_messages")


def is_completion_log(record: Mapping[str, Any]) -> bool:
    """Check for the log of one model call."""
    has_request = "messages" in record or "input" in record
    is_call = has_request and ("response" in record or "error" in record)
    return is_call and any(mark in record for mark in LOG_MARKS)


def is_openhands_event(record: Mapping[str, Any]) -> bool:
    """Check for an event, or a benchmark's result with events."""
    history = record.get("history")
    if isinstance(history, list) and "instance_id" in record:
        first = history[0] if history else None
        first = first[0] if isinstance(first, list) and first else first
        return isinstance(first, Mapping) and _is_event(first)
    return _is_event(record)


def _is_event(record: Mapping[str, Any]) -> bool:
    if isinstance(record.get("kind"), str) and "source" in record:
        return "id" in record and str(record["kind"]).endswith(("Event", "Observation", "Condensation"))
    has_kind = isinstance(record.get("action"), str) or isinstance(record.get("observation"), str)
    return has_kind and ("source" in record or "args" in record or "extras" in record)
