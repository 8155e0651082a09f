"""Models by their names on the Hugging Face hub, looked up in the local cache; nothing is ever downloaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

from chatmill.core.cache_folders import user_cache

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]*\w")
"""`owner/model`, as the hub has it."""
FILES = (".json", ".xz", ".tiktoken", ".jinja", ".py", ".model")
"""Endings of files, which no model is named after."""
WANTED = ('"*.json"', '"*.jinja"')
"""Files of a model that are needed here."""


def is_hub_name(name: str) -> bool:
    """Return whether a name could be that of a model on the hub, and is not an existing path."""
    return NAME.fullmatch(name) is not None and not name.endswith(FILES) and not os.path.lexists(name)


def hub_folder() -> Path:
    """Find the folder in which `huggingface_hub` keeps models."""
    folder = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if folder:
        return Path(folder).expanduser()
    return Path(os.environ.get("HF_HOME") or user_cache() / "huggingface").expanduser() / "hub"


def cached_model(name: str) -> Path | None:
    """Find a model in the cache: the snapshot of its main branch, or the only one; None if it is not cached."""
    if not is_hub_name(name):
        return None
    model = hub_folder() / f"models--{name.replace('/', '--')}"
    try:
        commit = (model / "refs" / "main").read_text().strip()
    except OSError:
        states = sorted(os.listdir(model / "snapshots")) if (model / "snapshots").is_dir() else []
        commit = states[0] if len(states) == 1 else ""
    folder = model / "snapshots" / commit
    return folder if commit and folder.is_dir() else None


def model_folder(name: str | os.PathLike[str]) -> Path:
    """Find a model folder by its path, or by the name of a cached model."""
    text = os.fspath(name)
    return cached_model(text) or Path(text)


def not_cached(name: str) -> str:
    """Say what to do about a model that is not in the cache."""
    include = " ".join(f"--include {pattern}" for pattern in WANTED)
    return (
        f"{name} is not in the Hugging Face cache of this machine ({hub_folder()}), and nothing is downloaded here. "
        f"Fetch it once: hf download {name} {include}"
    )
