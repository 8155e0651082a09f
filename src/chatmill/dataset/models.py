"""The model that data is compiled for, given as people hold it: a folder, a tokenizer of Hugging Face, or one of ours.

A recipe names its tokenizer by a name or a path, so that workers and later proofs find it. An object that is no more
than its folder is named by that folder; another one is written to a folder of the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from chatmill.core.cache_folders import chatmill_cache
from chatmill.errors import ConfigError
from chatmill.render.registry import find_template, has_template
from chatmill.tokenizer.hf_json import tokenizer_from_json
from chatmill.tokenizer.json_file import TokenizerJson
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens
from chatmill.tokenizer.tokenizer import Tokenizer

BY_NAME = ("o200k", "bytes")
OWN_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
"""What a folder that `save_pretrained` writes is known by."""

TOKEN_FLAGS = ("special", "lstrip", "rstrip", "single_word")
"""What decides where an added token is found in a text."""


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
    """A tokenizer (or processor) of transformers: its own folder where that is the same, else a written one."""
    model = getattr(model, "tokenizer", model)  # a processor holds one
    to_str = getattr(getattr(model, "backend_tokenizer", None), "to_str", None)
    if not callable(to_str):
        raise ConfigError(
            f"a {type(model).__name__} has no tokenizer.json: it is no fast tokenizer; load it with use_fast=True"
        )
    known, raw = Path(getattr(model, "name_or_path", "") or ""), to_str().encode()
    if known.name and _is_same(known, model, raw):
        return {"tokenizer": str(known)}
    with tempfile.TemporaryDirectory() as written:
        model.save_pretrained(written)
        files = {name: (Path(written) / name).read_bytes() for name in OWN_FILES if (Path(written) / name).is_file()}
    generation = known / "generation_config.json"
    if known.name and generation.is_file():  # it says which tokens stop an answer
        files[generation.name] = generation.read_bytes()
    config = json.loads(files.get("tokenizer_config.json", b"{}"))
    if "tokenizer.json" not in files or _rules(files["tokenizer.json"], config) != _rules(raw):
        raise ConfigError(f"the {type(model).__name__} is another tokenizer once it is written: give its folder")
    folder = _cached(files, known.name or type(model).__name__)
    return {"tokenizer": str(folder)}


def _is_same(folder: Path, model: Any, raw: bytes) -> bool:
    """Whether a folder holds the tokenizer and the template that an object has now."""
    file = folder / "tokenizer.json"
    config = _decoded(folder / "tokenizer_config.json")
    if not file.is_file() or _rules(file.read_bytes(), config) != _rules(raw):
        return False
    for name in ("bos_token", "eos_token", "pad_token"):
        stated = config.get(name)
        spelled = stated.get("content") if isinstance(stated, dict) else stated
        if spelled != model.special_tokens_map.get(name):
            return False
    given = getattr(model, "chat_template", None)
    template = given.get("default") if isinstance(given, dict) else given
    found = find_template(str(folder)) if has_template(folder) else None
    return getattr(found, "text", None) == template


def _decoded(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_bytes())) if path.is_file() else {}


def _rules(raw: bytes, config: dict[str, Any] | None = None) -> tuple[Any, ...]:
    """What decides the ids that a tokenizer.json gives, with the tokens that its config adds.

    Transformers writes parts of the file anew, with another `trim_offsets`, which is about places in texts alone.
    """
    file = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    for part in ("normalizer", "pre_tokenizer"):
        rule = _without_offsets(msgspec.json.decode(file.get(part, msgspec.Raw(b"null"))))
        file[part] = msgspec.Raw(msgspec.json.encode(rule))
    written = TokenizerJson(msgspec.json.encode(file), "tokenizer")
    tokens = {token["id"]: token for token in written.added_tokens}
    for number, token in (config or {}).get("added_tokens_decoder", {}).items():
        tokens.setdefault(int(number), token)
    about = {number: tuple(bool(token.get(name)) for name in TOKEN_FLAGS) for number, token in tokens.items()}
    return written.fingerprint(), {number: token["content"] for number, token in tokens.items()}, about


def _without_offsets(rule: Any) -> Any:
    if isinstance(rule, dict):
        return {key: _without_offsets(value) for key, value in rule.items() if key != "trim_offsets"}
    return [_without_offsets(one) for one in rule] if isinstance(rule, list) else rule


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
