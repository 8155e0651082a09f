"""The manifest of an episode split: counts, optional columns, source names and file hashes, as one JSON object.

`EpisodeManifest.to_json` gives a plain object, so a larger manifest can hold it as one of its entries.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from chatmill.core.checksums import FileRecord
from chatmill.errors import FormatError
from chatmill.store.episode_layout import INDEX, MANIFEST, MASK, TOKENS
from chatmill.store.names import is_plain_name

FORMAT = "chatmill-episodes"
VERSION = 4


class Per(StrEnum):
    """What a column has one value for."""

    TOKEN = "token"
    EPISODE = "episode"


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSpec:
    """One optional column beside the three files; its name never ends in `.bin`."""

    name: str
    file: str
    dtype: str
    """A numpy dtype string such as `<u4`, or `utf8` for strings (see `offsets_file`)."""
    per: Per
    offsets_file: str = ""
    """For columns with several values an episode: uint64 offsets into `file`, one more than there are episodes.

    Those of `utf8` count bytes, those of branches count branches."""


KINDS = ColumnSpec(name="kinds", file="kinds.u8", dtype="|u1", per=Per.TOKEN)
LOGPROBS = ColumnSpec(name="logprobs", file="logprobs.f32", dtype="<f4", per=Per.TOKEN)
"""Of the tokens that a model sampled; NaN for the others."""
SOURCE = ColumnSpec(name="source", file="source.u32", dtype="<u4", per=Per.EPISODE)
TURNS = ColumnSpec(name="turns", file="turns.u32", dtype="<u4", per=Per.EPISODE)
TRAINED = ColumnSpec(name="trained", file="trained.u32", dtype="<u4", per=Per.EPISODE)
SIDE = ColumnSpec(name="side", file="side.u8", dtype="|u1", per=Per.EPISODE)
"""The `chatmill.core.sides.Side` of each episode; there where the split holds pairs, or answers with a label."""
RECORD_ID = ColumnSpec(
    name="record_id", file="record_id.utf8", dtype="utf8", per=Per.EPISODE, offsets_file="record_id.offsets"
)
BRANCHES = ColumnSpec(
    name="branches", file="branches.u32", dtype="<u4", per=Per.EPISODE, offsets_file="branches.offsets"
)
"""Two numbers for each branch of an episode: where it begins, and the position of its first token. Where a split has
this column its episodes are trees (`chatmill.core.trees`)."""
IMAGES = ColumnSpec(name="images", file="images.utf8", dtype="utf8", per=Per.EPISODE, offsets_file="images.offsets")
"""The pictures of an episode, as JSON (`chatmill.images.column`); there where the model takes pictures."""
IMAGE_BYTES = ColumnSpec(
    name="image_bytes", file="image_bytes.bin", dtype="utf8", per=Per.EPISODE, offsets_file="image_bytes.offsets"
)
"""The bytes of the pictures of an episode, one behind the other."""
COLUMNS = (KINDS, LOGPROBS, SOURCE, TURNS, TRAINED, SIDE, RECORD_ID, BRANCHES, IMAGES, IMAGE_BYTES)
"""The columns that the writer knows, in the order of their files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """One published shard."""

    name: str
    """Folder name; empty for the flat layout."""
    episodes: int
    tokens: int
    files: Mapping[str, FileRecord]
    sources: tuple[str, ...] | None = None
    """Names of the codes in its `source` column; None: those of the split."""

    def to_json(self) -> dict[str, Any]:
        """A plain object; `shard_from_json` reads it."""
        own = {} if self.sources is None else {"sources": list(self.sources)}
        return {
            "name": self.name,
            "episodes": self.episodes,
            "tokens": self.tokens,
            **own,
            "files": {name: file.to_json() for name, file in sorted(self.files.items())},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Rows of several episodes: with the lengths of the episodes this says which of them share a row."""

    length: int
    """Tokens of a row, padding included."""
    strategy: str
    """How rows are filled: a `chatmill.pack.plan.Strategy`."""
    count: int
    """How many rows there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeManifest:
    """What a writer put into a split."""

    split: str
    columns: tuple[ColumnSpec, ...] = ()
    sources: tuple[str, ...] = ()
    """Names of the codes in the `source` column."""
    shards: tuple[ShardRecord, ...] = field(default=())
    rows: PackedRows | None = None
    """None where the split is not packed."""

    @property
    def episodes(self) -> int:
        """Episodes of all shards."""
        return sum(shard.episodes for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens of all shards."""
        return sum(shard.tokens for shard in self.shards)

    def to_json(self) -> dict[str, Any]:
        """A plain object of strings, numbers, lists and objects."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "split": self.split,
            "episodes": self.episodes,
            "tokens": self.tokens,
            "columns": {column.name: _column_json(column) for column in self.columns},
            "sources": list(self.sources),
            "rows": None if self.rows is None else asdict(self.rows),
            "shards": [shard.to_json() for shard in self.shards],
        }

    def to_bytes(self) -> bytes:
        """The file as it is written: UTF-8, indented by one space, a newline at the end."""
        return (json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n").encode()


def _column_json(column: ColumnSpec) -> dict[str, str]:
    entry = {"file": column.file, "dtype": column.dtype, "per": str(column.per)}
    return entry | ({"offsets_file": column.offsets_file} if column.offsets_file else {})


def read_split_manifest(folder: Path) -> EpisodeManifest | None:
    """The manifest of a split folder; None when there is none (three plain files)."""
    path = folder / MANIFEST
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        return manifest_from_json(json.loads(raw), str(path))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(
            f"{path}: not a manifest of an episode split ({type(error).__name__}: {error}); "
            "without this file the three plain files still open, without their extra columns"
        ) from error


def manifest_from_json(value: Mapping[str, Any], where: str) -> EpisodeManifest:
    """Read the object that `to_json` gave; `where` names its place in errors."""
    if value.get("format") != FORMAT or value.get("version") != VERSION:
        raise FormatError(
            f"{where}: format {value.get('format')!r} version {value.get('version')!r}; "
            f"this package reads {FORMAT!r} version {VERSION}"
        )
    return EpisodeManifest(
        split=str(value["split"]),
        columns=tuple(
            ColumnSpec(
                name=name,
                file=plain_file_name(entry["file"], where),
                dtype=str(entry["dtype"]),
                per=Per(entry["per"]),
                offsets_file=plain_file_name(entry["offsets_file"], where) if entry.get("offsets_file") else "",
            )
            for name, entry in value["columns"].items()
        ),
        sources=tuple(map(str, value["sources"])),
        shards=tuple(shard_from_json(shard, where) for shard in value["shards"]),
        rows=None if value["rows"] is None else _rows(value["rows"]),
    )


def _rows(value: Mapping[str, Any]) -> PackedRows:
    return PackedRows(length=int(value["length"]), strategy=str(value["strategy"]), count=int(value["count"]))


def shard_from_json(value: Mapping[str, Any], where: str) -> ShardRecord:
    """Read the object that `ShardRecord.to_json` gave; `where` names its place in errors."""
    return ShardRecord(
        name=plain_file_name(value["name"], where) if value["name"] else "",  # the flat layout has one without a name
        episodes=int(value["episodes"]),
        tokens=int(value["tokens"]),
        files=FileRecords(value["files"], where),
        sources=tuple(map(str, value["sources"])) if "sources" in value else None,
    )


def manifest_of_shards(split: str, columns: tuple[ColumnSpec, ...], shards: Sequence[ShardRecord]) -> EpisodeManifest:
    """The manifest of a split whose shards were written apart from each other, each with a source table of its own.

    A shard keeps its table only where the codes of the split, which has all names in the order of the shards, differ.
    """
    names = tuple(dict.fromkeys(name for shard in shards for name in shard.sources or ()))
    shared = [
        replace(shard, sources=None) if shard.sources == names[: len(shard.sources or ())] else shard
        for shard in shards
    ]
    return EpisodeManifest(split=split, columns=columns, sources=names, shards=tuple(shared))


class FileRecords(Mapping[str, FileRecord]):
    """Records as they are in JSON, made into objects when they are asked for: opening a split needs none of them."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """Names that are no plain file names are refused; `where` names the place in errors."""
        if not values.keys() <= _known_names():
            for name in values:
                plain_file_name(name, where)
        self._values, self._where = values, where

    def __getitem__(self, name: str) -> FileRecord:
        value = self._values[name]
        try:
            return FileRecord.from_json(value)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{self._where}: the record of {name} is damaged ({error!r})") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@functools.cache
def _known_names() -> frozenset[str]:
    """The files that the writer makes."""
    extra = [name for column in COLUMNS for name in (column.file, column.offsets_file) if name]
    return frozenset((TOKENS, INDEX, MASK, *extra))


def plain_file_name(name: str, where: str) -> str:
    """Names only: a manifest never points outside its folder."""
    if not is_plain_name(name):
        raise FormatError(f"{where}: {name!r} is no plain file name")
    return name
