"""The input of the distillation dataset: a manifest and numbered Parquet shards, cut into chunks of whole rows."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from chatmill.core.json_files import read_object
from chatmill.core.publish import sha256_file
from chatmill.core.texts import OptionalTexts
from chatmill.errors import DataError, FormatError
from chatmill.read.files import parquet_batches, parquet_file
from chatmill.read.ranges import check_unchanged
from chatmill.store.mapped import MappedFile, probe

INPUT_MANIFEST = "manifest.json"
INPUT_SCHEMA = "synth_harmony_v1"
GLOB = "synth_harmony_shard_*.parquet"
COLUMNS = ("synth_id", "messages_json")
"""What is read; the other columns are not touched."""
CHUNK_BYTES = 64 << 20
"""Wanted bytes of a chunk, unpacked."""
GROUP_ROWS = 1 << 21
"""Rows of a chunk at most, so that a build can be resumed and shared out."""
BATCH_BYTES = 16 << 20
"""Bytes of rows that are decoded and rendered together, about; bounds the memory of a worker."""
_PATH, _BYTES, _ROWS = ("path", "file", "filename", "name"), ("bytes", "size_bytes"), ("rows", "num_rows")
"""What the entry of a shard may call these in a manifest."""
_NAME = re.compile(r"synth_harmony_shard_(\d{2,})\.parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One input file: how much of it is used, and what distinguishes it from another version of itself."""

    name: str
    """`shard_NN`, as its output is called."""
    path: str
    """As it was given."""
    data: str
    """The same as an absolute path, for workers that run in another folder."""
    rows: int
    """In the file."""
    taken: int
    """Of them, what the caps let through: the first so many."""
    bytes: int
    mtime_ns: int
    fingerprint: str
    """sha256 over samples of its bytes."""
    starts: tuple[int, ...]
    """The first row of each chunk, counted from 0."""

    @property
    def chunks(self) -> Iterator[tuple[int, int]]:
        """The rows of each chunk: from, up to but not including."""
        starts = [start for start in self.starts if start < self.taken]
        return itertools.pairwise([*starts, self.taken]) if starts else iter(())

    @property
    def row_bytes(self) -> float:
        """Bytes of the file for each of its rows."""
        return self.bytes / max(self.rows, 1)


class ShardRows(NamedTuple):
    """Some rows of a shard that follow each other; texts are the bytes of the file, None for a null."""

    shard: str
    """The path of the shard."""
    first: int
    """The number of the first row, counted from 0."""
    ids: OptionalTexts
    texts: OptionalTexts

    @property
    def usable(self) -> OptionalTexts:
        """The texts; None also for a row without an id, which has no split."""
        return self.texts.without(np.flatnonzero(self.ids.lengths <= 0))

    def where(self, place: int) -> str:
        """The place of a row in words; rows are counted from 1 there."""
        return f"{self.shard}:row {self.first + place + 1}"

    def id_text(self, place: int) -> str:
        """The `synth_id` of a row, as far as it can be shown."""
        return shown(self.ids.raw(place)) or ""


def shown(value: bytes | None) -> str | None:
    """Bytes of a file as text, whatever they are."""
    return None if value is None else value.decode(errors="backslashreplace")


@dataclass(frozen=True, slots=True, kw_only=True)
class KDInput:
    """Everything that a build reads."""

    folder: str
    """As it was given."""
    manifest: str
    manifest_sha256: str
    shards: tuple[Shard, ...]

    def check_unchanged(self) -> None:
        """A `DataError` for the first file that has changed since it was looked at."""
        for shard in self.shards:
            check_unchanged(shard.data, shard.bytes, shard.mtime_ns)
        if sha256_file(self.manifest) != self.manifest_sha256:
            raise DataError(f"{self.manifest} has changed since the build began. Leave the inputs alone, build again")


def read_input(
    folder: str | os.PathLike[str],
    *,
    max_rows: int | None = None,
    max_rows_per_shard: int | None = None,
) -> KDInput:
    """Look at a folder: its manifest, its shards in the order of their numbers, and where their chunks begin."""
    home = Path(folder)
    manifest, content = _manifest(home)
    paths = _shard_paths(home)
    shards = []
    left = max_rows
    for path in paths:
        groups = _groups(path)
        rows = sum(count for count, _ in groups)
        taken = rows if max_rows_per_shard is None else min(rows, max_rows_per_shard)
        if left is not None:
            taken = min(taken, left)
            left -= taken
        shards.append(_shard(path, rows, taken, chunk_starts(groups)))
    _compare(content, shards, manifest)
    digest = hashlib.sha256(manifest.read_bytes()).hexdigest()
    return KDInput(folder=os.fspath(folder), manifest=str(manifest), manifest_sha256=digest, shards=tuple(shards))


def _shard_paths(home: Path) -> list[Path]:
    """The shards in the order of their numbers; a Parquet file of another name is refused, not left out."""
    paths = sorted((p for p in home.glob(GLOB) if _NAME.fullmatch(p.name)), key=_number)
    if not paths:
        raise DataError(f"{home} has no shards: it must hold {GLOB} with two digits or more, beside {INPUT_MANIFEST}")
    left_out = sorted({path.name for path in home.glob("*.parquet")} - {path.name for path in paths})
    if left_out:
        some = ", ".join(left_out[:3])
        raise DataError(
            f"{home} holds {some}, which {'are' if len(left_out) > 1 else 'is'} no {GLOB} with two digits or more and "
            "would be left out: rename it, or move it away"
        )
    return paths


def _manifest(home: Path) -> tuple[Path, dict[str, Any]]:
    path = home / INPUT_MANIFEST
    if not path.exists():
        raise DataError(
            f"there is no {path}: the input is a folder with {INPUT_MANIFEST} (schema_version {INPUT_SCHEMA!r}) and "
            f"{GLOB}; `chatmill synth-harmony` makes one"
        )
    content = read_object(path, DataError)
    version = content.get("schema_version")
    if version != INPUT_SCHEMA:
        raise DataError(f"{path} has the schema_version {version!r}; this build reads {INPUT_SCHEMA!r}")
    return path, content


def _number(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found.group(1))


def _shard(path: Path, rows: int, taken: int, starts: Sequence[int]) -> Shard:
    status = path.stat()
    digest = hashlib.sha256()
    probe(digest, MappedFile(path, "u1").array)
    number = _NAME.fullmatch(path.name)
    assert number is not None
    return Shard(
        name=f"shard_{number.group(1)}", path=str(path), data=str(path.absolute()), rows=rows, taken=taken,
        bytes=status.st_size, mtime_ns=status.st_mtime_ns, fingerprint=digest.hexdigest(), starts=tuple(starts),
    )  # fmt: skip


def chunk_starts(groups: Sequence[tuple[int, int]]) -> list[int]:
    """The first row of each chunk, from the (rows, unpacked bytes) of the row groups and nothing else.

    Small row groups share a chunk. A large one is a chunk by itself, since its rows are streamed, and reaching into its
    middle means to decode everything before; only beyond `GROUP_ROWS` rows it is cut into even parts all the same.
    """
    starts: list[int] = []
    at = held = 0
    for rows, size in groups:
        if not starts or held + size > CHUNK_BYTES:
            parts = -(-rows // GROUP_ROWS)
            starts += [at + part * rows // parts for part in range(parts)]
            held = 0
        held += size
        at += rows
    return starts


def _groups(path: Path) -> list[tuple[int, int]]:
    """Rows and unpacked bytes of the row groups; the columns that are needed must be there, as texts."""
    with parquet_file(path) as file:
        schema = file.schema_arrow
        for column in COLUMNS:
            if column not in schema.names:
                raise DataError(f"{path} has no column {column!r}; it has: {', '.join(schema.names)}")
            kind = str(schema.field(column).type)
            if kind not in ("string", "large_string", "string_view"):
                raise DataError(f"{path}: the column {column!r} holds {kind}, not texts")
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        return [(group.num_rows, group.total_byte_size) for group in groups if group.num_rows]


def _compare(content: dict[str, Any], shards: Sequence[Shard], manifest: Path) -> None:
    """The shards are those that the manifest lists, with their sizes and rows; a manifest without a list is fine."""
    found = {Path(shard.path).name: shard for shard in shards}
    listed = _listed(content)
    for name, entry in listed.items():
        if name not in found:
            raise DataError(f"{manifest} lists {name}, which is not in the folder: {len(found)} of {len(listed)} are")
        for keys, value in ((_BYTES, found[name].bytes), (_ROWS, found[name].rows)):
            for key in keys:
                if entry.get(key, value) != value:
                    raise DataError(f"{found[name].path} has {value:,} {keys[0]}, but {manifest} says {entry[key]}")
    for name, shard in found.items():
        if listed and name not in listed:
            raise DataError(f"{shard.path} is not in the list of {manifest}: move it away, or write the manifest again")
    total, rows = content.get("total_rows"), sum(shard.rows for shard in shards)
    if type(total) is int and total != rows:
        raise DataError(f"{manifest} says {total:,} total_rows, but its shards have {rows:,}")


def _listed(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The shards that a manifest lists, by file name: under `shards`, or `storage.shards` as in the published one."""
    storage = content.get("storage")
    lists = (content.get("shards"), storage.get("shards") if isinstance(storage, dict) else None)
    listed: dict[str, dict[str, Any]] = {}
    for entries in lists:
        if isinstance(entries, dict):
            entries = [{"path": name, **(entry if isinstance(entry, dict) else {})} for name, entry in entries.items()]
        for entry in entries if isinstance(entries, list) else ():
            known = entry if isinstance(entry, dict) else {"path": str(entry)}
            path = next((known[key] for key in _PATH if isinstance(known.get(key), str)), None)
            if path is not None:
                listed[Path(path).name] = known
    return listed


def shard_batches(shard: Shard, start: int, stop: int) -> Iterator[ShardRows]:
    """The rows of a shard from `start` up to `stop` (counted from 0), a batch at a time."""
    import pyarrow

    from chatmill.read.rows import texts_of

    check_unchanged(shard.data, shard.bytes, shard.mtime_ns)
    seen = start
    for batch in parquet_batches(Path(shard.data), start, stop, columns=COLUMNS, batch_bytes=BATCH_BYTES):
        # Whoever reads them looks at every byte.
        columns = (texts_of(batch.column(name).cast(pyarrow.large_string()), check=False) for name in COLUMNS)
        yield ShardRows(shard.path, seen, *columns)
        seen += batch.num_rows
    if seen != stop:
        raise FormatError(f"{shard.path}: rows {seen} to {stop} could not be read; the file says it has {shard.rows:,}")
    check_unchanged(shard.data, shard.bytes, shard.mtime_ns)
