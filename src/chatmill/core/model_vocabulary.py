"""How many ids a model knows: the rows of its embedding, or `vocab_size` of its config."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatmill.core.json_files import read_object
from chatmill.errors import ConfigError

CONFIG = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVocabulary:
    """The ids that a model has embeddings for: 0 up to `size - 1`."""

    size: int
    found_in: str
    """The file that says so, or what was asked."""


def model_vocabulary(model: Any) -> ModelVocabulary | None:
    """What a model folder (or a file in one), a loaded model, its config or a number says; None if nothing does."""
    if isinstance(model, int) and not isinstance(model, bool):
        return ModelVocabulary(size=model, found_in="the number that was given")
    if not isinstance(model, str | os.PathLike):
        return _of_object(model)
    path = Path(model)
    folder = path if path.is_dir() else path.parent if path.is_file() else None
    if folder is None or not (folder / CONFIG).is_file():
        return None
    return _of_config(folder / CONFIG)


def _of_object(model: Any) -> ModelVocabulary | None:
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    weight = getattr(embedding, "weight", None)
    if weight is not None:
        return ModelVocabulary(size=len(weight), found_in=f"the embedding of {type(model).__name__}")
    config = getattr(model, "config", model)
    size = getattr(config, "vocab_size", None) or getattr(getattr(config, "text_config", None), "vocab_size", None)
    return None if size is None else ModelVocabulary(size=int(size), found_in=type(config).__name__)


def _of_config(path: Path) -> ModelVocabulary | None:
    config = read_object(path, ConfigError)
    for part in (config, config.get("text_config")):
        size = part.get("vocab_size") if isinstance(part, dict) else None
        if isinstance(size, int) and size > 0:
            return ModelVocabulary(size=size, found_in=str(path))
    return None


def refuse_beyond(largest: int, vocabulary: ModelVocabulary, subject: str, way_out: str) -> None:
    """Raise `ConfigError` if the largest id has no embedding."""
    if largest >= vocabulary.size:
        raise ConfigError(
            f"{subject} the id {largest:,}, and the model has {vocabulary.size:,} ids ({vocabulary.found_in}): it "
            f"would have no embedding. {way_out}"
        )
