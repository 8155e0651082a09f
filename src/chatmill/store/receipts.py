"""Receipts, written last beside a dataset: manifest.json of builds and of synth-kd, export.json of exports.

Each holds a sha256 of its own contents. All readers come through here: strict JSON, the form of its kind, every name
that becomes a path, and the hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chatmill.core.canonical import canonical_json
from chatmill.errors import FormatError
from chatmill.store.forms import (
    COUNT,
    FILE,
    FILE_OF_OTHERS,
    FLAG,
    NUMBER,
    OBJECT,
    PATH,
    SHA256,
    SPLIT,
    TEXT,
    TEXTS,
    Maybe,
    check_form,
)

MANIFEST = "manifest.json"
"""The receipt of a build, written last: a folder with splits and without it was written by hand, or is unfinished."""
EXPORT_MANIFEST = "export.json"
"""In a folder that `export_dataset` made; names the dataset it was made from."""
FORMAT, FORMAT_VERSION = "chatmill-dataset", 4
EXPORT_FORMAT, EXPORT_VERSION = "chatmill-export", 1
KD_SCHEMA = "synth_kd_v1"
SEAL = "contents_sha256"
"""sha256 of all other keys of a receipt as canonical JSON."""

_NAMED = {"name": TEXT, "fingerprint": SHA256}
_TOKENIZER = {
    **_NAMED,
    "given_as": TEXT,
    "vocab_size": COUNT,
    "eos_id": Maybe(COUNT),
    "pad_id": COUNT,
    "control_tokens": TEXTS,
}
_RECIPE = {
    "tokenizer": TEXT,
    "template": TEXT,
    "policy": Maybe(TEXT),
    "add_control_tokens": FLAG,
    "shard_bytes": Maybe(COUNT),
}
_INPUT = {**FILE, "path": TEXT, "source": TEXT, "shape": TEXT, "lines": Maybe(COUNT), "records": Maybe(COUNT)}
_COUNTS = {TEXT: COUNT}
_LEDGER = {
    "tokens": {TEXT: {TEXT: _COUNTS}},
    "records": {TEXT: {TEXT: _COUNTS}},
    "notes": {TEXT: _COUNTS},
    "padding": COUNT,
}
_ABOUT = {
    "package_version": TEXT,
    "git_sha": Maybe(TEXT),
    "fingerprint": SHA256,
    "recipe": _RECIPE,
    "inputs": [_INPUT],
    "tokenizer": _TOKENIZER,
    "template": _NAMED,
    "policy": _NAMED,
}
"""What a build says of its making; an export repeats it of its source."""
_ABOUT_KD = {
    "recipe": {("shard_bytes?" if key == "shard_bytes" else key): form for key, form in _RECIPE.items()},
    "tokenizer": {("control_tokens?" if key == "control_tokens" else key): form for key, form in _TOKENIZER.items()},
}
"""Parts of it that an export of a distillation dataset has with fewer keys."""
_DATASET = {
    **_ABOUT,
    "created_unix_s": COUNT,
    "recipe_sha256": SHA256,
    "scanned": [{"mtime_ns": COUNT, "chunk_bytes": COUNT}],
    "splits": {SPLIT: {"tokens": COUNT, "episodes": COUNT, "branches?": COUNT, "rows?": COUNT}},
    "ledger": _LEDGER,
    "files": {PATH: FILE},
    SEAL: SHA256,
}
_EXPORT = {
    "package_version": TEXT,
    "to": TEXT,
    "options": OBJECT,
    "source": {
        "name": TEXT,
        "fingerprint": SHA256,
        "layout": {SPLIT: TEXT},
        "about": {f"{key}?": form for key, form in (_ABOUT | _ABOUT_KD).items()},
    },
    "splits": {SPLIT: {"rows": COUNT, "documents": COUNT, "tokens": COUNT, "trained": COUNT}},
    "not_held": TEXTS,
    "files": {PATH: FILE_OF_OTHERS},
    SEAL: SHA256,
}
_KD_FILE = {**FILE_OF_OTHERS, "path": PATH}
_KD_SPLIT = {
    "rows": COUNT,
    "tokens": COUNT,
    "trained_tokens": COUNT,
    "span_tokens": _COUNTS,
    "shards": [{"name": SPLIT, "rows": COUNT, "tokens": COUNT, "files": [_KD_FILE]}],
}
_KD = {
    "created_unix_s": COUNT,
    "git_sha": Maybe(TEXT),
    "package_version": TEXT,
    "fingerprint": SHA256,
    "config": {"valid_fraction": NUMBER},
    "config_hash": SHA256,
    "tokenizer": {"name": TEXT, "path": TEXT, "sha256": SHA256, "vocab_size": COUNT, "eod_id": COUNT},
    "input": {"path": TEXT, "manifest_path": TEXT, "manifest_sha256": SHA256, "glob": TEXT, "shards": [OBJECT]},
    "renderer": {"library": TEXT, "version": TEXT, "flags": OBJECT},
    "split": {"rule": TEXT, "valid_fraction": NUMBER},
    "splits": {"train": _KD_SPLIT, "valid": _KD_SPLIT},
    "failed": {"rows": COUNT, "reasons": _COUNTS, "file": Maybe(_KD_FILE)},
    "ledger": _LEDGER,
    SEAL: SHA256,
}


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """A receipt with the hash of its contents."""
    return {**content, SEAL: _seal(content)}


def receipt_bytes(content: Mapping[str, Any]) -> bytes:
    """A receipt as it is written: UTF-8 JSON, keys sorted, indented by one space, a newline at the end."""
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def seal_problem(content: Mapping[str, Any]) -> str:
    """What is wrong with the hash of a receipt's contents; empty where nothing is."""
    found = _seal(content)
    if found != content[SEAL]:
        return f"was changed after it was written: the sha256 of its contents is {found}, it says {content[SEAL]}"
    return ""


def _seal(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json({key: content[key] for key in content if key != SEAL})).hexdigest()


def read_manifest(directory: Path, *, check_seal: bool = True) -> dict[str, Any] | None:
    """The manifest of a dataset folder; None where there is none.

    One that was changed after it was written is refused; with `check_seal` False that is left to the caller.
    """
    path = directory / MANIFEST
    manifest = _read(path)
    if manifest is None:
        return None
    _check_kind(path, manifest, FORMAT, FORMAT_VERSION, "the manifest of a")
    return _checked(path, manifest, _DATASET, check_seal)


def read_export(directory: Path, *, check_seal: bool = True) -> dict[str, Any] | None:
    """The export.json of a folder; None where there is none. Checked as a manifest is."""
    path = directory / EXPORT_MANIFEST
    manifest = _read(path)
    if manifest is None:
        return None
    _check_kind(path, manifest, EXPORT_FORMAT, EXPORT_VERSION, "the receipt of a")
    return _checked(path, manifest, _EXPORT, check_seal)


def read_kd_manifest(directory: Path, *, check_seal: bool = True) -> dict[str, Any] | None:
    """The manifest of a finished distillation dataset; None where there is none. Checked as that of a build is."""
    path = directory / MANIFEST
    manifest = _read(path)
    if manifest is None:
        return None
    version = manifest.get("schema_version")
    if version != KD_SCHEMA:
        raise FormatError(f"{path} has the schema_version {version!r}; this package reads {KD_SCHEMA!r}")
    return _checked(path, manifest, _KD, check_seal)


def manifest_kind(directory: Path) -> str | None:
    """What the manifest.json of a folder says it is: `FORMAT`, `KD_SCHEMA`, or None for none and for others'."""
    manifest = _read(directory / MANIFEST) or {}
    said = (manifest.get("format"), manifest.get("schema_version"))
    return next((kind for kind in (FORMAT, KD_SCHEMA) if kind in said), None)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes(), object_pairs_hook=_object, parse_constant=_no_constant)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise FormatError(f"{path} holds no JSON object: the file was edited or damaged")
    return content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _check_kind(path: Path, content: Mapping[str, Any], format: str, version: int, what: str) -> None:
    if content.get("format") != format:
        raise FormatError(f"{path} is not {what} {format}")
    found = content.get("format_version")
    if found != version:
        raise FormatError(f"{path} has format version {found!r}; this package reads {version}")


def _checked(path: Path, content: dict[str, Any], form: Mapping[str, Any], check_seal: bool) -> dict[str, Any]:
    check_form(content, form, str(path))
    if check_seal and (problem := seal_problem(content)):
        raise FormatError(f"{path} {problem}. `chatmill verify` shows what else differs")
    return content
