"""Whether every id of a dataset has an embedding in the model that it is for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chatmill.core.model_vocabulary import ModelVocabulary, model_vocabulary, refuse_beyond
from chatmill.errors import ConfigError
from chatmill.store.named_paths import find_first
from chatmill.store.split import Split

WAY_OUT = (
    "Build with the model's tokenizer and its own template. If its embedding is to grow, name the new size in the "
    "build (--set vocab_size=N), or give it here: model=N (--model N)"
)


def refuse_ids_beyond(split: Split, about: Mapping[str, Any], model: Any = None, home: Path | None = None) -> None:
    """Refuse an id without an embedding. Tokens are read only where the tokenizer may have more ids than the model.

    Args:
        split: The tokens.
        about: The manifest of the dataset.
        model: A folder, a loaded model or config, or the number of embeddings. Default: that of the build.
        home: Folder of the dataset. A relative path in the manifest is looked up from there, too.

    Raises:
        ConfigError: The model has no embedding for an id.
    """
    vocabulary = _vocabulary(about, model, home)
    size = about.get("tokenizer", {}).get("vocab_size")
    if vocabulary is None or (size is not None and size <= vocabulary.size):
        return
    largest = max(int(split.shard_columns(number)[0].max(initial=0)) for number in range(len(split.shards)))
    refuse_beyond(largest, vocabulary, "the dataset has", WAY_OUT)


def _vocabulary(about: Mapping[str, Any], model: Any, home: Path | None) -> ModelVocabulary | None:
    if model is None:
        recipe = about.get("recipe", {})
        named = recipe.get("vocab_size") or recipe.get("tokenizer")
        if isinstance(named, str):
            named = find_first(named, home)
        return None if named is None else model_vocabulary(named)
    if isinstance(model, str) and model.isdigit():
        model = int(model)
    vocabulary = model_vocabulary(model)
    if vocabulary is None:
        raise ConfigError(f"{model!r} does not say how many ids the model has: give a folder with config.json")
    return vocabulary
