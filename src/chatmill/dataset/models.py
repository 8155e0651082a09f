"""The model that data is compiled for, given as people hold it: a folder, or a tokenizer of Hugging Face.

A recipe names its tokenizer by a name or a path, so that workers and later proofs find it. An object is written to a
folder of the user's cache, which is named by its contents.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from chatmill.core.cache_folders import chatmill_cache
from chatmill.core.publish import whole_folder
from chatmill.errors import ChatmillError, ConfigError
from chatmill.tokenizer.load import load_tokenizer

BY_NAME = ("o200k", "bytes")
OWN_FILES = ("tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
"""What `save_pretrained` writes next to the vocabulary."""
MODEL_FILES = ("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json")
"""What says which ids have an embedding, which tokens stop an answer, and how many tokens a picture takes."""


def named_model(model: Any) -> str:
    """The tokenizer of a recipe for a model: a folder, a file or a name, or a tokenizer object of Hugging Face."""
    if model is None:
        raise ConfigError(
            "model is missing: give a model folder, a transformers tokenizer, or a vocabulary ('o200k') with template="
        )
    if isinstance(model, str | os.PathLike):
        text = os.fspath(model)
        if text not in BY_NAME and not os.path.exists(text):
            load_tokenizer(text)  # says what is missing
        return text
    if callable(getattr(model, "save_pretrained", None)):
        return _pretrained(model)
    if callable(getattr(model, "to_str", None)):  # tokenizers.Tokenizer
        return str(_cached({"tokenizer.json": model.to_str().encode()}, "tokenizer"))
    raise ConfigError(
        f"a {type(model).__name__} is no model: give a folder with a tokenizer.json (what load_tokenizer takes), or a "
        "fast tokenizer of transformers"
    )


def _pretrained(model: Any) -> str:
    """Save a transformers tokenizer (or processor) as it is now, with the other files of its folder."""
    model = getattr(model, "tokenizer", model)  # a processor holds one
    to_str = getattr(getattr(model, "backend_tokenizer", None), "to_str", None)
    if not callable(to_str):
        raise ConfigError(
            f"a {type(model).__name__} has no tokenizer.json: it is no fast tokenizer; load it with use_fast=True"
        )
    folder = Path(getattr(model, "name_or_path", "") or "")
    paths = {name: folder / name for name in MODEL_FILES if folder.name and (folder / name).is_file()}
    with tempfile.TemporaryDirectory() as written:
        model.save_pretrained(written)
        paths |= {name: Path(written) / name for name in OWN_FILES if (Path(written) / name).is_file()}
        files = {name: path.read_bytes() for name, path in paths.items()}
    files["tokenizer.json"] = to_str().encode()
    return str(_cached(files, folder.name or type(model).__name__))


def _cached(files: dict[str, bytes], name: str) -> Path:
    """Return the folder of the cache that holds exactly these files; the same files always have the same folder."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file}\0{len(files[file])}\0".encode() + files[file])
    folder = chatmill_cache() / "tokenizers" / digest.hexdigest()[:16] / (name or "tokenizer")
    if folder.is_dir():
        return folder
    try:
        with whole_folder(folder) as temporary:
            for file, data in files.items():
                (temporary / file).write_bytes(data)
    except (ChatmillError, OSError):
        if not folder.is_dir():  # else another process was first
            raise
    return folder
