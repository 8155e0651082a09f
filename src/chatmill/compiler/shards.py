"""Shards that workers have made: which are whole, how they get to the disk, and their way into the dataset."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.compiler.chunk_output import RECEIPT, REJECTED, ChunkOutput, publish_with_receipt
from chatmill.compiler.faults import fault_point
from chatmill.compiler.publish import (
    AtomicFile,
    canonical_json,
    storing,
    write_atomic,
)
from chatmill.core.whole_file import sync_folder
from chatmill.errors import FormatError
from chatmill.store.checksums import FileRecord, Hash
from chatmill.store.durable import remove_path, sync_files
from chatmill.store.episode_columns import EpisodeColumns, SourceCodes
from chatmill.store.episode_layout import MANIFEST, shard_name
from chatmill.store.episode_manifest import (
    COLUMNS,
    EpisodeManifest,
    ShardRecord,
    manifest_of_shards,
    shard_from_json,
)
from chatmill.store.episode_shard import EpisodeShard

VAL = "val"
JOINED = "joined"
"""In the work folder: the splits as they will be in the dataset."""
MOVES = "moves.json"
"""In the work folder: which shards are being moved into `joined`, so that they can be moved back."""
SYNC_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A shard of one split, and where it lies."""

    folder: Path
    record: ShardRecord


def made_shards(chunks: Iterable[tuple[Path, Mapping[str, Any]]]) -> dict[str, list[Made]]:
    """The shards of each split that chunks have made, from the folders and receipts of these."""
    made: dict[str, list[Made]] = {}
    for folder, receipt in chunks:
        for split, record in receipt["splits"].items():
            shard = Made(folder=folder / split, record=shard_from_json(record, str(folder)))
            made.setdefault(split, []).append(shard)
    return dict(sorted(made.items()))


def whole_receipt(folder: Path) -> dict[str, Any] | None:
    """The receipt of a published folder whose files have the sizes and hashes that it states.

    Anything else is removed: the machine went down before it was on the disk.
    """
    try:
        receipt: dict[str, Any] = json.loads((folder / RECEIPT).read_bytes())
        if all(record.is_of(folder / name) for name, record in _file_records(receipt, str(folder))):
            return receipt
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    remove_path(folder)
    return None


def _file_records(receipt: Mapping[str, Any], where: str) -> Iterator[tuple[str, FileRecord]]:
    for split in receipt["splits"]:
        for name, record in shard_from_json(receipt["splits"][split], where).files.items():
            yield f"{split}/{name}", record
    if receipt.get("rejected"):
        yield REJECTED, FileRecord.from_json(receipt["rejected"])
    for name, record in receipt.get("files", {}).items():
        yield name, FileRecord.from_json(record)


class DiskSync:
    """Syncs shards to disk in threads while the workers continue; all of them are there after `wait`."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(SYNC_THREADS, thread_name_prefix="chatmill-to-disk")
        self._pending: list[Future[None]] = []

    def add(self, folder: Path, receipt: Mapping[str, Any]) -> None:
        """Begin with what a chunk has made; an error of the disk met so far is raised here."""
        self._pending.append(self._threads.submit(_sync_made, folder, receipt))
        while self._pending and self._pending[0].done():
            self._pending.pop(0).result()

    def wait(self) -> None:
        """Until everything is on the disk."""
        while self._pending:
            self._pending.pop(0).result()

    def __enter__(self) -> DiskSync:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(cancel_futures=True)


def _sync_made(folder: Path, receipt: Mapping[str, Any]) -> None:
    with storing(folder, "write to the disk"):
        for split in receipt["splits"]:
            sync_files(folder / split, receipt["splits"][split]["files"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ValJob:
    """The order to put the validation episodes of several chunks into one shard; small and picklable."""

    number: int
    parts: tuple[str, ...]
    """The folders of those chunks, in order."""
    work: str

    @property
    def label(self) -> str:
        """The job in words."""
        return f"validation shard {self.number} ({len(self.parts)} chunks)"

    @property
    def folder(self) -> Path:
        """Where the shard is published."""
        return Path(self.work) / VAL / f"{self.number:06d}"


def val_groups(tokens: Sequence[int], most: int) -> list[list[int]]:
    """Places of neighbours that share a shard: few of them, and no more than `most` tokens in those that are shared."""
    groups: list[list[int]] = []
    room = 0
    for place, count in enumerate(tokens):
        if not groups or count > room:
            groups.append([])
            room = most
        groups[-1].append(place)
        room -= count
    return groups


def join_val(job: ValJob) -> dict[str, Any]:
    """Write one validation shard and publish it, as `compile_chunk` does; gives the receipt."""

    def write(folder: Path) -> dict[str, Any]:
        with ChunkOutput(folder) as output:
            for part in map(Path, job.parts):
                record = shard_from_json(json.loads((part / RECEIPT).read_bytes())["splits"][VAL], str(part))
                output.append(VAL, _columns(part / VAL, record, output.sources(VAL)))
            return output.receipt(job.number)

    return publish_with_receipt(job.folder, write, step="val")


def _columns(folder: Path, record: ShardRecord, codes: SourceCodes) -> EpisodeColumns:
    """A whole shard as columns (views of its files), with source codes of the common table."""
    specs = [column for column in COLUMNS if column.file in record.files]
    shard = EpisodeShard(folder, specs)
    return EpisodeColumns(
        ids=shard.token_ids,
        lengths=shard.index[:, 1].astype(np.int64),
        mask=shard.mask,
        kinds=shard.column("kinds") if any(spec.name == "kinds" for spec in specs) else None,
        source=codes.translate(shard.column("source"), record.sources or ()),
        turns=shard.column("turns"),
        trained=shard.column("trained"),
        record_id=shard.texts("record_id", 0, shard.episodes),
    )


def gather_splits(work: Path, made: Mapping[str, Sequence[Made]]) -> dict[str, EpisodeManifest]:
    """Move all shards to their places in `joined` and write the manifests of the splits.

    A split of one shard is flat: its files are in the folder of the split itself.
    """
    joined = work / JOINED
    moves = [
        (shard.folder.relative_to(work).as_posix(), _place(split, number, shards).as_posix())
        for split, shards in made.items()
        for number, shard in enumerate(shards)
    ]
    write_atomic(work / MOVES, canonical_json(moves), step="moves")
    joined.mkdir(exist_ok=True)
    for split, shards in made.items():
        if len(shards) > 1:
            (joined / split).mkdir(exist_ok=True)
    for source, target in moves:
        os.rename(work / source, work / target)
        fault_point("after_shard_move")
    manifests = {}
    for split, shards in made.items():
        names = [shard_name(number) if len(shards) > 1 else "" for number in range(len(shards))]
        records = [replace(shard.record, name=name) for shard, name in zip(shards, names, strict=True)]
        columns = tuple(column for column in COLUMNS if column.file in records[0].files)
        manifests[split] = manifest_of_shards(split, columns, records)
        write_atomic(joined / split / MANIFEST, manifests[split].to_bytes(), step="split_manifest")
        sync_folder(joined / split)
    return manifests


def _place(split: str, number: int, shards: Sequence[Made]) -> Path:
    return Path(JOINED, split, shard_name(number)) if len(shards) > 1 else Path(JOINED, split)


def scatter_splits(work: Path) -> None:
    """Undo `gather_splits`: a build that was stopped behind it finds its shards where they were made."""
    try:
        moves = json.loads((work / MOVES).read_bytes())
    except FileNotFoundError:
        moves = []
    except ValueError as error:
        raise FormatError(f"{work / MOVES} cannot be read: {error}; delete {work} and build again") from None
    for source, target in moves:
        if (work / target).is_dir() and not (work / source).exists():
            with contextlib.suppress(FileNotFoundError):  # the machine went down: that chunk is made again
                os.rename(work / target, work / source)
    remove_path(work / JOINED)
    (work / MOVES).unlink(missing_ok=True)


def join_rejected(folders: Iterable[Path], path: Path, hash: Hash = Hash.XXH128) -> FileRecord | None:
    """Write the rejected records of all chunks, in order, into one file; None: there are none."""
    there = [folder / REJECTED for folder in folders if (folder / REJECTED).is_file()]
    if not there:
        return None
    with AtomicFile(path, step="rejected_file", hash=hash) as file:
        for part in there:
            file.write(part.read_bytes())
    return file.record
