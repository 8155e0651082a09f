"""Finds the o200k vocabulary file: explicit path, environment, project folder, then the copy in the package."""

from __future__ import annotations

import gzip
import hashlib
import os
import tempfile
from functools import cache
from importlib import resources
from pathlib import Path

from chatmill.core.cache_folders import chatmill_cache
from chatmill.core.publish import whole_file
from chatmill.errors import TokenizerError

O200K_FILE = "o200k_base.tiktoken"
O200K_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
PROJECT_COPY = Path("data/tokenizer") / O200K_FILE


def find_o200k(path: str | os.PathLike[str] | None = None) -> Path:
    """Find the vocabulary file and check its hash; nothing is downloaded.

    Order: `path`; `O200K_HARMONY_VOCAB_PATH` (a file); `TIKTOKEN_ENCODINGS_BASE` (a folder);
    `data/tokenizer/o200k_base.tiktoken`; the bundled copy, unpacked into the user's cache.
    """
    named = [
        ("the given path", path),
        ("O200K_HARMONY_VOCAB_PATH", os.environ.get("O200K_HARMONY_VOCAB_PATH")),
        ("TIKTOKEN_ENCODINGS_BASE", _in_folder(os.environ.get("TIKTOKEN_ENCODINGS_BASE"))),
    ]
    for origin, candidate in named:
        if candidate:
            file = Path(candidate)
            if not file.is_file():
                raise TokenizerError(
                    f"{origin} names {file}, and there is no such file. Correct it, or unset it to use the copy that "
                    "comes with chatmill."
                )
            return _checked(file, origin)
    if PROJECT_COPY.is_file():
        return _checked(PROJECT_COPY, str(PROJECT_COPY))
    return bundled_o200k()


def _in_folder(folder: str | None) -> Path | None:
    return Path(folder) / O200K_FILE if folder else None


def _checked(path: Path, origin: str) -> Path:
    actual = hashlib.sha256(path.read_bytes()).hexdigest()
    if actual != O200K_SHA256:
        raise TokenizerError(
            f"{path} (from {origin}) is not the o200k vocabulary: its sha256 is {actual}, expected {O200K_SHA256}. "
            "For other vocabularies give the tokenizer.json"
        )
    return path


@cache
def bundled_o200k() -> Path:
    """Unpack the bundled copy, once per machine."""
    folder = chatmill_cache() / O200K_SHA256[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="chatmill-o200k-"))
    target = folder / O200K_FILE
    if target.is_file() and hashlib.sha256(target.read_bytes()).hexdigest() == O200K_SHA256:
        return target
    raw = gzip.decompress(resources.files("chatmill").joinpath(f"data/{O200K_FILE}.gz").read_bytes())
    with whole_file(target) as partial:
        partial.write_bytes(raw)
    return _checked(target, "the package")
