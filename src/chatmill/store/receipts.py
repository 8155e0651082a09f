"""Receipts, written last next to a dataset: manifest.json of builds and of synth-kd, export.json of exports.

Each holds a sha256 of its own contents. All readers come through here: the form of its kind, every name
that becomes a path, and the hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import GenericAlias
from typing import Any

from msgspec import UNSET, UnsetType, defstruct

from chatmill.core.canonical import canonical_json
from chatmill.core.json_files import read_object
from chatmill.errors import DataError, FormatError
from chatmill.store.episode_layout import MANIFEST
from chatmill.structs import Count, InnerPath, Sha256, SplitName, Xxh128, typed

EXPORT_MANIFEST = "export.json"
"""In a folder that `export_dataset` made; names the dataset it was made from."""
FORMAT, FORMAT_VERSION = "chatmill-dataset", 4
EXPORT_FORMAT, EXPORT_VERSION = "chatmill-export", 1
KD_SCHEMA = "synth_kd_v1"
SEAL = "contents_sha256"
"""sha256 of all other keys of a receipt as canonical JSON."""


def _form(*, optional: bool = False, **keys: Any) -> Any:
    """The struct of an object with these keys; other keys are left alone."""
    default = [UNSET] if optional else []
    return defstruct("Form", [(key, kind | UnsetType if optional else kind, *default) for key, kind in keys.items()])


def _list(kind: Any) -> Any:
    return GenericAlias(list, (kind,))


def _dict(keys: Any, kind: Any) -> Any:
    return GenericAlias(dict, (keys, kind))


_File = _form(bytes=Count, xxh128=Xxh128)
"""The record of a file of a dataset; those that come from others or go to them have sha256."""
_FileOfOthers = _form(bytes=Count, sha256=Sha256)
_Counts = _dict(str, Count)
_Named = _form(name=str, fingerprint=Sha256)
_TOKENIZER: dict[str, Any] = {
    "name": str,
    "fingerprint": Sha256,
    "given_as": str,
    "vocab_size": Count,
    "eos_id": Count | None,
    "pad_id": Count,
}
_RECIPE: dict[str, Any] = {"tokenizer": str, "template": str, "policy": str | None, "add_control_tokens": bool}
_Input = _form(bytes=Count, xxh128=Xxh128, path=str, source=str, shape=str, lines=Count | None, records=Count | None)
_Ledger = _form(
    tokens=_dict(str, _dict(str, _Counts)),
    records=_dict(str, _dict(str, _Counts)),
    notes=_dict(str, _Counts),
    padding=Count,
)
_ABOUT: dict[str, Any] = {
    "package_version": str,
    "git_sha": str | None,
    "fingerprint": Sha256,
    "inputs": _list(_Input),
    "template": _Named,
    "policy": _Named,
}
"""What a build says of its making; an export repeats it of its source."""
_Split = defstruct(
    "Form", [("tokens", Count), ("episodes", Count), *((key, Count | UnsetType, UNSET) for key in ("branches", "rows"))]
)
_Dataset = _form(
    **_ABOUT,
    recipe=_form(**_RECIPE, shard_bytes=Count | None),
    tokenizer=_form(**_TOKENIZER, control_tokens=_list(str)),
    created_unix_s=Count,
    recipe_sha256=Sha256,
    scanned=_list(_form(mtime_ns=Count, chunk_bytes=Count)),
    splits=_dict(SplitName, _Split),
    ledger=_Ledger,
    files=_dict(InnerPath, _File),
    contents_sha256=Sha256,
)
_Export = _form(
    package_version=str,
    to=str,
    options=dict,
    source=_form(
        name=str,
        fingerprint=Sha256,
        layout=_dict(SplitName, str),
        about=_form(optional=True, **_ABOUT, recipe=_form(**_RECIPE), tokenizer=_form(**_TOKENIZER)),
    ),
    splits=_dict(SplitName, _form(rows=Count, documents=Count, tokens=Count, trained=Count)),
    not_held=_list(str),
    files=_dict(InnerPath, _FileOfOthers),
    contents_sha256=Sha256,
)
_KDFile = _form(bytes=Count, sha256=Sha256, path=InnerPath)
_KDShard = _form(name=SplitName, rows=Count, tokens=Count, files=_list(_KDFile))
_KDSplit = _form(rows=Count, tokens=Count, trained_tokens=Count, span_tokens=_Counts, shards=_list(_KDShard))
_KD = _form(
    created_unix_s=Count,
    git_sha=str | None,
    package_version=str,
    fingerprint=Sha256,
    config=_form(valid_fraction=float),
    config_hash=Sha256,
    tokenizer=_form(name=str, path=str, sha256=Sha256, vocab_size=Count, eod_id=Count),
    input=_form(path=str, manifest_path=str, manifest_sha256=Sha256, glob=str, shards=_list(dict)),
    renderer=_form(library=str, version=str, flags=dict),
    split=_form(rule=str, valid_fraction=float),
    splits=_form(train=_KDSplit, valid=_KDSplit),
    failed=_form(rows=Count, reasons=_Counts, file=_KDFile | None),
    ledger=_Ledger,
    contents_sha256=Sha256,
)


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """A receipt with the hash of its contents."""
    return {**content, SEAL: _seal(content)}


def receipt_bytes(content: Mapping[str, Any]) -> bytes:
    """A receipt as it is written: UTF-8 JSON, keys sorted, indented by one space, a newline at the end."""
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def seal_problem(content: Mapping[str, Any]) -> str:
    """What is wrong with the hash of a receipt's contents; empty where nothing is."""
    try:
        digest = _seal(content)
    except DataError as error:
        return f"was changed after it was written: {error}"
    if digest != content[SEAL]:
        return f"was changed after it was written: the sha256 of its contents is {digest}, it says {content[SEAL]}"
    return ""


def _seal(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json({key: content[key] for key in content if key != SEAL})).hexdigest()


def read_manifest(directory: Path, *, check_seal: bool = True) -> dict[str, Any] | None:
    """The manifest of a dataset folder; None if there is none.

    One that was changed after it was written is refused; with `check_seal` False that is left to the caller.
    """
    return _receipt(directory / MANIFEST, _Dataset, (FORMAT, FORMAT_VERSION, "the manifest of a"), check_seal)


def read_export(directory: Path, *, check_seal: bool = True) -> dict[str, Any] | None:
    """The export.json of a folder; None if there is none. Checked as a manifest is."""
    return _receipt(
        directory / EXPORT_MANIFEST, _Export, (EXPORT_FORMAT, EXPORT_VERSION, "the receipt of a"), check_seal
    )


def read_kd_manifest(directory: Path, *, check_seal: bool = True) -> dict[str, Any] | None:
    """The manifest of a finished distillation dataset; None if there is none. Checked as that of a build is."""
    return _receipt(directory / MANIFEST, _KD, None, check_seal)


def manifest_kind(directory: Path) -> str | None:
    """What the manifest.json of a folder says it is: `FORMAT`, `KD_SCHEMA`, or None for none and for others'."""
    path = directory / MANIFEST
    manifest = read_object(path) if path.exists() else {}
    said = (manifest.get("format"), manifest.get("schema_version"))
    return next((kind for kind in (FORMAT, KD_SCHEMA) if kind in said), None)


def _receipt(path: Path, form: Any, kind: tuple[str, int, str] | None, check_seal: bool) -> dict[str, Any] | None:
    """Read a receipt of a format, a version of it and what it is called; or, without these, one of synth-kd."""
    if not path.exists():
        return None
    content = read_object(path)
    if kind is None:
        if (version := content.get("schema_version")) != KD_SCHEMA:
            raise FormatError(f"{path} has the schema_version {version!r}; this package reads {KD_SCHEMA!r}")
    elif content.get("format") != kind[0]:
        raise FormatError(f"{path} is not {kind[2]} {kind[0]}")
    elif (version := content.get("format_version")) != kind[1]:
        raise FormatError(f"{path} has format version {version!r}; this package reads {kind[1]}")
    try:
        typed(form, content, str(path), error=FormatError)
    except FormatError as error:
        raise FormatError(f"{error}: the file was edited or damaged, or is of another kind") from None
    if check_seal and (problem := seal_problem(content)):
        raise FormatError(f"{path} {problem}. `chatmill verify` shows what else differs")
    return content
