"""Which records of a group are used: the best, or the first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from chatmill.read.where import parse_where

PICK = "pick"
"""The reason of records in the ledger whose group has a better one."""


class Pick(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One record of each group: the first, or the first of the best."""

    group: str
    """Records that agree in this field, a text or a whole number, are a group; one without it is alone."""
    best: str | None = None
    """The field with a number that is largest in the best record; absent: the first record is used."""

    def __post_init__(self) -> None:
        """Check the name of the field."""
        if self.best is not None:
            parse_where(self.best)

    def score(self, record: Mapping[str, Any]) -> float:
        """Return what a record is compared by; what is no number is below all numbers."""
        score = None if self.best is None else parse_where(self.best).value(record)
        if not isinstance(score, int | float) or isinstance(score, bool) or score != score:
            return -math.inf
        return score  # not as a float: a whole number may have any size

    @property
    def fields(self) -> set[str]:
        """Fields of records that it reads."""
        return {self.group, *(parse_where(self.best).fields if self.best else ())}
