"""The receipt of a build: what went in, what came out, and the hashes that prove both."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from chatmill import __version__
from chatmill.compiler.pipeline import Pipeline
from chatmill.compiler.recipe import Recipe
from chatmill.core.canonical import canonical_json
from chatmill.core.checksums import FileRecord
from chatmill.core.ledger import Ledger
from chatmill.store.episode_layout import SPLIT_MANIFEST
from chatmill.store.episode_manifest import EpisodeManifest
from chatmill.store.receipts import FORMAT, FORMAT_VERSION, sealed

if TYPE_CHECKING:
    from chatmill.compiler.chunk_job import ChunkPiece
    from chatmill.compiler.inputs import InputFile
    from chatmill.compiler.sources import SourcePlan


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


def make_manifest(
    directory: Path,
    recipe: Recipe,
    planned: SourcePlan,
    pipeline: Pipeline,
    fingerprint: str,
    splits: Mapping[str, Mapping[str, Any]],
    ledger: Ledger,
    files: Mapping[str, FileRecord],
) -> dict[str, Any]:
    """The manifest of a dataset in a folder, with these splits and files; `from` leads to the folder of its inputs."""
    tokenizer = pipeline.template.tokenizer
    pad_id = next(i for i in (tokenizer.pad_id, tokenizer.eos_id, 0) if i is not None)
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "package_version": __version__,
        "git_sha": git_sha(),
        "created_unix_s": int(time.time()),
        "fingerprint": fingerprint,
        "recipe": recipe.as_json(),
        "recipe_sha256": hashlib.sha256(canonical_json(recipe.as_json())).hexdigest(),
        "inputs": [file.as_json() for file in planned.files],
        "scanned": [
            {"mtime_ns": file.mtime_ns, "chunk_bytes": size, "from": os.path.relpath(planned.base or ".", directory)}
            for file, size in zip(planned.files, planned.chunk_bytes, strict=True)
        ],
        "tokenizer": {
            "name": tokenizer.name,
            "given_as": recipe.tokenizer,
            "fingerprint": pipeline.fingerprints["tokenizer"],
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "pad_id": pad_id,
            "control_tokens": list(pipeline.template.control_tokens) if recipe.add_control_tokens else [],
        },
        "template": {
            "name": pipeline.template.name,
            "fingerprint": pipeline.fingerprints["template"],
        },
        **({} if pipeline.template.expander is None else {"images": pipeline.template.expander.rule.as_json()}),
        "policy": {"name": pipeline.policy.name, "fingerprint": pipeline.fingerprints["policy"]},
        "splits": {name: dict(split) for name, split in splits.items()},
        "ledger": ledger.as_json(),
        "files": {path: file.to_json() for path, file in sorted(files.items())},
    }
    return sealed(content)


def split_files(root: Path, split: EpisodeManifest) -> dict[str, FileRecord]:
    """Every file of a split by its path in the dataset, as it was written; `root` holds the split's folder."""
    name = f"{split.split}/{SPLIT_MANIFEST}"
    files = {name: FileRecord.of_file(root / name)}
    for shard in split.shards:
        place = f"{split.split}/{shard.name}" if shard.name else split.split
        files |= {f"{place}/{file}": record.record for file, record in shard.files.items()}
    return files


def git_sha() -> str | None:
    """The commit of the checkout that the build runs in; None outside one."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
