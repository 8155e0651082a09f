"""What one chunk becomes: the shards of its splits, its ledger and its rejected records, published whole in a folder.

The folder has a temporary name until it is whole, and the receipt in it is written last. It is not synced here, so that
no worker waits for the disk. Should the machine itself go down, a resumed build finds out by the hashes of the receipt.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from chatmill.compiler.faults import fault_point
from chatmill.compiler.ledger import Ledger
from chatmill.compiler.publish import canonical_json, publish_folder, storing, temporary_folder, write_atomic
from chatmill.store.durable import Durability, GrowingFile, WordSum
from chatmill.store.episode_columns import EpisodeColumns, SourceCodes
from chatmill.store.episode_manifest import COLUMNS, FileRecord, ShardRecord
from chatmill.store.shard_writer import ShardWriter, write_shard

REJECTED = "rejected.jsonl"
RECEIPT = "receipt.json"
STATE = "state.json"
"""In the work folder: which build is at work there."""
SHARDS = "shards"
"""In the work folder: the shards that are made, by the number of their chunk."""


class ChunkOutput:
    """The episodes of each split, the ledger, and the rejected records of one chunk, in memory until `write`."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.rejected_lines: list[str] = []
        """JSON with its line end."""
        self._episodes: dict[str, list[EpisodeColumns]] = {}
        self._sources: dict[str, SourceCodes] = {}

    def sources(self, split: str) -> SourceCodes:
        """The source codes of a split."""
        return self._sources.setdefault(split, SourceCodes())

    def append(self, split: str, columns: EpisodeColumns) -> None:
        """Add episodes to a split; all of a split have the same columns."""
        self._episodes.setdefault(split, []).append(columns)

    def write(self, number: int, folder: Path, **more: Any) -> dict[str, Any]:
        """Write everything into a folder, the receipt last; `more` becomes part of the receipt."""
        splits = {split: record.to_json() for split, record in sorted(self._write_splits(folder).items())}
        rejected = self._write_rejected(folder)
        fault_point("after_shard_write")
        receipt = {
            "number": number,
            "splits": splits,
            "ledger": self.ledger.as_json(),
            "rejected": None if rejected is None else asdict(rejected),
            **more,
        }
        fault_point("before_receipt")
        write_atomic(folder / RECEIPT, canonical_json(receipt), step="receipt", durability=Durability.SCRATCH)
        return receipt

    def _write_splits(self, folder: Path) -> dict[str, ShardRecord]:
        return {
            split: write_shard(
                folder / split, "", parts, sources=self.sources(split).names, durability=Durability.SCRATCH
            )
            for split, parts in sorted(self._episodes.items())
        }

    def _write_rejected(self, folder: Path) -> FileRecord | None:
        rejected = "".join(self.rejected_lines).encode()
        if not rejected:
            return None
        (folder / REJECTED).write_bytes(rejected)
        return FileRecord(bytes=len(rejected), sha256=hashlib.sha256(rejected).hexdigest())


class StreamedOutput(ChunkOutput):
    """The same, written while it comes, for chunks whose size nothing bounds; episodes have no masks and no sources.

    Its shards are no part of a dataset: an export reads them, which has hashes of its own.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` is the one that `write` gets."""
        super().__init__()
        self._folder = folder
        self._writers: dict[str, ShardWriter] = {}
        self._rejected: GrowingFile | None = None

    def append(self, split: str, columns: EpisodeColumns) -> None:
        """Write episodes behind those that are there."""
        if split not in self._writers:
            specs = [column for column in COLUMNS if column.name in columns.names]
            self._writers[split] = ShardWriter(
                self._folder / split, specs, masks=False, durability=Durability.SCRATCH, digest=WordSum
            )
        self._writers[split].append(columns)

    def reject(self, line: str) -> None:
        """Write the entry of a record that cannot be used: JSON with its line end."""
        if self._rejected is None:
            self._rejected = GrowingFile(self._folder / REJECTED, Durability.SCRATCH)
        self._rejected.write(line.encode())

    def close(self) -> None:
        """Close all files after an error; what was written goes with its folder."""
        for writer in self._writers.values():
            writer.discard()
        if self._rejected is not None:
            self._rejected.discard()

    def _write_splits(self, folder: Path) -> dict[str, ShardRecord]:
        return {split: replace(writer.finish(""), sources=()) for split, writer in self._writers.items()}

    def _write_rejected(self, folder: Path) -> FileRecord | None:
        return None if self._rejected is None else self._rejected.finish()


def publish_chunk(
    final: Path, write: Callable[[Path], dict[str, Any]], *, step: str = "shard_folder"
) -> dict[str, Any]:
    """Let `write` fill a folder, and give it its name; returns the receipt."""
    temporary = temporary_folder(final)
    try:
        with storing(final):
            receipt = write(temporary)
            publish_folder(temporary, final, replace=True, step=step, durability=Durability.SCRATCH)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # on a full disk this may be what lets the others finish
        raise
    return receipt
