"""Episodes to write, and folders to do it in."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from chatmill.core.checksums import FileRecord
from chatmill.store.episode_writer import EpisodeWriter
from tests.hashes import file_entry

MEMORY = "/dev/shm"
EIO = OSError(errno.EIO, os.strerror(errno.EIO))


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """An empty folder, in memory if there is one: what is written here is synced often."""
    usable = os.access(MEMORY, os.W_OK)
    with tempfile.TemporaryDirectory(prefix="chatmill-test-", dir=MEMORY if usable else None) as name:
        yield Path(name)


def files(place: Path) -> dict[str, bytes]:
    """Relative name -> bytes of every file below a folder."""
    return {str(p.relative_to(place)): p.read_bytes() for p in sorted(place.rglob("*")) if p.is_file()}


def record_of(data: bytes) -> FileRecord:
    return FileRecord.from_json(file_entry(data))


class Made(NamedTuple):
    """An episode; a fractional one needs a float32 mask."""

    ids: list[int]
    fractional: bool
    source: str
    record_id: str

    @property
    def weights(self) -> list[float]:
        return [0.5 if self.fractional else token % 3 for token in self.ids]


def append(writer: EpisodeWriter, batch: Sequence[Made]) -> None:
    """Append a batch with all columns but the kinds."""
    for made in batch:
        writer.append(made.ids, made.weights, source=made.source, turns=len(made.ids), record_id=made.record_id)


def make(tokens: int, *, fractional: bool = False, source: str = "a", number: int = 1) -> Made:
    return Made([number] * tokens, fractional, source, f"r{number}é")


BATCHES = [
    [make(3, number=1), make(4, number=2, source="b")],
    [make(3, number=4), make(2, number=5, source="c")],
    [make(4, number=7, fractional=True), make(1, number=8)],
    [make(2, number=10, source="d"), make(6, number=11), make(1, number=13)],
    [make(3, number=14, source="b")],
]


def begin(place: Path, batches: Sequence[Sequence[Made]], shard_tokens: int = 9) -> EpisodeWriter:
    writer = EpisodeWriter(place, "train", shard_tokens)
    for batch in batches:
        append(writer, batch)
    return writer
