"""The tokens that end an answer, and a small table of those that a model's files do not name; marks of reasoning."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

THINKING = {
    "<think>": "</think>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|think|>": "<|/think|>",
}
"""The marks that open reasoning, and those that close it."""
BLOCKS = {**THINKING, "<|channel>thought": "<channel|>"}
"""The same, and those between which a prompt has nothing where no reasoning is wanted."""
REASONING_MARK = re.compile("think|channel|final response", re.IGNORECASE)
"""What the marks around reasoning inside a content have in common: `</think>`, `[/THINK]`, `<channel|>`, Apriel's."""


@lru_cache(maxsize=256)
def any_of(names: tuple[str, ...]) -> re.Pattern[str]:
    """Return what finds any of some texts, the longest one first; nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")


class StopTokens(NamedTuple):
    """The tokens that end an answer."""

    names: tuple[str, ...]
    in_history: tuple[str, ...] = ()
    """What a template writes in the place of a stop once messages follow, and no server stops at."""

    def pattern(self) -> re.Pattern[str]:
        """Finds a stop token."""
        return any_of(self.names)

    def any_end(self) -> re.Pattern[str]:
        """Finds what ends an answer in a conversation that goes on: a stop, or what stands in its place."""
        return any_of((*self.names, *self.in_history))


class StopFamily(NamedTuple):
    """The stops of a family of templates."""

    name: str
    marks: tuple[str, ...]
    """A template that holds all of these is of the family."""
    stops: tuple[str, ...]
    in_history: tuple[str, ...]
    source: str


FAMILIES = (
    StopFamily(
        "gpt-oss",
        ("<|return|>", "<|call|>"),
        ("<|return|>", "<|call|>"),
        ("<|end|>",),
        "openai-harmony: a model ends with <|return|> or <|call|>; history has <|end|> for <|return|>",
    ),
    StopFamily(
        "GLM",
        ("<|observation|>", "<|user|>", "<|assistant|>"),
        ("<|user|>", "<|observation|>"),
        (),
        "generation_config.json of GLM-4.5: <|endoftext|>, <|user|>, <|observation|>",
    ),
    StopFamily(
        "Gemma 4",
        ("<turn|>", "<|tool_response>", "<|tool_call>"),
        ("<turn|>", "<|tool_response>"),
        (),
        "generation_config.json of Gemma 4: <eos>, <turn|>, <|tool_response>",
    ),
    StopFamily(
        "Cohere 2",
        ("<|END_OF_TURN_TOKEN|>",),
        ("<|END_OF_TURN_TOKEN|>",),
        (),
        "generation_config.json of Command R7B",
    ),
)


def families_of(text: str) -> list[StopFamily]:
    """Return the families that a template is of."""
    return [family for family in FAMILIES if all(mark in text for mark in family.marks)]
