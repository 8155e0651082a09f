"""Weights of parts of a message's text: which characters of a field have a weight of their own."""

from __future__ import annotations

from typing import NamedTuple

CONTENT, REASONING, ARGUMENTS = "content", "reasoning", "arguments"
"""The fields that may have such weights."""


class WeightSpan(NamedTuple):
    """Characters of one field, which all have one weight."""

    field: str
    """`CONTENT`, `REASONING` or `ARGUMENTS`."""
    call: int
    """Index of the tool call whose arguments these are, 0 for the other fields."""
    begin: int
    end: int
    """Characters from `begin` up to, not including, `end`."""
    weight: float
