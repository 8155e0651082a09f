"""Find models by their names on the Hugging Face hub in its local cache; nothing is ever downloaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]*\w")
"""`owner/model`, as the hub has it."""
FILES = (".json", ".xz", ".tiktoken", ".jinja", ".py", ".model")
"""Endings of files, which no model is named after."""
OF_MODELS = (
    "tokenizer_config.json",
    "tokenizer.json",
    "config.json",
    "chat_template.jinja",
    "tekken.json",
    "tiktoken.model",
    "generation_config.json",
)
"""Files by which a model is found; each has at least one of these."""
MOST_NAMES = 5
"""Cached models that are named."""
WANTED = ('"*.json"', '"*.jinja"')
"""Files of a model that are needed here."""


def is_hub_name(name: str) -> bool:
    """Return whether a name could be that of a model on the hub, and is not an existing path."""
    return NAME.fullmatch(name) is not None and not name.endswith(FILES) and not os.path.lexists(name)


def cached_model(name: str) -> Path | None:
    """Find a model in the hub's cache: the snapshot of its main branch, or None if it is not cached."""
    if not is_hub_name(name):
        return None
    from huggingface_hub import try_to_load_from_cache  # takes its time

    for file in OF_MODELS:
        path = try_to_load_from_cache(name, file)
        if isinstance(path, str):
            return Path(path).parent
    return None


def model_folder(name: str | os.PathLike[str]) -> Path:
    """Find a model folder by its path, or by the name of a cached model."""
    text = os.fspath(name)
    return cached_model(text) or Path(text)


def not_cached(name: str) -> str:
    """Say what to do about a model that is not in the cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    include = " ".join(f"--include {pattern}" for pattern in WANTED)
    return (
        f"{name} is not in the Hugging Face cache of this machine ({HF_HUB_CACHE}), and nothing is downloaded here. "
        f"Fetch it once: hf download {name} {include}"
    )


def cached_models() -> list[str]:
    """List the names of the models in the cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = Path(HF_HUB_CACHE).glob("models--*")
    names = [folder.name.removeprefix("models--").replace("--", "/") for folder in folders]
    return sorted(name for name in names if cached_model(name) is not None)


def missing_model(name: str) -> str:
    """Say what to do about a model, or one of its files, that is not there."""
    if is_hub_name(name):
        return f"there is no such folder, and {not_cached(name)}"
    if name.startswith((".", "/", "~")):
        return f"there is no such folder or file (relative names start from {os.getcwd()})"
    cached = cached_models()
    known = f"; in the Hugging Face cache of this machine: {', '.join(cached[:MOST_NAMES])}" if cached else ""
    return f"there is no such folder here, and a model of the hub is called owner/model{known}"
