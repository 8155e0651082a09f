"""The tokens that end an answer, and a small table of those that a model's files do not name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple


@lru_cache(maxsize=256)
def _any_of(names: tuple[str, ...]) -> re.Pattern[str] | None:
    ordered = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


class StopTokens(NamedTuple):
    """The tokens that end an answer."""

    names: tuple[str, ...]
    same: Mapping[str, tuple[str, ...]] = {}
    """Stops that count as the same one: what F may have in the place of A(i)'s stop."""

    def pattern(self) -> re.Pattern[str] | None:
        """Finds a stop token; the longest one first."""
        return _any_of(self.names)

    def are_same(self, one: str, other: str) -> bool:
        """Whether two stops end an answer in the same way."""
        return one == other or other in self.same.get(one, ())


class StopFamily(NamedTuple):
    """The stops of a family of templates."""

    name: str
    marks: tuple[str, ...]
    """A template that holds all of these is of the family."""
    stops: tuple[str, ...]
    same: Mapping[str, tuple[str, ...]]
    source: str


FAMILIES = (
    StopFamily(
        "gpt-oss",
        ("<|return|>", "<|call|>"),
        ("<|return|>", "<|call|>", "<|end|>"),
        {"<|return|>": ("<|end|>",), "<|end|>": ("<|return|>",)},
        "openai-harmony: a model ends with <|return|> or <|call|>; history has <|end|> for <|return|>",
    ),
    StopFamily(
        "GLM",
        ("<|observation|>", "<|user|>", "<|assistant|>"),
        ("<|user|>", "<|observation|>"),
        {},
        "generation_config.json of GLM-4.5: <|endoftext|>, <|user|>, <|observation|>",
    ),
    StopFamily(
        "Cohere 2",
        ("<|END_OF_TURN_TOKEN|>",),
        ("<|END_OF_TURN_TOKEN|>",),
        {},
        "generation_config.json of Command R7B",
    ),
)


def families_of(text: str) -> list[StopFamily]:
    """The families that a template is of."""
    return [family for family in FAMILIES if all(mark in text for mark in family.marks)]
