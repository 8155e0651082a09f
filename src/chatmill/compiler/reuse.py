"""Incremental builds: chunks whose fingerprint an earlier dataset has are linked from it, and not made again.

The bytes of a shard depend on its chunk alone, and the fingerprint of a chunk names all that they depend on. So the
result has the bytes of a full build.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from chatmill.compiler.chunk_output import REJECTED
from chatmill.compiler.chunk_shards import CHUNKS, ChunkPlace, Receipt, shard_files
from chatmill.compiler.cuts import ChunkCut
from chatmill.compiler.inputs import InputScan, KnownFile
from chatmill.core.checksums import INPUT_HASH, FileRecord
from chatmill.core.publish import sync_file, sync_folder
from chatmill.errors import ConfigError, FormatError
from chatmill.store.episode_layout import dataset_folder
from chatmill.store.receipts import chunk_receipt, read_manifest


class EarlierBuild:
    """A finished dataset, its chunks by their fingerprints, and its inputs by their names."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Open it; a folder without a finished build, or one that was changed, is an error."""
        self.directory = dataset_folder(directory, whole=True)
        manifest = read_manifest(self.directory)
        if manifest is None:
            raise ConfigError(f"{self.directory} holds no finished build to reuse; name one, or build without --reuse")
        for name in (CHUNKS, REJECTED):
            if name in manifest["files"] and not FileRecord.from_json(manifest["files"][name]).is_of(
                self.directory / name
            ):
                raise FormatError(f"{self.directory / name} is missing or was changed: build without --reuse")
        chunks = self.directory / CHUNKS
        if not chunks.is_file():
            raise FormatError(f"{chunks} is missing: build without --reuse")
        self._receipts: list[Receipt] = [chunk_receipt(line, str(chunks)) for line in chunks.read_bytes().splitlines()]
        self._numbers = {receipt["fingerprint"]: number for number, receipt in enumerate(self._receipts)}
        sizes = [receipt["rejected"]["bytes"] if receipt["rejected"] else 0 for receipt in self._receipts]
        self._rejected_starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self._pieces: dict[str, dict[int, dict[str, Any]]] = {}
        """Of each input, by where they begin; two chunks may have parts of one."""
        for receipt in self._receipts:
            for piece in receipt["pieces"]:
                self._pieces.setdefault(piece["path"], {})[piece["start"]] = piece
        self._inputs = {
            file["path"]: {**file, **seen} for file, seen in zip(manifest["inputs"], manifest["scanned"], strict=True)
        }

    def known(self, scan: InputScan) -> KnownFile | None:
        """Return what is known of an input if its size and modification time are unchanged; None: read it."""
        seen = self._inputs.get(scan.path)
        if scan.copy or scan.far or seen is None:
            return None
        try:
            status = os.stat(scan.data)
        except OSError:
            return None
        if (status.st_size, status.st_mtime_ns) != (seen["bytes"], seen["mtime_ns"]):
            return None
        cuts = tuple(
            ChunkCut(**{name: piece[name] for name in ("start", "stop", "first", "count", "digest")})
            for piece in self._pieces.get(scan.path, {}).values()
        )
        whole = seen["chunk_bytes"] == scan.chunk_bytes and sum(cut.count for cut in cuts) == seen["lines"]
        return KnownFile(digest=seen[INPUT_HASH], cuts=cuts if whole else ())

    def take(self, place: ChunkPlace, fingerprint: str, *, fails: bool = False) -> Receipt | None:
        """Link the shards of a chunk to their places in another dataset; None: it has no such chunk whole.

        `fails`: one with records that were put aside is not taken either.
        """
        number = self._numbers.get(fingerprint)
        if number is None or (fails and self._receipts[number]["rejected"] is not None):
            return None
        receipt = {**self._receipts[number], "number": place.number}
        old = ChunkPlace(directory=self.directory, number=number, is_only=len(self._receipts) == 1)
        files = [(old.shard(split) / name, split, name, record) for split, name, record in shard_files(receipt, CHUNKS)]
        if not all(path.is_file() and path.stat().st_size == record.bytes for path, _, _, record in files):
            return None

        def link(folder: Path) -> Receipt:
            for path, split, name, _ in files:
                (folder / split).mkdir(exist_ok=True)
                _link(path, folder / split / name)
            for split in receipt["splits"]:
                sync_folder(folder / split)
            if receipt["rejected"] is not None:
                (folder / REJECTED).write_bytes(self._rejected(number, receipt["rejected"]["bytes"]))
            return receipt

        return place.publish(link)

    def _rejected(self, number: int, size: int) -> bytes:
        with (self.directory / REJECTED).open("rb") as file:
            file.seek(self._rejected_starts[number])
            return file.read(size)


def _link(source: Path, target: Path) -> None:
    """Give a file a second name; where that cannot be, as on another disk, copy it."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)
        sync_file(target)
