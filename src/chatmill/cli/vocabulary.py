"""What a training run must know of its tokenizer, and whether its model was made for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatmill.cli.train_recipe import TrainRecipe
from chatmill.errors import ConfigError, TokenizerError
from chatmill.render.registry import find_template
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens

FILES = ("tokenizer.json", "tokenizer.json.xz")


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
    tokenizer = load_tokenizer(name, pattern=pattern)
    if add_control_tokens and template is not None:
        return with_control_tokens(tokenizer, find_template(template).control_tokens)
    return tokenizer


def findable(name: str) -> str:
    """A path as one that holds in any folder; other names as they are."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def refuse_other_tokenizer(folder: Path, dataset: RunVocabulary) -> None:
    """`ConfigError` where the tokenizer of a model folder, or of a run, gives other ids than that of the dataset.

    Nothing is compared where one of the two cannot be known. Control tokens that only one of them has are no
    difference: embeddings that are missing for them are counted elsewhere.
    """
    own = _of_model(folder)
    if own is None or dataset.fingerprint is None or own.fingerprint == dataset.fingerprint:
        return
    theirs = _named_by(dataset.notes)
    if theirs is None or (different := difference(own, theirs)) is not None:
        name = dataset.notes.get("tokenizer") or "another tokenizer"
        why = "their fingerprints differ" if theirs is None else different
        raise ConfigError(
            f"the model {folder} has a tokenizer of its own, and the dataset was built with {name}, which gives other "
            f"ids: {why}. Build the dataset again with `-t {folder}`, or, where the model is to learn the other "
            "tokenizer, set model.check_tokenizer to false"
        )


def difference(own: Any, other: Any) -> str | None:
    """The first thing that makes two tokenizers give different ids, in words; None where there is none."""
    if own.text_fingerprint != other.text_fingerprint:
        return f"vocabulary or rules differ ({own.vocab_size:,} and {other.vocab_size:,} ids)"
    names = {token_id: name for name, token_id in own.control_ids.items()}
    for name, token_id in other.control_ids.items():
        if own.control_ids.get(name, token_id) != token_id:
            return f"{name!r} is {own.control_ids[name]} in the one and {token_id} in the other"
        if names.get(token_id, name) != name:
            return f"id {token_id} is {names[token_id]!r} in the one and {name!r} in the other"
    return None


def _of_model(folder: Path) -> Any | None:
    """The tokenizer in a folder of transformers, or the one that a checkpoint names."""
    if any((folder / name).is_file() for name in FILES):
        return load_for(str(folder), None, add_control_tokens=False)
    try:
        notes = json.loads((folder / "state.json").read_bytes())["notes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return _named_by(notes)


def _named_by(notes: Mapping[str, Any]) -> Any | None:
    """The tokenizer that notes name, with what was added to it; None where it is no longer there."""
    if not isinstance(notes.get("tokenizer"), str):
        return None
    added = bool(notes.get("add_control_tokens"))
    try:
        return load_for(notes["tokenizer"], notes.get("template"), add_control_tokens=added,
                        pattern=notes.get("pattern"))  # fmt: skip
    except (TokenizerError, ConfigError):
        return None
