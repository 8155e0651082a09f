"""The sources of a recipe become files, chunks and caps, in an order that depends on nothing but the recipe."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from chatmill.compiler.chunk_job import ChunkPiece
from chatmill.compiler.engines.local import available_cores
from chatmill.compiler.inputs import (
    InputFile,
    InputScan,
    ScannedInput,
    check_inputs,
    check_inputs_unchanged,
    fetched,
    scan_input,
)
from chatmill.compiler.paths import resolve_paths
from chatmill.compiler.recipe import Recipe, Source
from chatmill.read.places import is_elsewhere
from chatmill.read.shapes import preferred, shape_key

FETCHES = 8
"""Files behind URLs that are copied at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlan:
    """All input of a build, in order."""

    files: tuple[InputFile, ...]
    chunks: tuple[tuple[ChunkPiece, ...], ...]
    """The input of each shard: a range of a large file, or several small files."""
    capped: Counter[str]
    """Lines or rows of each source that its `max_records` leaves out."""
    base: Path | None = None
    """The folder that relative names start from; None: the current one."""

    def check_unchanged(self) -> None:
        """A `DataError` for the first file that has changed since it was scanned."""
        check_inputs_unchanged(self.files, self.base)


def plan_sources(recipe: Recipe, spool: Path, base: Path | None = None) -> SourcePlan:
    """Find, hash and cut the files of all sources; relative names start from `base` (default: the current folder).

    A source whose records are used more than once is cut finer, so that a shard of it is no larger than others.
    """
    scans: list[InputScan] = []
    owners: list[int] = []
    for number, source in enumerate(recipe.sources):
        shape = None if source.shape is None else shape_key(source.shape)
        for path in _files_of(source, base):
            scans.append(
                InputScan(
                    path=path,
                    base=os.getcwd() if base is None else str(base),
                    spool=str(spool.absolute()),
                    source=source.name,
                    shape=shape,
                    chunk_bytes=max(1, int(recipe.shard_bytes / max(1.0, source.weight))),
                )
            )
            owners.append(number)
    if any(is_elsewhere(scan.path) for scan in scans):
        with ThreadPoolExecutor(FETCHES) as threads:
            scans = list(threads.map(fetched, scans))
    check_inputs(scans)
    scanned = [_read_as(one, recipe.preferences) for one in scan_all(scans)]
    pieces: list[ChunkPiece] = []
    capped: Counter[str] = Counter()
    left = [source.max_records for source in recipe.sources]
    for owner, one in zip(owners, scanned, strict=True):
        for chunk in one.chunks:
            taken, remaining = chunk.count, left[owner]
            if remaining is not None:
                taken = min(taken, remaining)
                left[owner] = remaining - taken
                capped[chunk.source] += chunk.count - taken
            if taken:
                numbered = replace(chunk, ordinal=len(pieces))
                limit = taken if taken < chunk.count else None
                pieces.append(ChunkPiece(numbered, recipe.sources[owner].weight, limit))
    chunks = shared_chunks(pieces, recipe.shard_bytes)
    return SourcePlan(files=tuple(one.file for one in scanned), chunks=chunks, capped=capped, base=base)


def _files_of(source: Source, base: Path | None) -> list[str]:
    """The files of a source, as they are named in the dataset."""
    if base is None:
        return [str(path) for path in resolve_paths(source.patterns)]
    named = [name if is_elsewhere(name) else str(base / name) for name in source.patterns]
    return [os.path.relpath(path, base) if isinstance(path, Path) else str(path) for path in resolve_paths(named)]


def _read_as(scanned: ScannedInput, preferences: str | None) -> ScannedInput:
    """A file with the shape that its records are read in."""
    shape = preferred(scanned.file.shape, preferences)
    chunks = tuple(replace(chunk, shape=shape) for chunk in scanned.chunks)
    return replace(scanned, file=replace(scanned.file, shape=shape), chunks=chunks)


def shared_chunks(pieces: Sequence[ChunkPiece], shard_bytes: int) -> tuple[tuple[ChunkPiece, ...], ...]:
    """Put neighbours together while they are small, so that many small files make few shards."""
    chunks: list[list[ChunkPiece]] = []
    room = 0.0
    for piece in pieces:
        size = piece.range.bytes * max(1.0, piece.weight)
        if not chunks or size > room:
            chunks.append([])
            room = float(shard_bytes)
        chunks[-1].append(piece)
        room -= size
    return tuple(map(tuple, chunks))


def scan_all(scans: Sequence[InputScan]) -> list[ScannedInput]:
    """Scan all files, in threads: reading, hashing and counting lines need no interpreter."""
    with ThreadPoolExecutor(max(1, min(len(scans), available_cores()))) as threads:
        return list(threads.map(scan_input, scans))
