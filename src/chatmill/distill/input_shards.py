"""The input of the distillation dataset: a manifest and numbered Parquet shards, and the rows that caps leave."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.compiler.pipeline import Pipeline
from chatmill.core.json_files import read_object
from chatmill.errors import ConfigError, DataError
from chatmill.read.files import parquet_batches, parquet_file
from chatmill.read.shapes import SYNTH_KD
from chatmill.read.synth_rows import ID, TEXT
from chatmill.store.mapped import map_file, probe

INPUT_MANIFEST = "manifest.json"
INPUT_SCHEMA = "synth_harmony_v1"
GLOB = "synth_harmony_shard_*.parquet"
COLUMNS = (ID, TEXT)
"""What is read; the other columns are not touched."""
UNLIMITED = 2**62
_NAME = re.compile(r"synth_harmony_shard_(\d{2,})\.parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One input file: how much of it is used, and what distinguishes it from another version of itself."""

    name: str
    """`shard_NN`, as its output is called."""
    path: str
    """As it was given."""
    rows: int
    """In the file."""
    taken: int
    """Of them, what the caps let through: the first so many."""
    bytes: int
    fingerprint: str
    """sha256 over samples of its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KDInput:
    """Everything that a build reads."""

    folder: str
    """As it was given."""
    manifest: str
    manifest_sha256: str
    shards: tuple[Shard, ...]

    def taking(self, rows: Sequence[int]) -> KDInput:
        """Return the same with only so many rows of each shard."""
        shards = (replace(shard, taken=count) for shard, count in zip(self.shards, rows, strict=True))
        return replace(self, shards=tuple(shards))


def read_input(folder: str | os.PathLike[str]) -> KDInput:
    """Look at a folder: its manifest, and its shards in the order of their numbers."""
    home = Path(folder)
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
    shards = tuple(_shard(number, shard) for number, shard in _shard_paths(home).items())
    total, rows = content.get("total_rows"), sum(shard.rows for shard in shards)
    if type(total) is int and total != rows:
        raise DataError(f"{path} says {total:,} total_rows, but the {len(shards)} shards next to it have {rows:,}")
    apart = sorted(_listed(content).symmetric_difference(Path(shard.path).name for shard in shards))
    if _listed(content) and apart:
        raise DataError(f"{path} and its folder have other shards: {', '.join(apart[:3])} is in one of them only")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return KDInput(folder=os.fspath(folder), manifest=str(path), manifest_sha256=digest, shards=shards)


def _listed(content: Mapping[str, Any]) -> set[str]:
    """Return the shards that a manifest lists: under `shards`, or `storage.shards` as in the published one."""
    storage = content.get("storage")
    listed = content.get("shards") or (storage.get("shards") if isinstance(storage, dict) else None)
    entries = listed if isinstance(listed, list) else []
    return {Path(entry["path"]).name for entry in entries if isinstance(entry, dict) and "path" in entry}


def _shard_paths(home: Path) -> dict[str, Path]:
    """Return the shards by their numbers, in order; a Parquet file of another name is refused, not left out."""
    matches = {path: _NAME.fullmatch(path.name) for path in sorted(home.glob("*.parquet"))}
    if not any(matches.values()):
        raise DataError(f"{home} has no shards: it must hold {GLOB} with two digits or more, next to {INPUT_MANIFEST}")
    left_out = [path.name for path, name in matches.items() if name is None]
    if left_out:
        raise DataError(
            f"{home} holds {', '.join(left_out[:3])}, which {'are' if len(left_out) > 1 else 'is'} no {GLOB} with two "
            "digits or more and would be left out: rename it, or move it away"
        )
    paths = {name[1]: path for path, name in matches.items() if name is not None}
    return {number: paths[number] for number in sorted(paths, key=int)}


def _shard(number: str, path: Path) -> Shard:
    """Look at a file; the columns that are needed must be there, as texts."""
    with parquet_file(path) as file:
        schema, rows = file.schema_arrow, file.metadata.num_rows
        for column in COLUMNS:
            if column not in schema.names:
                raise DataError(f"{path} has no column {column!r}; it has: {', '.join(schema.names)}")
            kind = str(schema.field(column).type)
            if kind not in ("string", "large_string", "string_view"):
                raise DataError(f"{path}: the column {column!r} holds {kind}, not texts")
    digest = hashlib.sha256()
    probe(digest, map_file(path, "u1"))
    return Shard(
        name=f"shard_{number}",
        path=str(path),
        rows=rows,
        taken=rows,
        bytes=path.stat().st_size,
        fingerprint=digest.hexdigest(),
    )


def cap_rows(source: KDInput, max_rows: int | None, max_rows_per_shard: int | None) -> KDInput:
    """Return the input with only its first rows; rows that fail are counted, too."""
    left, takes = max_rows or UNLIMITED, []
    for shard in source.shards:
        takes.append(min(shard.taken, max_rows_per_shard or UNLIMITED, left))
        left -= takes[-1]
    return source.taking(takes)


def cap_tokens(
    source: KDInput, pipeline: Pipeline, max_tokens: int | None, max_tokens_per_shard: int | None
) -> KDInput:
    """Return the input with only its first rows, in shard order, as long as their tokens stay within the caps.

    Rows are taken whole, and rows that fail have no tokens. This renders what a smoke build takes, once more than the
    build itself; which rows those are depends on neither workers nor chunks.
    """
    takes: list[int] = []
    left = max_tokens or UNLIMITED
    for shard in source.shards:
        cap = min(left, max_tokens_per_shard or UNLIMITED)
        rows, tokens = _rows_within(shard, pipeline, cap) if cap else (0, 0)
        # A row that does not fit ends the build's input, even if a shorter one follows.
        left = left - tokens if rows == shard.taken or cap < left else 0
        takes.append(rows)
    if not any(takes):
        raise ConfigError("no row fits into the cap of tokens: the first one alone has more. Give a larger cap")
    return source.taking(takes)


def _rows_within(shard: Shard, pipeline: Pipeline, cap: int) -> tuple[int, int]:
    """Return the first rows of a shard whose tokens are at most `cap`, and those tokens."""
    rows = tokens = 0
    for lengths in _lengths(shard, pipeline):
        sums = tokens + np.cumsum(lengths)
        fit = int(np.searchsorted(sums, cap, side="right"))
        if fit < len(lengths):
            return rows + fit, int(sums[fit - 1]) if fit else tokens
        rows, tokens = rows + fit, int(sums[-1])
    return rows, tokens


def _lengths(shard: Shard, pipeline: Pipeline) -> Iterator[NDArray[np.int64]]:
    """Yield the tokens of every row, a batch at a time; 0 for one that fails."""
    from chatmill.read.rows import read_rows  # pyarrow takes its time

    first = 0
    for batch in parquet_batches(Path(shard.path), 0, shard.taken, columns=COLUMNS):
        batch_rows, _ = read_rows(batch, first=first, path="", source=shard.name, shape=SYNTH_KD)
        compiled = pipeline.compile(batch_rows)
        places = np.array([int(where.rpartition(" ")[2]) - first for where in batch_rows.wheres[:]], dtype=np.int64)
        lengths = np.zeros(batch.num_rows, dtype=np.int64)
        lengths[places[compiled.source_index]] = compiled.tokens.lengths
        yield lengths
        first += batch.num_rows
