"""Where the shards of a chunk and its receipt are: written by a worker, and found again by a later build.

A shard is written once, at its final place: `train/shard_00012` is what chunk 12 became. The receipt of the chunk is
written last, so a chunk is whole where its receipt is. Workers do not sync, so that none waits for the disk: the driver
does, and a build that is resumed after the machine went down finds out by the hashes of the receipts.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatmill.compiler.chunk_output import REJECTED
from chatmill.compiler.engines.local import available_cores
from chatmill.core.canonical import canonical_json
from chatmill.core.checksums import FileRecord
from chatmill.core.publish import publish_folder, storing, sync_files, temporary_folder
from chatmill.errors import FormatError
from chatmill.files.builds import RemoteBuild, chunk_folder
from chatmill.store.episode_layout import INDEX, WORK, shard_name
from chatmill.store.episode_manifest import shard_from_json
from chatmill.store.receipts import chunk_receipt

RECEIPTS = "receipts"
"""In the work folder: the receipts of the chunks that are whole."""
CHUNKS = "chunks.jsonl"
"""In a finished dataset: the receipts of all chunks, one a line."""
Receipt = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlace:
    """The places of one chunk in the folder of a dataset."""

    directory: Path
    number: int
    is_only: bool
    """The build has no other chunk: its splits are flat."""
    store: RemoteBuild | None = None
    """Where the shards go instead; `directory` is then the driver's own, of plan and accounts."""

    def shard(self, split: str) -> Path:
        """Return where the shard of a split is."""
        return self.directory / self.shard_name(split)

    def shard_name(self, split: str) -> str:
        """Return the name of the shard of a split, below the folder of the dataset."""
        return split if self.is_only else f"{split}/{shard_name(self.number)}"

    @property
    def receipt(self) -> Path:
        """Where its receipt is, until the dataset is finished."""
        return self.directory / WORK / RECEIPTS / f"{self.number:06d}.json"

    @property
    def rejected(self) -> Path:
        """The same for its rejected records."""
        return self.receipt.with_suffix(".rejected")

    def publish(self, write: Callable[[Path], Receipt]) -> Receipt:
        """Let `write` fill a temporary folder, one subfolder per split, and rename all into place, the receipt last."""
        if self.store is not None:
            return self._upload(self.store, write)
        folder = temporary_folder(self.directory / WORK / "made")
        try:
            with storing(self.directory, "write the dataset in"):
                receipt = write(folder)
                self.receipt.parent.mkdir(exist_ok=True)
                for split in receipt["splits"]:
                    self.shard(split).parent.mkdir(exist_ok=True)
                    publish_folder(folder / split, self.shard(split), replace=True, synced=False)
                if receipt["rejected"] is not None:
                    os.replace(folder / REJECTED, self.rejected)
                (folder / self.receipt.name).write_bytes(canonical_json(receipt) + b"\n")
                os.replace(folder / self.receipt.name, self.receipt)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # on a full disk this may be what lets the others finish
        return receipt

    def _upload(self, store: RemoteBuild, write: Callable[[Path], Receipt]) -> Receipt:
        """Let `write` fill a folder of this machine, and upload all from there, the receipt last."""
        with chunk_folder() as folder:
            receipt = write(folder)
            shards = {self.shard_name(split): folder / split for split in receipt["splits"]}
            rejected = folder / REJECTED if receipt["rejected"] is not None else None
            store.put_chunk(shards, canonical_json(receipt) + b"\n", self.number, rejected)
            if self.directory.is_dir():  # the driver is on this machine, and needs the indexes in the end
                for name, shard in shards.items():
                    (self.directory / name).mkdir(parents=True, exist_ok=True)
                    os.replace(shard / INDEX, self.directory / name / INDEX)
        return receipt

    def whole_receipt(self, fingerprint: str) -> Receipt | None:
        """Return the receipt of this chunk, if its files are there with the sizes and hashes that it states."""
        try:
            receipt: Receipt = chunk_receipt(self.receipt.read_bytes(), str(self.receipt))
            if self.store is not None:  # their sizes were compared with the listing of the store
                return receipt if receipt["fingerprint"] == fingerprint else None
            files = [
                (self.shard(split) / name, record) for split, name, record in shard_files(receipt, str(self.receipt))
            ]
            if receipt["rejected"] is not None:
                files.append((self.rejected, FileRecord.from_json(receipt["rejected"])))
            if receipt["fingerprint"] == fingerprint and all(record.is_of(path) for path, record in files):
                return receipt
        except (OSError, FormatError):
            pass
        self.receipt.unlink(missing_ok=True)
        return None

    def sync(self, receipt: Mapping[str, Any]) -> None:
        """Wait until its shards are on the disk; a store has them already."""
        if self.store is not None:
            return
        with storing(self.directory, "write to the disk"):
            for split, record in receipt["splits"].items():
                sync_files(self.shard(split), record["files"])


def shard_files(receipt: Mapping[str, Any], where: str) -> Iterator[tuple[str, str, FileRecord]]:
    """Split, name and record of every file of a chunk's shards."""
    for split, shard in receipt["splits"].items():
        for name, record in shard_from_json(shard, where).files.items():
            yield split, name, record.record


def whole_receipts(places: Iterable[tuple[ChunkPlace, str]]) -> dict[int, Receipt]:
    """Read the receipts of all chunks (place and fingerprint) that exist and are whole, by number."""
    chunks = [(place, fingerprint) for place, fingerprint in places if place.receipt.exists()]
    with ThreadPoolExecutor(max(1, min(len(chunks), available_cores()))) as threads:  # hashing releases the GIL
        receipts = threads.map(lambda chunk: (chunk[0].number, chunk[0].whole_receipt(chunk[1])), chunks)
        return {number: receipt for number, receipt in receipts if receipt is not None}
