"""What a manifest proves: fingerprints of the build and of its chunks, the hashes of files, and the commit."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chatmill import __version__
from chatmill.compiler.recipe import Recipe
from chatmill.core.canonical import canonical_json
from chatmill.core.checksums import FileRecord
from chatmill.core.hashed_fields import hashed_fields
from chatmill.read.agents.branches import AgentOptions
from chatmill.store.episode_layout import SPLIT_MANIFEST
from chatmill.store.episode_manifest import EpisodeManifest
from chatmill.store.receipts import FORMAT_VERSION

if TYPE_CHECKING:
    from chatmill.compiler.chunk_job import ChunkPiece
    from chatmill.compiler.inputs import InputFile


OF_RECIPE = {
    "gates": "they decide whether a dataset is published, not what is in it",
    "on_error": "a build that ends with an error publishes nothing",
    "vocab_size": "it is compared with ids, and changes none",
    "store": "it says how a store is asked, not what is written there",
    "tokenizer": "its vocabulary and rules are hashed, wherever they come from",
    "sources": "each is hashed by itself",
}
"""Keys of a recipe that are not hashed as they are, with the reason; all others are."""
OF_CHUNKS = OF_RECIPE | {
    "shard_bytes": "the range of a chunk says what became of it",
    "pack": "rows are planned when all chunks are there, and stored in none of them",
}
"""The same for the fingerprints of chunks."""
OF_SOURCE = {"path": "the files are hashed, and their names"}
"""Keys of a source that are not hashed for a build."""
OF_PIECE_SOURCE = {
    "path": "the range names its file",
    "shape": "the range says which one was given or found",
    "name": "the range has it",
    "max_records": "the piece says how many records are left of its range",
}
"""Keys of a source that are not hashed for a chunk."""
OF_INPUT = {
    "bytes": "the hash says how many there are",
    "lines": "they are counted from the bytes",
    "records": "they are counted from the bytes",
    "mtime_ns": "the same bytes may be written again",
}
"""What is known of an input and not hashed."""
OF_RANGE = {
    "data": "a copy has the bytes of its file, wherever it lies",
    "far": "the same bytes may be in another store",
    "bytes": "an estimate, for the progress that is shown",
    "file_bytes": "what comes after the range is not read",
    "file_mtime_ns": "the same bytes may be written again",
}
"""What is known of a range of a file and not hashed."""
OF_PIECE = {"range": "hashed by itself", "rules": "hashed by themselves"}


def build_fingerprint(
    recipe: Recipe,
    inputs: Sequence[InputFile],
    fingerprints: Mapping[str, str],
    agents: Sequence[AgentOptions] = (),
) -> str:
    """sha256 over everything that decides the bytes: gates do not; contents, options and the names of the files do.

    A record without an id is known by its place, which begins with the file's name as it was given. `agents` has the
    contents of the files with tools and system prompts that the sources name, for each input.
    """
    options = recipe.as_json()
    content = {
        "format_version": FORMAT_VERSION,
        "package": __version__,
        "options": _without(options, OF_RECIPE),
        "sources": [_without(source, OF_SOURCE) for source in options["sources"]],
        "inputs": [hashed_fields(file, OF_INPUT) for file in inputs],
        "agents": [agent.as_json() for agent in agents],
        **fingerprints,
    }
    return hashlib.sha256(canonical_json(content)).hexdigest()


def chunk_fingerprints(
    recipe: Recipe, chunks: Sequence[Sequence[ChunkPiece]], fingerprints: Mapping[str, str]
) -> list[str]:
    """Hash (SHA-256), for each chunk, everything that decides the bytes of its shards and receipt."""
    options = _without(recipe.as_json(), OF_CHUNKS)
    common = {"format_version": FORMAT_VERSION, "package": __version__, "options": options, **fingerprints}
    shared = hashlib.sha256(canonical_json(common))
    digests = []
    for pieces in chunks:
        digest = shared.copy()
        for piece in pieces:
            rules = hashed_fields(piece.rules, OF_PIECE_SOURCE)
            content = {"range": hashed_fields(piece.range, OF_RANGE), "rules": rules, **hashed_fields(piece, OF_PIECE)}
            digest.update(canonical_json(content))
        digests.append(digest.hexdigest())
    return digests


def _without(values: Mapping[str, Any], left_out: Mapping[str, str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in left_out}


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
