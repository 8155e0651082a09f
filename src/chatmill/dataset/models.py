"""The model that data is compiled for, given as people hold it: a folder, a tokenizer of Hugging Face, or one of ours.

A recipe names its tokenizer by a name or a path, so that workers and later proofs find it. An object is written to a
folder of the user's cache, which is named by its contents.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from chatmill.core.cache_folders import chatmill_cache
from chatmill.errors import ConfigError
from chatmill.render.registry import find_template
from chatmill.tokenizer.hf_json import tokenizer_from_json
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens
from chatmill.tokenizer.tokenizer import Tokenizer

BY_NAME = ("o200k", "bytes")
OWN_FILES = ("tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
"""What `save_pretrained` writes next to the vocabulary."""
MODEL_FILES = ("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json")
"""What says which ids have an embedding, which tokens stop an answer, and how many tokens a picture takes."""


def named_model(model: Any, template: str | None = None) -> dict[str, Any]:
    """The keys of a recipe for a model: a folder or file, a transformers tokenizer, or a Chatmill tokenizer.

    They are `tokenizer`, and `add_control_tokens` for one that holds control tokens of the template above its
    vocabulary.
    """
    if model is None:
        raise ConfigError(
            "model is missing: give a model folder, a loaded tokenizer, or a vocabulary ('o200k') with template="
        )
    if isinstance(model, str | os.PathLike):
        text = os.fspath(model)
        if text not in BY_NAME and not os.path.exists(text):
            load_tokenizer(text)  # says what is missing
        return {"tokenizer": text}
    if isinstance(model, Tokenizer):
        return _own(model, template)
    if callable(getattr(model, "save_pretrained", None)):
        return _pretrained(model)
    if callable(getattr(model, "to_str", None)):  # tokenizers.Tokenizer
        return {"tokenizer": str(_cached({"tokenizer.json": model.to_str().encode()}, "tokenizer"))}
    raise ConfigError(
        f"a {type(model).__name__} is no model: give a folder with a tokenizer.json, a fast tokenizer of "
        "transformers, or a tokenizer of chatmill.load_tokenizer"
    )


def _pretrained(model: Any) -> dict[str, Any]:
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
    return {"tokenizer": str(_cached(files, folder.name or type(model).__name__))}


def _own(tokenizer: Tokenizer, template: str | None) -> dict[str, Any]:
    """A Chatmill tokenizer by its name or the file it came from, with the control tokens of the template or without."""
    names = [name for name in BY_NAME if name == tokenizer.name]
    origin = tokenizer.origin
    if origin is not None and origin.func is tokenizer_from_json:
        raw, name, config = origin.args[:3]
        files = {"tokenizer.json": raw}
        if config is not None:
            files["tokenizer_config.json"] = json.dumps(config, sort_keys=True).encode()
        names.append(str(_cached(files, name)))
    for name in names:
        plain = load_tokenizer(name)
        if plain.fingerprint == tokenizer.fingerprint:
            return {"tokenizer": name}
        if not template:
            continue
        grown = with_control_tokens(plain, find_template(template).control_tokens)
        if grown.fingerprint == tokenizer.fingerprint:
            return {"tokenizer": name, "add_control_tokens": True}
    raise ConfigError(
        f"the tokenizer {tokenizer.name!r} cannot be named in a recipe: it has control tokens that neither its files "
        "nor the template have. Give the model's folder, with template= and add_control_tokens=True for added tokens"
    )


def _cached(files: dict[str, bytes], name: str) -> Path:
    """The folder of the cache that holds exactly these files; the same files always have the same folder."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file}\0{len(files[file])}\0".encode() + files[file])
    folder = chatmill_cache() / "tokenizers" / digest.hexdigest()[:16] / (name or "tokenizer")
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        for file, data in files.items():
            (temporary / file).write_bytes(data)
        temporary.chmod(0o755)
        temporary.rename(folder)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        if not folder.is_dir():  # else another process was first
            raise
    return folder
