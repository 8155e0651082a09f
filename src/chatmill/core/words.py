"""Numbers in words."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Such as `1 record` or `2,000 records`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
