"""Receipts, written last next to a dataset: manifest.json of builds and of synth-kd, export.json of exports.

Each holds a sha256 of its own contents. All readers come through here: the form of its kind, every name
that becomes a path, and the hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from chatmill import __version__
from chatmill.core.canonical import canonical_json
from chatmill.core.json_files import NO_JSON, decoded, read_object
from chatmill.errors import DataError, FormatError
from chatmill.store.episode_layout import MANIFEST
from chatmill.structs import Count, InnerPath, Sha256, SplitName, Xxh128, typed

EXPORT_MANIFEST = "export.json"
"""In a folder that `export_dataset` made; names the dataset it was made from."""
MASKS_OF_NEXT = ("levanter", "megatron-bridge")
"""Exports whose masks and weights are about the next token, as their trainers read them next to the inputs."""
FORMAT, FORMAT_VERSION = "chatmill-dataset", 5
EXPORT_FORMAT, EXPORT_VERSION = "chatmill-export", 1
READ_VERSIONS = {FORMAT: FORMAT_VERSION, EXPORT_FORMAT: EXPORT_VERSION}
KD_SCHEMA = "synth_kd_v1"
SEAL = "contents_sha256"
"""sha256 of all other keys of a receipt as canonical JSON."""

_Moment = Annotated[int, Meta(ge=0, le=253_402_300_799)]
"""A second up to the end of the year 9999, the last that Python can name."""


class _File(Struct):
    """The record of a file of a dataset; those that come from others or go to them have sha256."""

    bytes: Count
    xxh128: Xxh128


class _FileOfOthers(Struct):
    bytes: Count
    sha256: Sha256


class _Named(Struct):
    name: str
    fingerprint: str


class _Tokenizer(_Named):
    given_as: Any
    vocab_size: Count
    eos_id: Count | None
    pad_id: Count
    control_tokens: list[str] = []


class _Input(Struct, rename={"digest": "tree-xxh128"}):
    bytes: Count
    digest: Xxh128
    path: str
    source: str
    shape: str
    lines: Count | None
    records: Count | None


class _Scanned(Struct, rename={"home": "from"}):
    mtime_ns: int
    chunk_bytes: Count
    home: str = ""


class _DatasetSplit(Struct):
    episodes: Count
    tokens: Count


class _Packing(Struct):
    max_length: Count | None
    overflow: str


class _Recipe(Struct):
    """The one part of a recipe that is read without the recipe; `recorded_recipe` checks all of it."""

    packing: _Packing


class _Ledger(Struct):
    """By source, then role or outcome, then fate or reason, as `chatmill.core.ledger.Ledger.as_json` writes it."""

    tokens: dict[str, dict[str, dict[str, Count]]]
    records: dict[str, dict[str, dict[str, Count]]]
    notes: dict[str, dict[str, Count]]
    padding: Count


class _Dataset(Struct):
    """What readers of a manifest rely on, names that become paths among it."""

    format: Literal["chatmill-dataset"]
    format_version: Annotated[int, Meta(ge=FORMAT_VERSION, le=FORMAT_VERSION)]
    package_version: str
    git_sha: str | None
    created_unix_s: _Moment
    fingerprint: Sha256
    recipe: _Recipe
    inputs: list[_Input]
    scanned: list[_Scanned]
    tokenizer: _Tokenizer
    template: _Named
    policy: _Named
    splits: dict[SplitName, _DatasetSplit]
    ledger: _Ledger
    files: dict[InnerPath, _File]
    contents_sha256: Sha256

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.scanned):
            raise ValueError(f"{len(self.inputs)} inputs and {len(self.scanned)} scanned: as many of both are needed")


class _ChunkPiece(Struct):
    path: str
    start: Count
    stop: Count
    first: Count
    count: Count
    digest: str


class _Chunk(Struct):
    """The receipt of a chunk; `chatmill.store.episode_manifest.shard_from_json` reads what it says of each split."""

    number: Count
    fingerprint: Sha256
    pieces: list[_ChunkPiece]
    splits: dict[SplitName, dict[str, Any]]
    rejected: _File | None
    ledger: _Ledger
    left_out: dict[str, str]
    named: dict[str, Any]


class _ExportSource(Struct):
    about: dict[str, Any]


class _ExportSplit(Struct):
    documents: Count
    tokens: Count
    trained: Count


class _Export(Struct):
    format: Literal["chatmill-export"]
    format_version: Annotated[int, Meta(ge=EXPORT_VERSION, le=EXPORT_VERSION)]
    to: str
    source: _ExportSource
    splits: dict[SplitName, _ExportSplit]
    files: dict[InnerPath, _FileOfOthers]
    contents_sha256: Sha256


class _KDFile(_FileOfOthers):
    path: InnerPath


class _KDShard(Struct):
    name: SplitName
    rows: Count
    tokens: Count
    files: list[_KDFile]


class _KDSplit(Struct):
    rows: Count
    tokens: Count
    trained_tokens: Count
    span_tokens: dict[str, Count]
    shards: list[_KDShard]


class _KDSplits(Struct):
    train: _KDSplit
    valid: _KDSplit


class _KDFailed(Struct):
    file: _KDFile | None


class _KDTokenizer(Struct):
    path: str
    vocab_size: Count


class _KDInputShard(Struct):
    rows_used: Count


class _KDInput(Struct):
    path: str
    shards: list[_KDInputShard]


class _KDRenderer(Struct):
    version: str


class _KD(Struct):
    schema_version: Literal["synth_kd_v1"]
    created_unix_s: _Moment
    git_sha: str | None
    package_version: str
    fingerprint: Sha256
    config: dict[str, Any]
    tokenizer: _KDTokenizer
    input: _KDInput
    renderer: _KDRenderer
    split: dict[str, Any]
    splits: _KDSplits
    failed: _KDFailed
    ledger: dict[str, Any]
    contents_sha256: Sha256


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a receipt with the hash of its contents."""
    return {**content, SEAL: _seal(content)}


def receipt_bytes(content: Mapping[str, Any]) -> bytes:
    """Return a receipt as it is written: UTF-8 JSON, keys sorted, indented by one space, a newline at the end."""
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def seal_problem(content: Mapping[str, Any]) -> str:
    """Return what is wrong with the hash of a receipt's contents; empty where nothing is."""
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
    """Return the manifest of a dataset folder; None if there is none.

    One that was changed after it was written is refused; with `check_seal` False that is left to the caller.
    """
    return _receipt(directory / MANIFEST, _Dataset, check_seal)


def read_export(directory: Path, *, check_seal: bool = True) -> dict[str, Any] | None:
    """Return the export.json of a folder; None if there is none. Checked as a manifest is."""
    return _receipt(directory / EXPORT_MANIFEST, _Export, check_seal)


def export_target(folder: Path) -> str:
    """Return the name of the export that a folder is, or is a split of; empty if it is none."""
    for place in (folder, folder.parent):
        try:
            export = read_export(place, check_seal=False)
        except FormatError:
            continue
        if export is not None:
            return str(export["to"])
    return ""


def mask_shift_of(target: str) -> int:
    """Return how far masks of an export are ahead: those of some trainers are about the next token."""
    return int(target in MASKS_OF_NEXT)


def read_kd_manifest(directory: Path, *, check_seal: bool = True) -> dict[str, Any] | None:
    """Return the manifest of a finished distillation dataset; None if there is none. Checked as that of a build is."""
    return _receipt(directory / MANIFEST, _KD, check_seal)


def chunk_receipt(line: bytes, where: str) -> dict[str, Any]:
    """Return the receipt of a chunk, a JSON object on a line; `where` names the file in errors."""
    try:
        receipt = decoded(line)
    except NO_JSON as error:
        raise FormatError(f"{where} is not JSON: {error}") from None
    typed(_Chunk, receipt, where, error=FormatError)
    return receipt  # type: ignore[no-any-return]


def manifest_kind(directory: Path) -> str | None:
    """Return what the manifest.json of a folder says it is: `FORMAT`, `KD_SCHEMA`, or None for none and for others'."""
    path = directory / MANIFEST
    manifest = read_object(path) if path.exists() else {}
    said = (manifest.get("format"), manifest.get("schema_version"))
    return next((kind for kind in (FORMAT, KD_SCHEMA) if kind in said), None)


def _refuse_other_version(content: Mapping[str, Any], path: Path) -> None:
    """Refuse datasets and exports in a format that this version does not read.

    Raises:
        FormatError: The format is another one. The error names the version of Chatmill that wrote it, if it is there.
    """
    found_format = content.get("format")
    found_version = content.get("format_version")
    if not isinstance(found_format, str) or found_format not in READ_VERSIONS or not isinstance(found_version, int):
        return

    read_version = READ_VERSIONS[found_format]
    if found_version == read_version:
        return
    writer = content.get("package_version")
    written_by = f", written by Chatmill {writer}" if isinstance(writer, str) else ""
    way_out = "build it again from its recipe, or open it with the version of Chatmill that wrote it"
    if found_version > read_version:
        way_out = "install a newer version of Chatmill"
    raise FormatError(
        f"{path}: this is {found_format} format {found_version}{written_by}; "
        f"Chatmill {__version__} reads format {read_version}: {way_out}"
    )


def _receipt(path: Path, form: type[Struct], check_seal: bool) -> dict[str, Any] | None:
    if not path.exists():
        return None
    content = read_object(path)
    _refuse_other_version(content, path)
    try:
        typed(form, content, str(path), error=FormatError)
    except FormatError as error:
        raise FormatError(f"{error}: the file was edited or damaged, or is of another kind or version") from None
    if check_seal and (problem := seal_problem(content)):
        raise FormatError(f"{path} {problem}. `chatmill verify` shows what else differs")
    return content
