"""Checksums on read: the files of a shard are compared with the hashes of its manifest before any value is read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from chatmill.errors import ConfigError, FormatError
from chatmill.store.episode_manifest import FileRecord


def file_problems(folder: Path, files: Mapping[str, FileRecord], manifest: str = "the manifest") -> Iterator[str]:
    """One line for each file that is missing, has another size, or other bytes."""
    for name, record in files.items():
        path = folder / name
        if not path.is_file():
            yield f"{path}: missing; {manifest} names it"
        elif path.stat().st_size != record.bytes:
            yield f"{path}: {path.stat().st_size:,} bytes, {manifest} says {record.bytes:,}"
        elif (found := sha256_of(path)) != record.sha256:
            yield f"{path}: sha256 {found}, {manifest} says {record.sha256}: bytes were changed"


def sha256_of(path: Path) -> str:
    """The hash of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class CheckedShards:
    """Compares each shard once, when it is first asked for; a `FormatError` names the file and both hashes."""

    def __init__(self, shards: Iterable[tuple[Path, Mapping[str, FileRecord]]]) -> None:
        """Folder and files of every shard, in order."""
        self._unchecked = dict(enumerate(shards))

    def check(self, number: int) -> None:
        """Compare a shard unless it has passed before; a wrong one is an error each time."""
        if number not in self._unchecked:
            return
        folder, files = self._unchecked[number]
        for problem in file_problems(folder, files):
            raise FormatError(f"{problem}. Copy or build the dataset again; `chatmill verify` lists all such files")
        del self._unchecked[number]


def no_hashes(folder: Path) -> ConfigError:
    """The error for a split that is to be checked and has no manifest."""
    return ConfigError(
        f"{folder}: check=True compares files with the hashes of a manifest, and this split has none; open it without "
        "check, or write it with EpisodeWriter or `chatmill build`"
    )
