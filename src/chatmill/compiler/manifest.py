"""The receipt of a build: what went in, what came out, and the hashes that prove both."""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chatmill import __version__
from chatmill.compiler.chunk_job import REJECTED
from chatmill.compiler.ledger import Ledger
from chatmill.compiler.pipeline import Pipeline
from chatmill.compiler.publish import canonical_json, sha256_file
from chatmill.compiler.recipe import Recipe
from chatmill.errors import FormatError
from chatmill.store.episode_layout import MANIFEST as EPISODES_MANIFEST
from chatmill.store.receipts import FORMAT, FORMAT_VERSION, sealed

if TYPE_CHECKING:
    from chatmill.compiler.inputs import InputFile
    from chatmill.compiler.sources import SourcePlan


def build_fingerprint(recipe: Recipe, inputs: Sequence[InputFile], fingerprints: Mapping[str, str]) -> str:
    """sha256 over everything that decides the bytes: gates do not; contents, options and the names of the files do.

    A record without an id is known by its place, which begins with the file's name as it was given.
    """
    options = {key: value for key, value in recipe.as_json().items() if key not in ("gates", "tokenizer", "sources")}
    sources = [source.model_dump(mode="json", exclude={"path"}) for source in recipe.sources]
    content = {
        "format_version": FORMAT_VERSION,
        "package": __version__,
        "options": options,
        "sources": sources,
        "inputs": [
            {"path": file.path, "sha256": file.sha256, "source": file.source, "shape": file.shape} for file in inputs
        ],
        **fingerprints,
    }
    return hashlib.sha256(canonical_json(content)).hexdigest()


def make_manifest(
    directory: Path,
    recipe: Recipe,
    planned: SourcePlan,
    pipeline: Pipeline,
    fingerprint: str,
    splits: Mapping[str, Any],
    ledger: Ledger,
    pad_id: int,
) -> dict[str, Any]:
    """The manifest of a dataset that stands, whole, in `directory`."""
    tokenizer = pipeline.template.tokenizer
    files = sorted(path for split in splits for path in (directory / split).rglob("*") if path.is_file())
    files += [path for path in (directory / REJECTED,) if path.exists()]
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
            "declares": pipeline.template.declares,
        },
        "policy": {"name": pipeline.policy.name, "fingerprint": pipeline.fingerprints["policy"]},
        "splits": dict(splits),
        "ledger": ledger.as_json(),
        "files": _file_records(directory, files, splits),
    }
    return sealed(content)


def _file_records(directory: Path, files: Sequence[Path], splits: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Size and hash of every file: as its writer recorded them where it did, else as they are."""
    written: dict[str, dict[str, Any]] = {}
    for split in splits:
        for shard in json.loads((directory / split / EPISODES_MANIFEST).read_bytes())["shards"]:
            folder = Path(split, shard["name"])
            written |= {(folder / name).as_posix(): record for name, record in shard["files"].items()}
    records: dict[str, dict[str, Any]] = {}
    for path in files:
        name, size = path.relative_to(directory).as_posix(), path.stat().st_size
        records[name] = written.get(name) or {"bytes": size, "sha256": sha256_file(path)}
        if records[name]["bytes"] != size:
            raise FormatError(f"{path}: {records[name]['bytes']} bytes were written, and {size} are there")
    return records


def git_sha() -> str | None:
    """The commit of the checkout that the build runs in; None outside one."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
