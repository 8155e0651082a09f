"""What a manifest proves: fingerprints of the build and of its chunks, the hashes of files, and the commit."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from chatmill import __version__
from chatmill.compiler.recipe import Recipe
from chatmill.core.canonical import canonical_json
from chatmill.core.checksums import FileRecord
from chatmill.store.episode_layout import SPLIT_MANIFEST
from chatmill.store.episode_manifest import EpisodeManifest
from chatmill.store.receipts import FORMAT_VERSION

if TYPE_CHECKING:
    from chatmill.compiler.chunk_job import ChunkPiece
    from chatmill.compiler.inputs import InputFile


NO_BYTES = ("gates", "vocab_size", "tokenizer", "sources", "on_error")
"""Keys of a recipe that change no byte of what can be used, or whose content is hashed instead."""


def build_fingerprint(recipe: Recipe, inputs: Sequence[InputFile], fingerprints: Mapping[str, str]) -> str:
    """sha256 over everything that decides the bytes: gates do not; contents, options and the names of the files do.

    A record without an id is known by its place, which begins with the file's name as it was given.
    """
    options = {key: value for key, value in recipe.as_json().items() if key not in NO_BYTES}
    sources = [{key: value for key, value in source.items() if key != "path"} for source in recipe.as_json()["sources"]]
    content = {
        "format_version": FORMAT_VERSION,
        "package": __version__,
        "options": options,
        "sources": sources,
        "inputs": [
            {"path": file.path, "xxh128": file.xxh128, "source": file.source, "shape": file.shape} for file in inputs
        ],
        **fingerprints,
    }
    return hashlib.sha256(canonical_json(content)).hexdigest()


def chunk_fingerprints(
    recipe: Recipe, chunks: Sequence[Sequence[ChunkPiece]], fingerprints: Mapping[str, str]
) -> list[str]:
    """Hash (SHA-256), for each chunk, everything that decides the bytes of its shards and receipt."""
    options = {key: value for key, value in recipe.as_json().items() if key not in (*NO_BYTES, "shard_bytes", "pack")}
    common = {"format_version": FORMAT_VERSION, "package": __version__, "options": options, **fingerprints}
    shared = hashlib.sha256(canonical_json(common))
    digests = []
    for pieces in chunks:
        digest = shared.copy()
        for piece in pieces:
            part = piece.range
            place = [part.path, part.source, part.shape, part.kind, part.start, part.stop, part.first, part.count]
            rules = msgspec.to_builtins(piece.rules)
            used = [rules[name] for name in ("weight", "where", "pick", "history")]
            digest.update(canonical_json([*place, part.digest, piece.max_records, piece.skip, *used]))
        digests.append(digest.hexdigest())
    return digests


def split_files(root: Path, split: EpisodeManifest) -> dict[str, FileRecord]:
    """Every file of a split by its path in the dataset, as it was written; `root` holds the split's folder."""
    name = f"{split.split}/{SPLIT_MANIFEST}"
    files = {name: FileRecord.of_file(root / name)}
    for shard in split.shards:
        place = f"{split.split}/{shard.name}" if shard.name else split.split
        files |= {f"{place}/{file}": record.record for file, record in shard.files.items()}
    return files


def git_sha() -> str | None:
    """Return the commit of the checkout that the build runs in; None outside one."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
