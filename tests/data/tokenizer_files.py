"""Unpacks the real tokenizers of the tests once, into a folder that any library can open, and loads them once."""

from __future__ import annotations

import hashlib
import lzma
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from chatmill.tokenizer.load import load_tokenizer
from chatmill.tokenizer.tokenizer import Tokenizer

HERE = Path(__file__).parent / "tokenizers"
BASE_VOCABULARY = {"qwen3_base": "qwen3"}
"""Folders that hold a config only and share another folder's vocabulary."""


@cache
def loaded(name: str) -> Tokenizer:
    """The tokenizer itself, which nothing changes: loading one takes a second."""
    return load_tokenizer(name if name == "o200k" else unpacked(name))


@cache
def unpacked(name: str) -> Path:
    """A folder with `tokenizer.json` and, where there is one, `tokenizer_config.json`."""
    source = HERE / BASE_VOCABULARY.get(name, name)
    packed = source / "tokenizer.json.xz"
    raw = packed.read_bytes() if packed.exists() else (source / "tokenizer.json").read_bytes()
    config = HERE / name / "tokenizer_config.json"
    key = hashlib.sha256(raw + (config.read_bytes() if config.exists() else b"")).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"chatmill-test-tokenizers-{os.getuid()}" / f"{name}-{key}"
    if target.exists():
        return target
    target.parent.mkdir(exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=target.parent))
    (temporary / "tokenizer.json").write_bytes(lzma.decompress(raw) if packed.exists() else raw)
    if config.exists():
        shutil.copy(config, temporary / "tokenizer_config.json")
    try:
        temporary.rename(target)
    except OSError:  # another worker was first
        shutil.rmtree(temporary)
    return target
