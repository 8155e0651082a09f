"""A recipe as a worker has it: checked by the driver, and without the library that checks, which is slow to import."""

from __future__ import annotations

import datetime
from enum import StrEnum
from typing import Any

import msgspec

from chatmill.pack.overflow import Overflow
from chatmill.render.jinja.options import Expand, Thinking, Traces, Unproved


class OnError(StrEnum):
    """What a record does that cannot be used."""

    FAIL = "fail"
    """It ends the build."""
    QUARANTINE = "quarantine"
    """It goes to rejected.jsonl with its place and reason."""


class PlainPacking(msgspec.Struct, frozen=True):
    """See `chatmill.compiler.recipe.Packing`."""

    max_length: int | None
    overflow: Overflow


class PlainSplit(msgspec.Struct, frozen=True):
    """See `chatmill.compiler.recipe.SplitOptions`."""

    val_fraction: float


class PlainRecipe(msgspec.Struct, frozen=True):
    """Those parts of `chatmill.compiler.recipe.Recipe` that decide the work of a chunk, under the same names."""

    tokenizer: str
    pattern: str | None
    add_control_tokens: bool
    vocab_size: int | None
    template: str
    template_options: dict[str, Any]
    date: datetime.date | None
    thinking: Thinking
    expand: Expand
    unproved: Unproved
    traces: Traces
    strict_text: bool
    policy: str | None
    packing: PlainPacking
    split: PlainSplit
    keep_kinds: bool
    on_error: OnError
    preferences: str | None


def plain_recipe(text: str) -> PlainRecipe:
    """The JSON of a checked recipe with every default written out, as `Recipe.as_json` gives it."""
    return msgspec.json.decode(text, type=PlainRecipe)
