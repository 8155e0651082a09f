"""What a training run must know of its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatmill.cli.train_recipe import TrainRecipe


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVocabulary:
    """What a run must know of its tokenizer; nothing is loaded where a manifest says it."""

    size: int | None
    pad_id: int | None
    fingerprint: str | None
    notes: dict[str, Any]
    """How `chatmill sample` finds tokenizer and template again."""


def vocabulary_of(recipe: TrainRecipe, name: str) -> RunVocabulary:
    """Of the tokenizer that a recipe names."""
    tokenizer = load_for(name, recipe.template, add_control_tokens=recipe.add_control_tokens)
    notes = {
        "tokenizer": findable(name),
        "template": recipe.template,
        "add_control_tokens": recipe.add_control_tokens,
    }
    pad_id = tokenizer.pad_id if tokenizer.eos_id is None else tokenizer.eos_id
    return RunVocabulary(size=tokenizer.vocab_size, pad_id=pad_id, fingerprint=tokenizer.fingerprint, notes=notes)


def load_for(name: str, template: str | None, *, add_control_tokens: bool, pattern: str | None = None) -> Any:
    """A tokenizer, with the template's control tokens where they are to be added."""
    from chatmill.render.registry import find_template
    from chatmill.tokenizer.load import load_tokenizer, with_control_tokens

    tokenizer = load_tokenizer(name, pattern=pattern)
    if add_control_tokens and template is not None:
        return with_control_tokens(tokenizer, find_template(template).control_tokens)
    return tokenizer


def findable(name: str) -> str:
    """A path as one that holds in any folder; other names as they are."""
    return str(Path(name).resolve()) if Path(name).exists() else name
