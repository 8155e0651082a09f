"""The sources of a recipe become files, chunks and caps, in an order that depends on nothing but the recipe.

Small files share chunks, and records of one group, which share a tree or give one record, are in one chunk. Whatever
reads a file is a job of the executor.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from chatmill.compiler.agent_sources import agent_options
from chatmill.compiler.chunk_job import ChunkPiece
from chatmill.compiler.engines.jobs import Executor
from chatmill.compiler.group_borders import whole_groups
from chatmill.compiler.inputs import InputFile, InputScan, KnownFile, size_and_time
from chatmill.compiler.paths import resolve_paths
from chatmill.compiler.recipe import Recipe, Source
from chatmill.compiler.scan_jobs import scan_inputs
from chatmill.core.checksums import Hash
from chatmill.errors import ChatmillError
from chatmill.files import stores
from chatmill.files.inputs import find_input, refuse_keys_in_input, share_input
from chatmill.files.stores import StoreAccess
from chatmill.read.agents.branches import AgentOptions
from chatmill.read.file_format import FileFormat
from chatmill.read.places import STDIN, RunFolder, is_elsewhere, is_run_folder, place, stdin_copy
from chatmill.read.shapes import find_shape

Chunks = tuple[tuple[ChunkPiece, ...], ...]
SMALLEST, LARGEST = 1 << 20, 32 << 20
MANY_CHUNKS = 64
"""So many chunks, or more, has an input between 64 MiB and 2 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlan:
    """All input of a build, in order."""

    files: tuple[InputFile, ...]
    chunk_bytes: tuple[int, ...]
    """The size for which each file was cut."""
    chunks: Chunks
    """The input of each shard: a range of a large file, or several small files."""
    capped: Counter[str]
    """Lines or rows of each source that its `max_records` leaves out."""
    base: Path | None = None
    """The folder that relative names start from; None: the current one."""
    agents: tuple[AgentOptions, ...] = ()
    """What the source of each file says of files that agents left."""


def find_nothing(scan: InputScan) -> KnownFile | None:
    """Know no file of an earlier build."""
    return None


def plan_sources(
    recipe: Recipe,
    spool: Path,
    base: Path | None = None,
    lookup: Callable[[InputScan], KnownFile | None] = find_nothing,
    executor: Executor | None = None,
    share: str = "",
) -> SourcePlan:
    """Find, hash and cut the files of all sources; relative names start from `base` (default: the current folder).

    A source whose records are used more than once is cut finer, so that its shards are no larger than others.

    Args:
        recipe: The recipe, with its sources.
        spool: Folder for files that cannot be read from the middle.
        base: Folder that relative names start from; None for the current one.
        lookup: Returns what an earlier build knows of a file.
        executor: Reads the files; without one this process does.
        share: URL that spools are uploaded below, for workers that share no folder.
    """
    scans: list[InputScan] = []
    owners: list[int] = []
    for number, source in enumerate(recipe.sources):
        shape = None if source.shape is None else find_shape(source.shape).key
        agent = agent_options(source, base)
        for path in _files_of(source, base):
            FileFormat.of(
                place(path if base is None or is_elsewhere(path) else base / path)
            )  # refuses unknown endings before any file is fetched or read
            home = os.getcwd() if base is None else str(base)
            scans.append(
                InputScan(
                    path=path,
                    base=home,
                    spool=str(spool.absolute()),
                    source=source.name,
                    shape=shape,
                    preferences=recipe.preferences,
                    agent=agent,
                    share=share,
                )
            )
            owners.append(number)
    if share or any(is_elsewhere(scan.path) or is_run_folder(scan.data) for scan in scans):
        access = StoreAccess(options=recipe.as_json()["store"])
        scans = stores.in_parallel(located, [replace(scan, access=access) for scan in scans])
    total = sum(size_and_time(scan)[0] for scan in scans)
    shard_bytes = recipe.shard_bytes or chunk_size(total)
    sizes = [max(1, int(shard_bytes / max(1.0, recipe.sources[owner].weight))) for owner in owners]
    scans = [replace(scan, chunk_bytes=size) for scan, size in zip(scans, sizes, strict=True)]
    scans = [replace(scan, known=lookup(scan)) for scan in scans]  # which depends on the size
    scanned = scan_inputs(scans, executor)
    files: list[list[ChunkPiece]] = []
    capped: Counter[str] = Counter()
    left = [source.max_records for source in recipe.sources]
    for owner, result in zip(owners, scanned, strict=True):
        pieces: list[ChunkPiece] = []
        for chunk in result.chunks:
            count, remaining = chunk.count, left[owner]
            if remaining is not None:
                count = min(count, remaining)
                left[owner] = remaining - count
                capped[chunk.source] += chunk.count - count
            if count:
                pieces.append(ChunkPiece(chunk, recipe.sources[owner], count if count < chunk.count else None))
        files.append(pieces)
    chunks = shared_chunks(files, owners, shard_bytes)
    if any(group_field(source, recipe) for source in recipe.sources):
        chunks = whole_groups(chunks, lambda source: group_field(source, recipe), executor)
    return SourcePlan(
        files=tuple(result.file for result in scanned),
        chunk_bytes=tuple(sizes),
        chunks=chunks,
        capped=capped,
        base=base,
        agents=tuple(scan.agent for scan in scans),
    )


def located(scan: InputScan) -> InputScan:
    """Find the file of an order: in its store, or as a copy of standard input, which other machines may need.

    The files of a run folder are copied into one, as workers read files.
    """
    if scan.path == STDIN or is_run_folder(scan.data):
        if scan.path == STDIN:
            copy = stdin_copy()
        else:
            copy = RunFolder(scan.data).copy_into(Path(scan.spool, "runs"))
        if not scan.share:
            return replace(scan, copy=str(copy))
        digest = Hash.XXH128.of_file(copy)
        return replace(scan, far=share_input(copy, f"{scan.share}/{digest}-{copy.name}", scan.access))
    if is_elsewhere(scan.path):
        refuse_keys_in_input(scan.path)
        return replace(scan, far=find_input(scan.path, scan.access))
    return scan


def group_field(source: Source, recipe: Recipe) -> str | None:
    """Return the field that keeps records of a source together in chunks: they share a tree, or one is picked."""
    if recipe.tree is not None:
        return recipe.tree.group
    return None if source.pick is None else source.pick.group


def chunk_size(total: int) -> int:
    """Bytes of a chunk for an input of `total` bytes: a power of two, so that a little more input changes no border.

    Small enough that whatever takes seconds keeps many cores busy, and large enough that shards stay few.
    """
    return min(LARGEST, max(SMALLEST, 1 << max(total // MANY_CHUNKS, 1).bit_length() - 1))


def input_bytes(recipe: Recipe, base: Path | None = None) -> int | None:
    """Bytes of all input files; None if some are elsewhere, or cannot be found, which `plan_sources` reports."""
    try:
        paths = [path for source in recipe.sources for path in _files_of(source, base)]
        if any(map(is_elsewhere, paths)):
            return None
        return sum(os.stat((base or Path()) / path).st_size for path in paths)
    except (ChatmillError, OSError):
        return None


def _files_of(source: Source, base: Path | None) -> list[str]:
    """Return the files of a source, as they are named in the dataset."""
    if base is None:
        return [os.fspath(path) for path in resolve_paths(source.patterns)]
    named = [name if is_elsewhere(name) else str(base / name) for name in source.patterns]
    paths = resolve_paths(named)
    return [os.path.relpath(path, base) if isinstance(path, Path) else os.fspath(path) for path in paths]


def shared_chunks(files: Sequence[Sequence[ChunkPiece]], owners: Sequence[int], shard_bytes: int) -> Chunks:
    """Put small neighbouring files of one source together, so that many small files make few shards.

    Where a group ends is, until it is full, decided by the content of its last file: a file that is added or removed
    changes the group it is in, and the next groups only up to the first such end. A file that is cut shares no chunk.
    """
    chunks: list[list[ChunkPiece]] = []
    room, last_owner = 0.0, None
    for pieces, owner in zip(files, owners, strict=True):
        if len(pieces) != 1:
            chunks += [[piece] for piece in pieces]
            room = 0.0 if pieces else room
            continue
        (piece,) = pieces
        size = piece.range.bytes * max(1.0, piece.rules.weight)
        if owner != last_owner or size > room:
            chunks.append([])
            room = float(shard_bytes)
        chunks[-1].append(piece)
        ends = int(piece.range.digest[:16], 16) % shard_bytes < size
        room, last_owner = 0.0 if ends else room - size, owner
    return tuple(map(tuple, chunks))
