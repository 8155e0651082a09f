"""A recipe as a worker has it: checked by the driver, and without the library that checks, which is slow to import."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from chatmill.pack.overflow import Overflow
from chatmill.render.jinja.options import Expand, Thinking, Traces, Unproved


class OnError(StrEnum):
    """What a record does that cannot be used."""

    FAIL = "fail"
    """It ends the build."""
    QUARANTINE = "quarantine"
    """It goes to rejected.jsonl with its place and reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPacking:
    """See `chatmill.compiler.recipe.Packing`."""

    max_length: int | None
    overflow: Overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSplit:
    """See `chatmill.compiler.recipe.Split`."""

    val_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRecipe:
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
    data = json.loads(text)
    packing = data["packing"]
    return PlainRecipe(
        packing=PlainPacking(max_length=packing["max_length"], overflow=Overflow(packing["overflow"])),
        split=PlainSplit(val_fraction=data["split"]["val_fraction"]),
        on_error=OnError(data["on_error"]),
        date=None if data["date"] is None else datetime.date.fromisoformat(data["date"]),
        thinking=Thinking(data["thinking"]),
        expand=Expand(data["expand"]),
        unproved=Unproved(data["unproved"]),
        traces=Traces(data["traces"]),
        **{name: data[name] for name in _AS_THEY_ARE},
    )


_AS_THEY_ARE = (
    *("tokenizer", "pattern", "add_control_tokens", "vocab_size", "template", "template_options", "strict_text"),
    *("policy", "keep_kinds", "preferences"),
)
