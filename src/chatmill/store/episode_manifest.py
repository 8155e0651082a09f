"""The manifest of an episode split: counts, optional columns, source names and file hashes, as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from chatmill.core.checksums import FileRecord
from chatmill.core.json_files import read_object
from chatmill.errors import FormatError
from chatmill.store.episode_layout import SPLIT_MANIFEST, has_file
from chatmill.structs import Count, NameOrEmpty, PlainName, Xxh128, typed

VERSION = 4


class Per(StrEnum):
    """What a column has one value for."""

    TOKEN = "token"
    EPISODE = "episode"


class ColumnSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One optional column next to the three files."""

    name: str = ""
    """In the file it is the key."""
    file: PlainName
    dtype: str
    """A numpy dtype string such as `<u4`, or `utf8` for strings (see `offsets_file`)."""
    per: Per
    offsets_file: NameOrEmpty = ""
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
MARGIN = ColumnSpec(name="margin", file="margin.f32", dtype="<f4", per=Per.EPISODE)
"""By how much the chosen answer of a pair is better, NaN where nothing says it; there where sides are."""
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
"""The bytes of the pictures of an episode, one after another."""
COLUMNS = (KINDS, LOGPROBS, SOURCE, TURNS, TRAINED, SIDE, MARGIN, RECORD_ID, BRANCHES, IMAGES, IMAGE_BYTES)
"""The columns that the writer knows, in the order of their files."""


class StoredFile(msgspec.Struct, frozen=True):
    """Size and hash of a file of a shard."""

    bytes: Count
    xxh128: Xxh128

    @property
    def record(self) -> FileRecord:
        """The same, to compare with a file."""
        return FileRecord(bytes=self.bytes, digest=self.xxh128)


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One published shard."""

    name: NameOrEmpty
    """Folder name; empty for the flat layout."""
    episodes: Count
    tokens: Count
    sources: tuple[str, ...] | UnsetType = UNSET
    """Names of the codes in its `source` column; absent: those of the split."""
    files: dict[PlainName, StoredFile]


class PackedRows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of several episodes: with the lengths of the episodes this says which of them share a row."""

    length: Count
    """Tokens of a row, padding included."""
    strategy: str
    """How rows are filled: a `chatmill.pack.plan.Strategy`."""
    count: Count
    """How many rows there are."""


class EpisodeManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a writer put into a split; the fields are the keys of the file, in their order."""

    format: Literal["chatmill-episodes"] = "chatmill-episodes"
    version: Annotated[int, Meta(ge=VERSION, le=VERSION)] = VERSION
    split: str
    episodes: Count = 0
    tokens: Count = 0
    """Counted over all shards when made."""
    columns: dict[str, ColumnSpec] = {}
    """The optional columns, by name."""
    sources: tuple[str, ...] = ()
    """Names of the codes in the `source` column."""
    rows: PackedRows | None = None
    """None where the split is not packed."""
    shards: tuple[ShardRecord, ...] = ()

    def __post_init__(self) -> None:
        named = {name: replace(column, name=name) for name, column in self.columns.items()}
        msgspec.structs.force_setattr(self, "columns", named)
        msgspec.structs.force_setattr(self, "episodes", sum(shard.episodes for shard in self.shards))
        msgspec.structs.force_setattr(self, "tokens", sum(shard.tokens for shard in self.shards))

    def to_bytes(self) -> bytes:
        """Return the file as it is written: UTF-8, indented by one space, a newline at the end."""
        plain = msgspec.to_builtins(self)
        for column in plain["columns"].values():
            del column["name"]
        return (json.dumps(plain, indent=1, ensure_ascii=False) + "\n").encode()


def read_split_manifest(folder: Path) -> EpisodeManifest | None:
    """Return the manifest of a split folder; None when there is none (three plain files)."""
    path = folder / SPLIT_MANIFEST
    if not has_file(path):
        return None
    manifest: EpisodeManifest = typed(EpisodeManifest, read_object(path), str(path), error=FormatError)
    return manifest


def shard_from_json(value: Mapping[str, Any], where: str) -> ShardRecord:
    """Read the object that a receipt has of a shard; `where` names its place in errors."""
    record: ShardRecord = typed(ShardRecord, value, where, error=FormatError)
    return record


def manifest_of_shards(split: str, columns: Sequence[ColumnSpec], shards: Sequence[ShardRecord]) -> EpisodeManifest:
    """The manifest of a split whose shards were written apart from each other, each with a source table of its own.

    A shard keeps its table only where the codes of the split, which has all names in the order of the shards, differ.
    """
    names = tuple(dict.fromkeys(name for shard in shards for name in shard.sources or ()))
    shared = [
        replace(shard, sources=UNSET) if shard.sources == names[: len(shard.sources or ())] else shard
        for shard in shards
    ]
    return EpisodeManifest(
        split=split, columns={column.name: column for column in columns}, sources=names, shards=tuple(shared)
    )
