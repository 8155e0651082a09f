"""Finds and loads a tokenizer from a name, a file, a folder or another library's object."""

from __future__ import annotations

import lzma
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chatmill.core.gc_pause import without_collector
from chatmill.core.json_files import read_object
from chatmill.errors import TokenizerError, UnknownNameError
from chatmill.tokenizer.backends import Engine
from chatmill.tokenizer.byte_level import byte_tokenizer
from chatmill.tokenizer.hf_json import tokenizer_from_json
from chatmill.tokenizer.hub_cache import missing_model, model_folder
from chatmill.tokenizer.tiktoken_file import load_o200k
from chatmill.tokenizer.tokenizer import Tokenizer

JSON_FILES = ("tokenizer.json", "tokenizer.json.xz")
"""What a folder's tokenizer is read from; the first that is there."""
MAX_UNPACKED = 1 << 28
"""Bytes of a tokenizer.json.xz when it is unpacked; the largest known is a tenth of that."""


def load_tokenizer(
    source: Any,
    *,
    control_tokens: Sequence[str] = (),
    engine: Engine | str = Engine.FAST,
    strict_text: bool = False,
) -> Tokenizer:
    """Load a tokenizer.

    `source` is "o200k" (or its .tiktoken file), "bytes", a tokenizer.json (also .json.xz), a folder with one, the name
    of a model in the local Hugging Face cache, or a loaded `tokenizers` tokenizer, transformers tokenizer or processor.
    A Chatmill tokenizer comes back as it is. `control_tokens` that are missing are added above the vocabulary, in the
    order given. With `strict_text` no text ever becomes an added token; else text may spell those that are not special,
    as it may where the model is served. `engine="reference"` encodes with `tokenizers` or `tiktoken` alone, which is
    slow and made for proofs.
    """
    if engine not in list(Engine):
        raise UnknownNameError("engine", engine, [str(name) for name in Engine])
    with without_collector():  # vocabularies are hundreds of thousands of objects without cycles
        tokenizer = _load(source, Engine(engine), strict_text)
    return with_control_tokens(tokenizer, control_tokens) if control_tokens else tokenizer


def _load(source: Any, engine: Engine, strict_text: bool) -> Tokenizer:
    if isinstance(source, Tokenizer):
        return source
    if isinstance(source, str | os.PathLike):
        text = os.fspath(source)
        if text == "o200k":
            return load_o200k(engine=engine)
        if text == "bytes":
            return byte_tokenizer()
        return _from_path(text, engine, strict_text)
    return _from_object(source, engine, strict_text)


def _from_path(source: str, engine: Engine, strict_text: bool) -> Tokenizer:
    path = model_folder(source)
    name = Path(source).name
    if path.is_dir():
        file = next((path / file for file in JSON_FILES if (path / file).is_file()), None)
        if file is None:
            raise TokenizerError(
                f"{path} holds no tokenizer.json. It has: {', '.join(sorted(os.listdir(path))) or 'nothing'}"
            )
        return tokenizer_from_json(_read(file), name, _config(path), engine, strict_text)
    if not path.is_file():
        raise TokenizerError(
            f"no tokenizer {source!r}: {missing_model(source)}. Give the folder of your model, a tokenizer.json, "
            "o200k or bytes. Nothing is downloaded."
        )
    if path.suffix == ".tiktoken":
        return load_o200k(path, engine)
    return tokenizer_from_json(_read(path), path.parent.name or name, _config(path.parent), engine, strict_text)


def _read(path: Path) -> bytes:
    if path.suffix != ".xz":
        return path.read_bytes()
    try:
        with lzma.open(path) as file:
            raw = file.read(MAX_UNPACKED + 1)
    except (lzma.LZMAError, EOFError) as error:
        raise TokenizerError(f"{path} cannot be unpacked: {error}") from None
    if len(raw) > MAX_UNPACKED:
        raise TokenizerError(
            f"{path} is more than {MAX_UNPACKED:,} bytes when it is unpacked: no tokenizer is that large"
        )
    return raw


def _config(folder: Path) -> dict[str, Any] | None:
    path = folder / "tokenizer_config.json"
    return read_object(path, TokenizerError) if path.is_file() else None


def _from_object(source: Any, engine: Engine, strict_text: bool) -> Tokenizer:
    """Wrap a loaded `tokenizers.Tokenizer`, a fast transformers tokenizer, or a processor with one."""
    source = getattr(source, "tokenizer", source)
    inner = getattr(source, "backend_tokenizer", source)
    to_str = getattr(inner, "to_str", None)
    if not callable(to_str):
        raise TokenizerError(
            f"cannot use a {type(source).__name__} as a tokenizer: it is not a path, a fast transformers tokenizer or "
            "a tokenizers.Tokenizer"
        )
    config = None
    if inner is not source:
        config = {key: token for key, token in source.special_tokens_map.items() if isinstance(token, str)}
    name = Path(getattr(source, "name_or_path", "") or type(source).__name__).name
    return tokenizer_from_json(to_str().encode(), name, config, engine, strict_text)


def with_control_tokens(tokenizer: Any, names: Sequence[str]) -> Any:
    """Add missing control tokens to a tokenizer; they get the ids above the vocabulary, in the order given."""
    return tokenizer.with_added(names)
