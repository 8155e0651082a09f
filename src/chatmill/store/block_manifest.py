"""The manifest of a blocks split: its columns, counts and file hashes, as one JSON object that is written last."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from chatmill.errors import FormatError
from chatmill.store.episode_layout import SHARD_NAME, shard_folders, writing_mark
from chatmill.store.episode_manifest import FileRecord, plain_file_name

MANIFEST = "blocks.json"
FORMAT = "chatmill-blocks"
VERSION = 1
MAX_CAPACITY = 2**31 - 1
"""Places in a row are stored as int32."""
MAX_ID = 2**32 - 1
"""Token ids are stored as uint32."""


class Per(StrEnum):
    """How many values a column has."""

    TOKEN = "token"
    """`rows * capacity`: row after row, padding included."""
    ROW = "row"
    """`rows`."""
    ROW_BORDER = "row_border"
    """`rows + 1`: offsets, from 0 to the number of documents."""
    DOCUMENT = "document"
    """`documents`: the documents of row 0, then those of row 1, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockColumn:
    """One file of every shard."""

    name: str
    file: str
    dtype: str
    """A numpy dtype string; all are little-endian."""
    per: Per

    def to_json(self) -> dict[str, str]:
        """The entry of the manifest."""
        return {"file": self.file, "dtype": self.dtype, "per": str(self.per)}


IDS = BlockColumn(name="ids", file="ids.u32", dtype="<u4", per=Per.TOKEN)
WEIGHTS_U8 = BlockColumn(name="weights", file="weights.u8", dtype="|u1", per=Per.TOKEN)
WEIGHTS_F32 = BlockColumn(name="weights", file="weights.f32", dtype="<f4", per=Per.TOKEN)
KINDS = BlockColumn(name="kinds", file="kinds.u8", dtype="|u1", per=Per.TOKEN)
ROW_LENGTHS = BlockColumn(name="row_lengths", file="row_lengths.i32", dtype="<i4", per=Per.ROW)
STARTS = BlockColumn(name="starts", file="starts.i32", dtype="<i4", per=Per.DOCUMENT)
STARTS_OFFSETS = BlockColumn(name="starts_offsets", file="starts_offsets.i64", dtype="<i8", per=Per.ROW_BORDER)
DOCUMENTS = BlockColumn(name="documents", file="documents.i64", dtype="<i8", per=Per.DOCUMENT)

REQUIRED = (IDS, ROW_LENGTHS, STARTS, STARTS_OFFSETS, DOCUMENTS)
COLUMNS = (IDS, WEIGHTS_U8, WEIGHTS_F32, KINDS, ROW_LENGTHS, STARTS, STARTS_OFFSETS, DOCUMENTS)
"""All that version 1 knows, in the order of the manifest; a split has at most one of the two kinds of weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShardRecord:
    """One published shard."""

    name: str
    rows: int
    tokens: int
    """Tokens of documents; padding is not among them."""
    documents: int
    files: Mapping[str, FileRecord]

    def values(self, per: Per, capacity: int) -> int:
        """How many values a column of this shard has."""
        counts = {Per.TOKEN: self.rows * capacity, Per.ROW: self.rows, Per.ROW_BORDER: self.rows + 1}
        return counts.get(per, self.documents)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockManifest:
    """What a writer put into a split."""

    split: str
    capacity: int
    """Tokens per row, padding included."""
    pad_id: int
    rows_per_shard: int
    """Rows of every shard but the last."""
    columns: tuple[BlockColumn, ...] = REQUIRED
    shards: tuple[BlockShardRecord, ...] = field(default=())

    @property
    def rows(self) -> int:
        """Rows of all shards."""
        return sum(shard.rows for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens of all documents; `rows * capacity - tokens` positions are padding."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """Documents in all rows."""
        return sum(shard.documents for shard in self.shards)

    @property
    def fingerprint(self) -> str:
        """sha256 of `to_bytes`: the sizes and hashes of all files are in there, so it stands for every byte."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def column(self, name: str) -> BlockColumn | None:
        """The column of a name; None when the split has none."""
        return next((column for column in self.columns if column.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """A plain object of strings, numbers, lists and objects."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "split": self.split,
            "capacity": self.capacity,
            "pad_id": self.pad_id,
            "rows_per_shard": self.rows_per_shard,
            "rows": self.rows,
            "tokens": self.tokens,
            "documents": self.documents,
            "columns": {column.name: column.to_json() for column in self.columns},
            "shards": [
                {
                    "name": shard.name,
                    "rows": shard.rows,
                    "tokens": shard.tokens,
                    "documents": shard.documents,
                    "files": {n: {"bytes": f.bytes, "sha256": f.sha256} for n, f in sorted(shard.files.items())},
                }
                for shard in self.shards
            ],
        }

    def to_bytes(self) -> bytes:
        """The file as it is written: UTF-8, indented by one space, a newline at the end."""
        return (json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n").encode()


def read_block_manifest(folder: Path) -> BlockManifest:
    """The manifest of a split folder; without one the split is unfinished, or no blocks at all."""
    path = folder / MANIFEST
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise FormatError(_why_missing(folder)) from None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        return block_manifest_from_json(json.loads(raw), str(path))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(
            f"{path}: not a manifest of a blocks split ({type(error).__name__}: {error}): the file was cut or edited"
        ) from error


def _why_missing(folder: Path) -> str:
    shards = shard_folders(folder)
    begun = any((shard / IDS.file).exists() for shard in shards) or any(folder.glob(".shard_*.partial"))
    if begun or writing_mark(folder.parent, folder.name).exists():
        return (
            f"{folder}: unfinished: {MANIFEST}, which is written last, is missing ({len(shards)} shards are there): "
            "a writer is at work on it, or was stopped; write it again"
        )
    there = sorted(path.name for path in folder.iterdir())[:10]
    return f"{folder}: no blocks here: there is no {MANIFEST} (found: {', '.join(there) or 'nothing'})"


def block_manifest_from_json(value: Mapping[str, Any], where: str) -> BlockManifest:
    """Read the object that `to_json` gave; `where` names its place in errors. Unknown keys are left alone."""
    if value.get("format") != FORMAT or value.get("version") != VERSION:
        raise FormatError(
            f"{where}: format {value.get('format')!r} version {value.get('version')!r}; "
            f"this package reads {FORMAT!r} version {VERSION}"
        )
    manifest = BlockManifest(
        split=str(value["split"]),
        capacity=_number(value, "capacity", where, low=1, high=MAX_CAPACITY),
        pad_id=_number(value, "pad_id", where, high=MAX_ID),
        rows_per_shard=_number(value, "rows_per_shard", where, low=1),
        columns=_columns(value["columns"], where),
        shards=tuple(_shard(shard, where) for shard in value["shards"]),
    )
    for shard, column in itertools.product(manifest.shards, manifest.columns):
        if column.file not in shard.files:
            raise FormatError(f"{where}: {shard.name} has no entry for {column.file}, the column {column.name!r}")
    for name in ("rows", "tokens", "documents"):
        total = _number(value, name, where, low=1)
        if total != getattr(manifest, name):
            raise FormatError(f"{where}: {name} is {total:,}, but the shards add up to {getattr(manifest, name):,}")
    return manifest


def _number(value: Mapping[str, Any], name: str, where: str, *, low: int = 0, high: int = 2**63 - 1) -> int:
    number = value[name]
    if not isinstance(number, int) or isinstance(number, bool) or not low <= number <= high:
        raise FormatError(f"{where}: {name} is {number!r}; a whole number from {low} to {high} is needed")
    return number


def _columns(value: Mapping[str, Mapping[str, str]], where: str) -> tuple[BlockColumn, ...]:
    """The columns that this version knows; a known name with another file or type is an error."""
    for name, entry in value.items():
        known = [column for column in COLUMNS if column.name == name]
        given = {key: entry.get(key) for key in ("file", "dtype", "per")}
        if known and given not in [column.to_json() for column in known]:
            expected = " or ".join(str(column.to_json()) for column in known)
            raise FormatError(f"{where}: column {name!r} is {given}; it must be {expected}")
    missing = [column.name for column in REQUIRED if column.name not in value]
    if missing:
        raise FormatError(f"{where}: the columns {', '.join(missing)} are missing; every blocks split has them")
    return tuple(c for c in COLUMNS if c.name in value and value[c.name]["file"] == c.file)


def _shard(value: Mapping[str, Any], where: str) -> BlockShardRecord:
    name = str(value["name"])
    if not SHARD_NAME.fullmatch(name):
        raise FormatError(f"{where}: {name!r} is no name of a shard; they are shard_00000, shard_00001, ...")
    return BlockShardRecord(
        name=name,
        rows=_number(value, "rows", f"{where}: {name}", low=1),
        tokens=_number(value, "tokens", f"{where}: {name}", low=1),
        documents=_number(value, "documents", f"{where}: {name}", low=1),
        files={
            plain_file_name(n, where): FileRecord(
                bytes=_number(f, "bytes", f"{where}: {name}/{n}"), sha256=str(f["sha256"])
            )
            for n, f in value["files"].items()
        },
    )
