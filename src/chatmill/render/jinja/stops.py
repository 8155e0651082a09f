"""Stop tokens that a model's files do not name: a small table of families, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


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
