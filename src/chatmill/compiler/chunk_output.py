"""What one chunk becomes: the shards of its splits, its ledger and its rejected records, published whole in a folder.

The folder has a temporary name until it is whole, and the receipt in it is written last. It is not synced here, so that
no worker waits for the disk. Should the machine itself go down, a resumed build finds out by the hashes of the receipt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from msgspec.structs import replace

from chatmill.core.canonical import canonical_json
from chatmill.core.checksums import FileRecord
from chatmill.core.ledger import Ledger
from chatmill.core.publish import GrowingFile, remove_path, storing, whole_folder
from chatmill.store.episode_columns import EpisodeColumns, SourceCodes
from chatmill.store.episode_manifest import COLUMNS, ColumnSpec, shard_from_json
from chatmill.store.shard_writer import ShardWriter

REJECTED = "rejected.jsonl"
RECEIPT = "receipt.json"
STATE = "state.json"
"""In the work folder: which build is at work there."""


class ChunkOutput:
    """The episodes of each split, the ledger, and the rejected records of one chunk; files are written as these come.

    Behind its `with` block nothing is open. After an error, what was written goes with its folder.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` is one that `publish_with_receipt` made."""
        self.ledger = Ledger()
        self._folder = folder
        self._shards: dict[str, ShardWriter] = {}
        self._sources: dict[str, SourceCodes] = {}
        self._rejected: GrowingFile | None = None

    def sources(self, split: str) -> SourceCodes:
        """The source codes of a split."""
        return self._sources.setdefault(split, SourceCodes())

    def begin(self, split: str, columns: Sequence[ColumnSpec], *, masks: bool) -> None:
        """Begin the shard of a split, with these columns beside the three files."""
        self._shards[split] = ShardWriter(self._folder / split, columns, masks=masks)

    def append(self, split: str, columns: EpisodeColumns) -> None:
        """Write episodes behind those of the split that are there; all of a split have the same columns."""
        if split not in self._shards:
            specs = [column for column in COLUMNS if column.name in columns.names]
            self.begin(split, specs, masks=columns.mask is not None)
        self._shards[split].append(columns)

    def write_rejected(self, line: str) -> None:
        """Write the entry of a record that cannot be used: JSON without a line end."""
        if self._rejected is None:
            self._rejected = GrowingFile(self._folder / REJECTED)
        self._rejected.write(f"{line}\n".encode())

    def receipt(self, number: int, **more: Any) -> dict[str, Any]:
        """Finish all files; the receipt of the chunk, of which `more` becomes part."""
        splits = {
            split: replace(writer.finish(""), sources=tuple(self.sources(split).names)).to_json()
            for split, writer in sorted(self._shards.items())
        }
        rejected = None if self._rejected is None else self._rejected.finish().to_json()
        return {"number": number, "splits": splits, "ledger": self.ledger.as_json(), "rejected": rejected, **more}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            for writer in self._shards.values():
                writer.discard()
            if self._rejected is not None:
                self._rejected.discard()


def publish_with_receipt(
    final: Path, write: Callable[[Path], dict[str, Any]], *, replace: bool = True
) -> dict[str, Any]:
    """Let `write` fill a folder, put the receipt that it gives beside the files, and give the folder its name."""
    with storing(final), whole_folder(final, replace=replace, synced=False) as temporary:
        receipt = write(temporary)
        (temporary / RECEIPT).write_bytes(canonical_json(receipt))
    return receipt


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
            yield f"{split}/{name}", record.record
    if receipt.get("rejected"):
        yield REJECTED, FileRecord.from_json(receipt["rejected"])
    for name, record in receipt.get("files", {}).items():
        yield name, FileRecord.from_json(record)
